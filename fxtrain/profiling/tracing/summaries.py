"""Where the time of a step goes, by rank."""

import os
from collections.abc import Iterable
from pathlib import Path

import attrs
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from fxtrain._errors import PlanError
from fxtrain._record import few
from fxtrain.profiling.tracing.chrome import PHASES, Activity, read_trace
from fxtrain.profiling.tracing.spans import Span, clip, length, subtract, union

__all__ = ["RankTimes", "StepTimes", "Summary", "summarize", "summary"]


@attrs.frozen(kw_only=True)
class StepTimes:
    """The time of one step, or of several, in nanoseconds.

    `data_ns`, `forward_ns`, `backward_ns`, `communication_ns`, `optimizer_ns` and `idle_ns` add
    up to `step_ns`. On an accelerator they say what the device did, on a CPU what the process did.

    Attributes:
        step_ns: All of it.
        data_ns: Reading and copying the batch, while nothing else ran.
        forward_ns: Forward, loss, and every operator outside the other phases.
        backward_ns: Backward.
        communication_ns: Exposed: a collective ran or waited, and nothing computed.
        hidden_ns: Communication during computation; not part of the sum.
        optimizer_ns: `step` and `zero_grad` of optimizers.
        idle_ns: Nothing ran: Python between operators, or waiting.
    """

    step_ns: int
    data_ns: int
    forward_ns: int
    backward_ns: int
    communication_ns: int
    hidden_ns: int
    optimizer_ns: int
    idle_ns: int

    @property
    def own_ns(self) -> int:
        """Time in which the rank did not wait for communication."""
        return self.step_ns - self.communication_ns


_FIELDS = tuple(field.name for field in attrs.fields(StepTimes))
_COLUMNS = ("step", "data", "forward", "backward", "communication", "hidden", "optimizer", "idle")
_PARTS = ("data", "forward", "backward", "optimizer", "idle")


@attrs.frozen(kw_only=True)
class RankTimes:
    """The recorded steps of one rank.

    Attributes:
        rank: The rank.
        steps: Its steps, in order, over all cycles.
        flops: Floating-point operations of all those steps; None if not counted.
    """

    rank: int
    steps: tuple[StepTimes, ...]
    flops: int | None = None

    @property
    def total(self) -> StepTimes:
        """The sum of all steps."""
        sums = {name: sum(getattr(step, name) for step in self.steps) for name in _FIELDS}
        return StepTimes(**sums)


@attrs.frozen(kw_only=True)
class Summary:
    """Where the time of a step goes, by rank; prints as a table with rich.

    Attributes:
        ranks: The ranks that were profiled, in order.
    """

    ranks: tuple[RankTimes, ...]

    @property
    def slowest(self) -> int | None:
        """The rank that the others wait for: most time per step without communication.

        None if only one rank was profiled.
        """
        if len(self.ranks) < 2:
            return None
        return max(self.ranks, key=_own_per_step).rank

    @property
    def columns(self) -> dict[str, list[float]]:
        """Milliseconds per step by column, with an entry for each rank: for `run.table`."""
        sums = [(one.total, len(one.steps)) for one in self.ranks]
        times = {
            name: [round(getattr(total, field) / steps / 1e6, 3) for total, steps in sums]
            for name, field in zip(_COLUMNS, _FIELDS, strict=True)
        }
        return {"rank": [one.rank for one in self.ranks], **times}

    def __rich__(self) -> RenderableType:
        """A table of milliseconds per step."""
        grid = Table("rank", box=box.SIMPLE_HEAD, pad_edge=False, title="ms per step")
        for name in _COLUMNS:
            grid.add_column(name, justify="right")
        counted = any(one.flops is not None for one in self.ranks)
        if counted:
            grid.add_column("GFLOP", justify="right")
        for one in self.ranks:
            total, steps = one.total, len(one.steps)
            cells = [f"{getattr(total, name) / steps / 1e6:.3f}" for name in _FIELDS]
            if counted:
                cells.append("" if one.flops is None else f"{one.flops / steps / 1e9:.3g}")
            grid.add_row(str(one.rank), *cells)
        return Group(grid, *self._verdict())

    def _verdict(self) -> list[str]:
        """A line about the slowest rank."""
        if self.slowest is None:
            return []
        order = sorted(self.ranks, key=_own_per_step)
        fast, slow = order[0], order[-1]
        more = {name: _per_step(slow, name) - _per_step(fast, name) for name in _PARTS}
        part = max(more, key=lambda name: more[name])
        return [
            f"Slowest: rank {slow.rank}, {_own_per_step(slow) / 1e6:.3f} ms per step without "
            f"communication; fastest: rank {fast.rank}, {_own_per_step(fast) / 1e6:.3f} ms. "
            f"Largest difference: {part}, {more[part] / 1e6:+.3f} ms."
        ]


def _per_step(one: RankTimes, part: str) -> float:
    return getattr(one.total, f"{part}_ns") / len(one.steps)


def _own_per_step(one: RankTimes) -> float:
    return one.total.own_ns / len(one.steps)


def summary(path: str | Path) -> Summary:
    """Compute where the time of a step went, from traces.

    Args:
        path: A trace, as `fx.profile` or torch's profiler writes it, or a folder of traces.

    Effects:
        Reads the traces; needs no ranks.

    Raises:
        PlanError: a trace is missing or damaged, or contains no steps.

    Example:
        >>> import fxtrain as fx, tempfile, torch
        >>> from fxtrain.profiling import summary
        >>> folder = tempfile.mkdtemp()
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     with fx.profile(ctx, fx.Profile(folder=folder, wait=0, active=2)) as trace:
        ...         for _ in range(3):
        ...             _ = torch.ones(8, 8) @ torch.ones(8, 8)
        ...             trace.step()
        >>> found = summary(folder)
        >>> found == trace.summary, len(found.ranks[0].steps)
        (True, 2)
    """
    path = Path(path)
    files = _traces(path) if path.is_dir() else [path]
    if not files:
        raise PlanError(
            f"{path}: this folder contains no traces (*.json.gz). Pass the folder of an "
            f"fx.Profile after its first cycle."
        )
    activities: list[Activity] = []
    problems: list[str] = []
    for file in files:
        try:
            activities.append(read_trace(file))
        except PlanError as error:
            problems.append(error.message)
    if problems:
        raise PlanError("\n".join(few(problems)))
    return summarize(activities)


def _traces(folder: Path) -> list[Path]:
    found: list[Path] = []
    for place, _, names in os.walk(folder):
        found += [Path(place, name) for name in names if name.endswith((".json", ".json.gz"))]
    return sorted(path for path in found if not path.name.startswith("."))  # unfinished files


def summarize(activities: Iterable[Activity]) -> Summary:
    """The summary of any number of ranks and cycles."""
    found: dict[int, list[Activity]] = {}
    for one in activities:
        found.setdefault(one.rank, []).append(one)
    ranks: list[RankTimes] = []
    for rank, cycles in sorted(found.items()):
        cycles.sort(key=lambda one: one.cycle)
        steps = tuple(_times(one, step) for one in cycles for step in one.steps)
        counts = [one.flops for one in cycles if one.flops is not None]
        flops = sum(counts) if len(counts) == len(cycles) else None
        ranks.append(RankTimes(rank=rank, steps=steps, flops=flops))
    return Summary(ranks=tuple(ranks))


def _times(activity: Activity, step: Span) -> StepTimes:
    """Assign every moment of a step to one part."""
    taken: list[Span] = []
    parts: dict[str, int] = dict.fromkeys((*PHASES, "communication"), 0)

    def take(part: str, spans: list[Span]) -> None:
        nonlocal taken
        left = subtract(clip(spans, step), taken)
        parts[part] += length(left)
        taken = union([*taken, *left])

    for phase in PHASES:
        take(phase, activity.compute[phase])
    communication = clip(activity.collectives, step)
    take("communication", communication)
    for phase in PHASES:
        take(phase, activity.host[phase])
    return StepTimes(
        step_ns=step[1] - step[0],
        data_ns=parts["data"],
        forward_ns=parts["forward"],
        backward_ns=parts["backward"],
        communication_ns=parts["communication"],
        hidden_ns=length(communication) - parts["communication"],
        optimizer_ns=parts["optimizer"],
        idle_ns=step[1] - step[0] - length(taken),
    )
