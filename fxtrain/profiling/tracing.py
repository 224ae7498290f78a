"""`fx.profile`: records steps of a loop on every rank."""

import contextlib
import gzip
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.autograd.profiler import profile as Profiler
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, record_function

from fxtrain import ops
from fxtrain.errors import FxError, PlanError, StepError
from fxtrain.ops.plan_agreement import check_same_plan
from fxtrain.ops.same_errors import gather_or_raise
from fxtrain.profiling.step_times import RankTimes, StepTimes, Summary, events_of, step_times
from fxtrain.state import DistContext, Plan, Profile, write_record
from fxtrain.state.context import check_connected

_TORCH: Any = torch._C  # parts of it have no type stubs
_SETTLE_S = 0.02  # for the threads of gloo where the operating system does not say what they do
_SETTLE_AT_MOST_S = 2.0
_SNAPSHOT_EVENTS = 100_000  # a torch default of 2**63 could fill the host's memory


def is_profiling() -> bool:
    """Whether a profiler of torch is running; a process can have only one."""
    return bool(_TORCH._autograd._profiler_enabled())


def activities_of(profile: Profile, ctx: DistContext) -> list[ProfilerActivity]:
    """The devices to record.

    Raises:
        PlanError: torch cannot record one of them on this machine.
    """
    supported = {each.name.lower(): each for each in torch.profiler.supported_activities()}
    default = tuple(name for name in ("cpu", ctx.device.type) if name in supported)
    names = profile.activities or default
    missing = [name for name in names if name not in supported]
    if missing:
        raise PlanError(
            f"profile(activities={names}): torch cannot record {', '.join(missing)} on this "
            f"machine; it can record {', '.join(sorted(supported))}. Choose among these."
        )
    return [supported[name] for name in dict.fromkeys(names)]


def _new_profiler(spec: Profile, ctx: DistContext) -> Any:
    verbose = _TORCH._profiler._ExperimentalConfig(verbose=True)  # else stacks are empty
    return torch.profiler.profile(
        activities=activities_of(spec, ctx),
        record_shapes=spec.shapes,
        profile_memory=spec.memory,
        with_stack=spec.stacks,
        with_flops=spec.flops,
        with_modules=spec.modules,
        experimental_config=verbose if spec.stacks else None,
    )


def _write_trace(profiler: Any, file: Path) -> None:
    """Write the trace: completely or not at all.

    Raises:
        OSError: it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    part, packed = (file.with_name(f".{file.name}.{end}") for end in ("part", "packed"))
    try:
        profiler.export_chrome_trace(str(part))
        with part.open("rb") as trace, gzip.open(packed, "wb", compresslevel=3) as target:
            shutil.copyfileobj(trace, target)
        os.replace(packed, file)
    finally:
        part.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)


def _settle() -> None:
    """Wait until no other thread of this process runs.

    A thread of gloo first completes the future of a collective, which DDP waits for, and then ends
    its event. Once the profiler has stopped, that would write into freed memory.
    """
    until = time.monotonic() + _SETTLE_AT_MOST_S
    time.sleep(_SETTLE_S)
    while _others_run() and time.monotonic() < until:
        time.sleep(_SETTLE_S / 10)


def _others_run() -> bool:
    """Whether another thread of this process runs or waits for a processor; False if unknown."""
    mine = str(threading.get_native_id())
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has ended
            state = (task / "stat").read_bytes().rpartition(b")")[2].split()[0]
            if state == b"R" and task.name != mine:
                return True
    return False


@attrs.define(eq=False)
class Trace:
    """A profile in progress: call `step` after every step of the loop.

    A profile of a whole block, `fx.Profile(active=None)`, needs no calls of `step`.

    Attributes:
        count: Calls of `step` so far.
        files: Traces that this rank has written.
        summary: Where the time of a step went, on all ranks; None until the block has ended, and
            if nothing was recorded.
    """

    ctx: DistContext = attrs.field(repr=False)
    _on_trace_ready: "Callable[[Trace], object] | None" = attrs.field(default=None, repr=False)
    _cycles: Iterator[int] = attrs.field(factory=lambda: iter(()), repr=False)
    _cycle: int = 0
    _due: int = 0  # the step before which `_cycles` continues; -1 for none
    _torch_profiler: Any = attrs.field(default=None, repr=False)  # torch's, in a cycle of this rank
    _range: Any = attrs.field(default=None, repr=False)  # of the step that is recorded
    _complete: int = 0  # steps that are recorded in this cycle
    _recorded: Profiler | None = attrs.field(default=None, repr=False)  # of the last cycle
    _steps: list[StepTimes] = attrs.field(factory=list[StepTimes], repr=False)
    _flops: int | None = None
    count: int = 0
    files: tuple[Path, ...] = ()
    summary: Summary | None = None

    def step(self) -> None:
        """Record that a step of the loop is complete.

        Effects:
            Starts and stops the profiler when the schedule says so, with one exchange of packets
            between the ranks each time. Otherwise none.

        Raises:
            StepError: another profiler of torch is running, or has ended this one.
            Exception: of `on_trace_ready`, on its rank; a CollectiveError on the others.
            CollectiveError: another rank failed, or never called `step` as often.
        """
        self.count += 1
        if self.count == self._due:
            self._continue()

    def key_averages(
        self, *, group_by_input_shape: bool = False, group_by_stack_n: int = 0
    ) -> EventList:
        """Averages of the operators that this rank recorded in its last cycle, by torch's profiler.

        Args:
            group_by_input_shape: One row for each combination of shapes; of a profile with
                `shapes=True`.
            group_by_stack_n: One row for each stack, of so many frames; of a profile with
                `stacks=True`.

        Returns:
            The list of torch, without entries if this rank has recorded nothing. Its
            `table(sort_by="self_cpu_time_total", row_limit=10)` is text; each entry has times,
            `count`, with `memory=True` `self_cpu_memory_usage`, and with `flops=True` `flops`.

        Source:
            torch.profiler.profile.key_averages.

        Example:
            >>> import fxtrain as fx, tempfile, torch
            >>> spec = fx.Profile(folder=tempfile.mkdtemp(), active=None, flops=True)
            >>> with fx.detect(env={}, device="cpu") as ctx, fx.profile(ctx, spec) as trace:
            ...     _ = torch.ones(8, 8) @ torch.ones(8, 8)
            >>> [each.flops for each in trace.key_averages() if each.key == "aten::mm"]
            [1024]
        """
        if self._recorded is None:
            return EventList()
        return self._recorded.key_averages(group_by_input_shape, group_by_stack_n)

    def _continue(self) -> None:
        while self.count == self._due:
            pause = next(self._cycles, None)
            self._due = -1 if pause is None else self._due + pause

    def _record(self, spec: Profile) -> Iterator[int]:
        """Record the cycles of a profile; yields after how many steps to continue."""
        yield spec.skip_first
        for self._cycle in range(spec.repeat):
            yield spec.wait
            self._refuse_another()
            if _is_recorded(spec, self.ctx):
                self._torch_profiler = _new_profiler(spec, self.ctx)
                self._torch_profiler.prepare_trace()
            yield spec.warmup
            self._refuse_another()
            if self._torch_profiler is not None:
                self._start(spec)
            for _ in itertools.count() if spec.active is None else range(spec.active - 1):
                yield 1
                self._end_step()
                self._begin_step()
            yield 1
            # Stopped before the exchange, whose event must not be open then.
            ops.raise_together(self._stop(spec, complete=True), self.ctx)

    def _refuse_another(self) -> None:
        ops.raise_together(_refusal("trace.step") if is_profiling() else None, self.ctx)

    def _start(self, spec: Profile) -> None:
        """Start to record; the next step begins."""
        if self.ctx.device.type == "cuda":
            torch.cuda.synchronize(self.ctx.device)
            if spec.memory:
                torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_EVENTS)
        self._torch_profiler.start_trace()
        self._complete = 0
        self._begin_step()

    def _begin_step(self) -> None:
        if self._torch_profiler is not None:
            self._range = record_function(f"ProfilerStep#{self._complete}")
            self._range.__enter__()

    def _end_step(self, *, complete: bool = True) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
            self._complete += complete

    def _stop(self, spec: Profile, *, complete: bool) -> Exception | None:
        """Write the trace of a cycle; returns the problem, or the error of `on_trace_ready`.

        Args:
            complete: Whether the last step that began is complete.
        """
        profiler, self._torch_profiler = self._torch_profiler, None
        if profiler is None:
            return None
        if self._range is not None and not is_profiling():
            return StepError(
                f"trace.step: another profiler of torch has ended this one, in cycle "
                f"{self._cycle}. A process can run one profiler at a time: remove the other."
            )
        try:
            recorded = self._end_recording(profiler, complete=complete)
            if recorded:
                self._keep(spec, profiler)
        finally:
            self._free(spec, profiler)
        if not recorded or self._on_trace_ready is None:
            return None
        try:
            self._on_trace_ready(self)
        except Exception as error:  # any error of the user's function: other ranks must receive it
            return error
        return None

    def _end_recording(self, profiler: Any, *, complete: bool) -> int:
        """Stop torch's profiler; the number of steps that it has recorded."""
        warms_up = self._range is None
        self._end_step(complete=complete)
        if self.ctx.world_size > 1:
            _settle()
        if warms_up:
            profiler.start_trace()  # torch ends a warm-up only this way
        profiler.stop_trace()
        return 0 if warms_up else self._complete

    def _free(self, spec: Profile, profiler: Any) -> None:
        # torch's profiler is part of a reference cycle, which Python's collector may free late.
        profiler.profiler = None
        if self.ctx.device.type == "cuda" and spec.memory:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _keep(self, spec: Profile, profiler: Any) -> None:
        self._recorded = profiler.profiler
        results = profiler.profiler.kineto_results
        self._steps += step_times(events_of(results))[: self._complete]
        if spec.flops:
            self._flops = (self._flops or 0) + sum(event.flops() for event in results.events())
        file = Path(spec.folder) / f"cycle-{self._cycle:03}" / f"rank-{self.ctx.rank:05}.json.gz"
        with self._warning_if_not_written(file):
            _write_trace(profiler, file)
            if self.ctx.device.type == "cuda" and spec.memory:
                part = file.with_name(f".{file.name}.part")
                torch.cuda.memory._dump_snapshot(str(part))
                os.replace(part, file.with_name(file.name.replace(".json.gz", ".pickle")))
            self.files = (*self.files, file)

    @contextlib.contextmanager
    def _warning_if_not_written(self, file: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, PlanError) as error:
            ops.log(self.ctx, "fxtrain.profiling").warning(
                "%s: cannot write this file: %s. Training continues without it; free disk space "
                "or choose another folder.",
                *(file, getattr(error, "strerror", None) or error),
                rank=self.ctx.rank,
            )

    def _abandon(self, spec: Profile) -> None:
        """Stop the profiler after an error; write nothing."""
        profiler, self._torch_profiler = self._torch_profiler, None
        self._due = -1
        if profiler is not None:
            self._end_recording(profiler, complete=False)
            self._free(spec, profiler)

    def _finish(self, spec: Profile) -> None:
        self._due = -1
        # Without calls of `step`, the whole block is one step.
        ops.raise_together(self._stop(spec, complete=not self.count), self.ctx)
        mine = None
        if self._steps:
            mine = RankTimes(rank=self.ctx.rank, steps=tuple(self._steps), flops=self._flops)
        ranks = tuple(times for times in ops.gather_objects(mine, self.ctx) if times is not None)
        self._warn_if_short(spec)
        if not ranks:
            return
        self.summary = Summary(ranks=ranks)
        if self.ctx.is_main:
            file = Path(spec.folder) / "summary.json"
            with self._warning_if_not_written(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                write_record(self.summary, file)

    def _warn_if_short(self, spec: Profile) -> None:
        if spec.active is None or (not self.count and self.files):
            return
        needed = spec.skip_first + spec.repeat * (spec.wait + spec.warmup + spec.active)
        if self.count < needed:
            ops.log(self.ctx, "fxtrain.profiling").warning(
                "The loop ended after %d steps; %d cycles of this profile take %d. Use fewer "
                "cycles, a smaller skip_first or wait, or active=None for the whole block.",
                *(self.count, spec.repeat, needed),
            )


@contextlib.contextmanager
def profile(
    ctx: DistContext,
    what: Plan | Profile,
    *,
    on_trace_ready: Callable[[Trace], object] | None = None,
) -> Iterator[Trace]:
    """Record steps of a loop with torch's profiler, and compute where their time goes.

    Args:
        ctx: The context.
        what: A plan, of which the field `profile` says what is recorded, or that record itself.
            A plan without it records nothing.
        on_trace_ready: Called with the `Trace` when a cycle is complete and its file is written, on
            the ranks that record it.

    Yields:
        The `Trace`. Call its `step` after every step of the loop. After the block, its `summary`
        splits the time of a step by rank into data, forward, backward, communication, optimizer
        and idle time.

    Effects:
        Writes `cycle-000/rank-00000.json.gz` and so on into the profile's folder, and at the end
        of the block `summary.json`, on rank 0. Two exchanges of packets when the block begins, two
        when it ends, and three per cycle; none at one rank. Parameters and random generators are
        not affected. A dry run records nothing.

    Raises:
        PlanError: an argument is invalid, the ranks disagree, a device cannot be recorded, or the
            folder cannot be written or contains traces already; on every rank.
        StepError: another profiler of torch is running.
        CollectiveError: a rank never joins.

    Example:
        >>> import fxtrain as fx, tempfile, torch
        >>> spec = fx.Profile(folder=tempfile.mkdtemp(), wait=1, warmup=1, active=2)
        >>> with fx.detect(env={}, device="cpu") as ctx, fx.profile(ctx, spec) as trace:
        ...     for _ in range(4):
        ...         _ = torch.ones(8, 8) @ torch.ones(8, 8)
        ...         trace.step()
        >>> [file.name for file in trace.files], len(trace.summary.ranks[0].steps)
        (['rank-00000.json.gz'], 2)
    """
    check_connected("profile", ctx)
    spec = what.profile if isinstance(what, Plan) else what
    if ctx.comm.simulated:
        spec = None
    check_same_plan("profile", ctx, Plan(profile=spec), {})
    if spec is not None:
        for check in (_problem, _unwritable):  # a folder is made once every rank accepts the rest
            gather_or_raise(None, check(spec, ctx), ctx)
    trace = Trace(ctx, on_trace_ready)
    if spec is not None:
        whole = attrs.evolve(spec, skip_first=0, wait=0, warmup=0, repeat=1)
        trace._cycles = trace._record(whole if spec.active is None else spec)
    try:
        trace._continue()
        yield trace
    except BaseException:
        if spec is not None:
            trace._abandon(spec)
        raise
    if spec is not None:
        trace._finish(spec)


def _is_recorded(spec: Profile, ctx: DistContext) -> bool:
    return spec.ranks is None or ctx.rank in spec.ranks


def _refusal(call: str) -> StepError:
    return StepError(
        f"{call}: another profiler of torch is running, which this one would end. A process can "
        f"run one profiler at a time: end the other one first."
    )


def _problem(spec: Profile, ctx: DistContext) -> FxError | None:
    """What is wrong before anything is written."""
    if is_profiling():
        return _refusal("profile")
    beyond = [rank for rank in spec.ranks or () if rank >= ctx.world_size]
    if beyond:
        return PlanError(
            f"profile(ranks={spec.ranks}): no rank {', '.join(map(str, beyond))}. This context "
            f"has ranks 0 to {ctx.world_size - 1}."
        )
    if any(Path(spec.folder).glob("cycle-*")):
        return PlanError(
            f"profile(folder={spec.folder!r}): it contains traces of an earlier profile. Choose "
            f"another folder, or remove them."
        )
    try:
        activities_of(spec, ctx)
    except PlanError as error:
        return error
    return None


def _unwritable(spec: Profile, ctx: DistContext) -> FxError | None:
    """Why this rank cannot write traces."""
    if not _is_recorded(spec, ctx):
        return None
    try:
        Path(spec.folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=spec.folder):
            return None
    except OSError as error:
        return PlanError(
            f"profile(folder={spec.folder!r}): cannot write there: {error.strerror or error}. "
            f"Choose another folder."
        )
