"""Where the time of a step goes, by rank, and computing it from the events of torch's profiler."""

import bisect
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attrs
from rich.console import Group, RenderableType
from torch.autograd import DeviceType

from fxtrain._drawing import make_table
from fxtrain._record import at_least, record
from fxtrain.errors import PlanError
from fxtrain.state import read_record

_PHASES = ("optimizer", "backward", "data", "forward")
# Where several parts run at the same moment, it counts for the first: an operator or kernel of a
# phase, then a collective, then a phase that the process is in without computing.
_PARTS = (*_PHASES, "communication", *_PHASES, "idle")
_COLLECTIVE = _PARTS.index("communication")
_DATA, _FORWARD = _PHASES.index("data"), _PHASES.index("forward")

_STEP = "ProfilerStep#"
_STARTS = {
    "Optimizer.step#": "optimizer",
    "Optimizer.zero_grad#": "optimizer",
    "enumerate(DataLoader)#": "data",
    "autograd::engine::evaluate_function": "backward",
}
_COLLECTIVES = re.compile(
    r"c10d::|_?c10d_functional|(gloo|nccl|mpi|ucc|xccl|hccl):|record_param_comms|fxtrain::exchange"
)
_COLLECTIVE_KERNELS = re.compile("(nccl|rccl|oneccl)", re.IGNORECASE)


@record
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

    step_ns: int = attrs.field(validator=at_least(0))
    data_ns: int = attrs.field(default=0, validator=at_least(0))
    forward_ns: int = attrs.field(default=0, validator=at_least(0))
    backward_ns: int = attrs.field(default=0, validator=at_least(0))
    communication_ns: int = attrs.field(default=0, validator=at_least(0))
    hidden_ns: int = attrs.field(default=0, validator=at_least(0))
    optimizer_ns: int = attrs.field(default=0, validator=at_least(0))
    idle_ns: int = attrs.field(default=0, validator=at_least(0))

    @property
    def own_ns(self) -> int:
        """Time in which the rank did not wait for communication."""
        return self.step_ns - self.communication_ns


_FIELDS = tuple(field.name for field in attrs.fields(StepTimes))
_COLUMNS = tuple(name.removesuffix("_ns") for name in _FIELDS)
_SUMMED = tuple(name for name in _COLUMNS if name not in ("step", "hidden"))  # to a step


def _is_not_empty(_: Any, __: Any, value: Sequence[object]) -> None:
    if not value:
        raise ValueError("choose at least one.")


@record
class RankTimes:
    """The recorded steps of one rank.

    Attributes:
        rank: The rank.
        steps: Its steps, in order, over all cycles.
        flops: Floating-point operations of all those steps; None if not counted.
    """

    rank: int = attrs.field(validator=at_least(0))
    steps: tuple[StepTimes, ...] = attrs.field(validator=_is_not_empty)
    flops: int | None = attrs.field(default=None, validator=at_least(0))

    @property
    def total(self) -> StepTimes:
        """The sum of all steps."""
        sums = {name: sum(getattr(step, name) for step in self.steps) for name in _FIELDS}
        return StepTimes(**sums)


def _ms_per_step(rank: RankTimes, column: str) -> float:
    return getattr(rank.total, f"{column}_ns") / len(rank.steps) / 1e6


@record
class Summary:
    """Where the time of a step goes, by rank; prints as a table with rich.

    Attributes:
        ranks: The ranks that were profiled, in order.
    """

    ranks: tuple[RankTimes, ...] = attrs.field(validator=_is_not_empty)

    @property
    def slowest(self) -> int | None:
        """The rank that the others wait for: most time per step without communication.

        None if only one rank was profiled.
        """
        if len(self.ranks) < 2:
            return None
        return max(self.ranks, key=lambda rank: _ms_per_step(rank, "own")).rank

    @property
    def columns(self) -> dict[str, list[float]]:
        """Milliseconds per step by column, with an entry for each rank: for `run.table`."""
        times = {
            column: [round(_ms_per_step(rank, column), 3) for rank in self.ranks]
            for column in _COLUMNS
        }
        return {"rank": [rank.rank for rank in self.ranks], **times}

    def __rich__(self) -> RenderableType:
        """A table of milliseconds per step."""
        columns = ["rank", *(f">{column}" for column in _COLUMNS)]
        rows = [
            [str(rank.rank), *(f"{_ms_per_step(rank, column):.3f}" for column in _COLUMNS)]
            for rank in self.ranks
        ]
        if any(rank.flops is not None for rank in self.ranks):
            columns.append(">GFLOP")
            for row, rank in zip(rows, self.ranks, strict=True):
                each = None if rank.flops is None else rank.flops / len(rank.steps) / 1e9
                row.append("" if each is None else f"{each:.3g}")
        grid = make_table(columns, rows, title="ms per step")
        if self.slowest is None:
            return Group(grid, self._largest())
        ranks = sorted(self.ranks, key=lambda rank: _ms_per_step(rank, "own"))
        fast, slow = ranks[0], ranks[-1]
        more = {
            column: _ms_per_step(slow, column) - _ms_per_step(fast, column)
            for column in _SUMMED
            if column != "communication"
        }
        column = max(more, key=lambda column: more[column])
        return Group(
            grid,
            self._largest(),
            f"Slowest: rank {slow.rank}, {_ms_per_step(slow, 'own'):.3f} ms per step without "
            f"communication; fastest: rank {fast.rank}, {_ms_per_step(fast, 'own'):.3f} ms. "
            f"Largest difference: {column}, {more[column]:+.3f} ms.",
        )

    def _largest(self) -> str:
        """The part that takes most of a step, on average over ranks."""
        means = {
            column: sum(_ms_per_step(rank, column) for rank in self.ranks) / len(self.ranks)
            for column in ("step", *_SUMMED)
        }
        column = max(_SUMMED, key=lambda column: means[column])
        share = means[column] / means["step"] if means["step"] else 0.0
        return f"Largest part of a step: {column}, {means[column]:.3f} ms ({share:.0%})."


def summary(path: str | Path) -> Summary:
    """Read where the time of a step went.

    Args:
        path: The folder of an `fx.Profile`, or the file `summary.json` in it.

    Effects:
        Reads the file; needs no ranks.

    Raises:
        PlanError: the file is missing or damaged.
    """
    file = Path(path)
    file = file if file.suffix == ".json" else file / "summary.json"
    if not file.exists():
        raise PlanError(
            f"No such file: {file}. fx.Plan(profile=fx.Profile(folder=...)) and fx.profile write "
            f"it; pass their folder.",
            code="FX201",
        )
    return read_record(file, Summary)


class Event(NamedTuple):
    """An operator, a range or a kernel that torch's profiler has recorded."""

    name: str
    begin: int  # in nanoseconds
    end: int
    thread: int = 0  # of the host, which began it
    id: int = 0
    is_range: bool = False  # of `record_function`, and not an operator
    launcher: int | None = None  # on a device: `id` of the operator that launched the kernel


def events_of(kineto_results: Any) -> list[Event]:
    """The events of a profiler that last.

    `torch.profiler.profile.events()` has the same, but needs thirty times as long.
    """
    events: list[Event] = []
    for event in kineto_results.events():
        begin, end, is_range = event.start_ns(), event.end_ns(), event.is_user_annotation()
        number, linked = event.correlation_id(), event.linked_correlation_id()
        on_host = event.device_type() == DeviceType.CPU
        # Python functions have no number, and calls of a driver are linked to their operator.
        if begin < end and (number and not linked if on_host else not is_range):
            launcher = None if on_host else linked
            thread = event.start_thread_id()
            events.append(Event(event.name(), begin, end, thread, number, is_range, launcher))
    return events


def step_times(events: Iterable[Event]) -> list[StepTimes]:
    """Assign every moment of the steps among these events to one part."""
    threads: dict[int, list[Event]] = defaultdict(list)
    kernels: list[Event] = []
    steps: list[Event] = []
    for event in events:
        if event.launcher is not None:
            kernels.append(event)
        elif event.name.startswith(_STEP):
            steps.append(event)
        else:
            threads[event.thread].append(event)
    steps.sort(key=lambda step: step.begin)
    phases: dict[int, int] = {}
    spans: list[_Span] = []
    for host in threads.values():
        on_host = _host_spans(host, phases)
        # What a device computes counts there; what the host does beside it is reading data.
        within = _COLLECTIVE + 1 + _DATA
        spans += [span for span in on_host if not kernels or span[2] == within]
    spans += [_kernel_span(kernel, phases) for kernel in kernels]
    if kernels:
        launched = {event.id: event.begin for host in threads.values() for event in host}
        steps = _on_device(steps, kernels, launched)
    return list(_attributed(spans, steps))


def _on_device(steps: list[Event], kernels: list[Event], launched: dict[int, int]) -> list[Event]:
    """The steps as the device ran them, from when the host launched a kernel, by its `launcher`.

    The host launches kernels long before they run, so a step ends with the last kernel that was
    launched in it, or on the host if that is later. It begins where the one before has ended.
    """
    begins, ends = [step.begin for step in steps], [step.end for step in steps]
    for kernel in kernels:
        time = launched.get(kernel.launcher or 0, kernel.begin)
        at = bisect.bisect_right(begins, time) - 1
        if at >= 0 and time < steps[at].end:
            ends[at] = max(ends[at], kernel.end)
    ends = list(itertools.accumulate(ends, max))
    begins[1:] = map(max, begins[1:], ends[:-1])
    return [
        step._replace(begin=begin, end=end)
        for step, begin, end in zip(steps, begins, ends, strict=True)
    ]


_Span = tuple[int, int, int]  # begin, end, and the index of its part among _PARTS


def _host_spans(events: list[Event], phases: dict[int, int]) -> Iterator[_Span]:
    """The parts that one thread works on; also puts the phase of each event into `phases`."""
    events.sort(key=lambda event: (event.begin, -event.end))
    around: list[tuple[int, int]] = []  # ends and phases of the events around this one
    for event, follower in itertools.zip_longest(events, events[1:]):
        while around and around[-1][0] <= event.begin:
            around.pop()
        own = next((name for start, name in _STARTS.items() if event.name.startswith(start)), None)
        phase = _PHASES.index(own) if own else around[-1][1] if around else _FORWARD
        phases[event.id] = phase
        if _COLLECTIVES.match(event.name):
            yield event.begin, event.end, _COLLECTIVE
            continue
        around.append((event.end, phase))
        is_leaf = follower is None or follower.begin >= event.end
        if is_leaf and not event.is_range:
            yield event.begin, event.end, phase
        elif own or not event.is_range:
            yield event.begin, event.end, _COLLECTIVE + 1 + phase


def _kernel_span(kernel: Event, phases: dict[int, int]) -> _Span:
    if _COLLECTIVE_KERNELS.match(kernel.name):
        part = _COLLECTIVE
    elif kernel.name.startswith("Memcpy HtoD"):
        part = _DATA
    else:
        part = phases.get(kernel.launcher or 0, _FORWARD)
    return kernel.begin, kernel.end, part


def _attributed(spans: list[_Span], steps: list[Event]) -> Iterator[StepTimes]:
    """Each step with the time of the first part that was active at each of its moments."""
    edges = [(begin, part, 1) for begin, _, part in spans]
    edges += [(end, part, -1) for _, end, part in spans]
    edges.sort()
    active = [0] * (len(_PARTS) - 1) + [1]  # always idle, if nothing else
    at = 0
    for step in steps:
        times: dict[str, int] = defaultdict(int)
        now = step.begin
        while now < step.end:
            # Up to the next moment at which a part begins or ends.
            until = min(max(edges[at][0], now), step.end) if at < len(edges) else step.end
            part = next(part for part, count in enumerate(active) if count)
            times[_PARTS[part]] += until - now
            if active[_COLLECTIVE] and part < _COLLECTIVE:
                times["hidden"] += until - now
            now = until
            while at < len(edges) and edges[at][0] <= now:
                active[edges[at][1]] += edges[at][2]
                at += 1
        yield StepTimes(
            step_ns=step.end - step.begin, **{f"{name}_ns": ns for name, ns in times.items()}
        )
