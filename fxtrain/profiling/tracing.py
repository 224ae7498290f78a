"""`fx.profile`: records steps of a loop on every rank."""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.autograd.profiler import profile as Profiler
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerAction, ProfilerActivity

from fxtrain import ops
from fxtrain.errors import PlanError, StepError
from fxtrain.ops.plan_agreement import agree_on_plan
from fxtrain.ops.same_errors import fail_together
from fxtrain.profiling.step_times import RankTimes, StepTimes, Summary, events_of, step_times
from fxtrain.state import DistContext, Plan, Profile, dumps
from fxtrain.state.context import check_connected

_TORCH: Any = torch._C  # parts of it have no type stubs
_SETTLE_S = 0.02  # for the threads of gloo where the operating system does not say what they do
_SETTLE_AT_MOST_S = 2.0
_RECORDS = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
_SNAPSHOT_EVENTS = 100_000  # a torch default of 2**63 could fill the host's memory


def is_profiling() -> bool:
    """Whether a profiler of torch is running; a process can have only one."""
    return bool(_TORCH._autograd._profiler_enabled())


def activities_of(profile: Profile, ctx: DistContext) -> list[ProfilerActivity]:
    """The devices to record; a PlanError if torch cannot on this machine."""
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


class _Profiler(torch.profiler.profile):
    """torch's profiler of one rank, with what a context needs where it starts and stops."""

    ctx: DistContext

    def start_trace(self) -> None:
        if self.ctx.device.type == "cuda":
            torch.cuda.synchronize(self.ctx.device)
        super().start_trace()

    def stop_trace(self) -> None:
        if self.ctx.world_size > 1:
            _settle()
        if self.ctx.device.type == "cuda":  # kernels that run after this are not recorded
            torch.cuda.synchronize(self.ctx.device)
        super().stop_trace()


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
    thread_id = str(threading.get_native_id())
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has ended
            state = (task / "stat").read_bytes().rpartition(b")")[2].split()[0]
            if state == b"R" and task.name != thread_id:
                return True
    return False


def _action(spec: Profile, step: int) -> ProfilerAction:
    """What torch's profiler does in a step, counted from 0."""
    if spec.active is None:
        return ProfilerAction.RECORD
    cycle = spec.wait + spec.warmup + spec.active
    cycles, at = divmod(step - spec.skip_first, cycle)
    if not 0 <= cycles < spec.repeat or at < spec.wait:
        return ProfilerAction.NONE
    if at < spec.wait + spec.warmup:
        return ProfilerAction.WARMUP
    return ProfilerAction.RECORD if at < cycle - 1 else ProfilerAction.RECORD_AND_SAVE


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
    _spec: Profile = attrs.field(alias="spec", repr=False)
    _on_trace_ready: "Callable[[Trace], object] | None" = attrs.field(
        default=None, alias="on_trace_ready", repr=False
    )
    _recorder: _Profiler | None = attrs.field(default=None, init=False, repr=False)
    _is_ending: bool = attrs.field(default=False, init=False, repr=False)
    _is_ready: bool = attrs.field(default=False, init=False, repr=False)  # a trace, just now
    _recorded: Profiler | None = attrs.field(default=None, init=False, repr=False)  # last cycle
    _steps: list[StepTimes] = attrs.field(factory=list[StepTimes], init=False, repr=False)
    _flops: int = attrs.field(default=0, init=False, repr=False)
    _cycle: int = attrs.field(default=0, init=False, repr=False)
    count: int = 0
    files: tuple[Path, ...] = ()
    summary: Summary | None = None

    def step(self) -> None:
        """Record that a step of the loop is complete.

        Effects:
            Starts and stops the profiler when the schedule says so.

        Raises:
            Exception: of `on_trace_ready`, on its rank.
        """
        self.count += 1
        if self._recorder is not None:
            self._recorder.step()
            self._notify()

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
        """
        if self._recorded is None:
            return EventList()
        return self._recorded.key_averages(group_by_input_shape, group_by_stack_n)

    def _start(self) -> None:
        spec = self._spec
        verbose = _TORCH._profiler._ExperimentalConfig(verbose=True)  # else stacks are empty
        self._recorder = _Profiler(
            activities=activities_of(spec, self.ctx),
            record_shapes=spec.shapes,
            profile_memory=spec.memory,
            with_stack=spec.stacks,
            with_flops=spec.flops,
            with_modules=spec.modules,
            experimental_config=verbose if spec.stacks else None,
            schedule=functools.partial(_action, spec),
            on_trace_ready=self._keep,
        )
        self._recorder.ctx = self.ctx
        if self.ctx.device.type == "cuda" and spec.memory:
            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_EVENTS)
        self._recorder.start()

    def _keep(self, profiler: Any) -> None:
        """Keep what a cycle has recorded; torch's profiler, which has stopped, calls this."""
        results = profiler.profiler.kineto_results
        steps = step_times(events_of(results))
        if self._is_ending and self.count:
            steps.pop()  # which is incomplete
        if not steps:
            return
        self._recorded = profiler.profiler
        self._steps += steps
        if self._spec.flops:
            self._flops += sum(event.flops() for event in results.events())
        folder = Path(self._spec.folder) / f"cycle-{self._cycle:03}"
        file = folder / f"rank-{self.ctx.rank:05}.json.gz"
        self._cycle += 1
        if self._write(file, profiler.export_chrome_trace):
            self.files = (*self.files, file)
        if self.ctx.device.type == "cuda" and self._spec.memory:
            snapshot = folder / f"rank-{self.ctx.rank:05}.pickle"
            self._write(snapshot, torch.cuda.memory._dump_snapshot)
        self._is_ready = True
        profiler.profiler = None  # of which torch would warn in the next cycle

    def _notify(self) -> None:
        if self._is_ready and self._on_trace_ready is not None:
            self._on_trace_ready(self)
        self._is_ready = False

    def _write(self, file: Path, export: Callable[[str], object]) -> bool:
        """Let a function write a file completely or not at all; False, with a warning, if not."""
        part = file.with_name(f".{file.name}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                export(str(part))
                os.replace(part, file)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            ops.log(self.ctx, "fxtrain.profiling").warning(
                "%s: cannot write this file: %s. Training continues without it; free disk space "
                "or choose another folder.",
                *(file, error.strerror or error),
                rank=self.ctx.rank,
            )
            return False
        return True

    def _abandon(self) -> None:
        """Stop the profiler after an error; keep nothing."""
        profiler = self._recorder
        if profiler is not None and (is_profiling() or profiler.current_action not in _RECORDS):
            profiler.on_trace_ready = None
            profiler.stop()

    def _finish(self) -> None:
        with fail_together(self.ctx):
            if self._recorder is not None:
                self._is_ending = True
                self._recorder.stop()
                self._notify()
        local = None
        if self._steps:
            flops = self._flops if self._spec.flops else None
            local = RankTimes(rank=self.ctx.rank, steps=tuple(self._steps), flops=flops)
        ranks = tuple(times for times in ops.gather_objects(local, self.ctx) if times is not None)
        if not ranks:
            ops.log(self.ctx, "fxtrain.profiling").warning(
                "Nothing was recorded in %d steps: the loop is too short for skip_first, wait and "
                "warmup, or another profiler of torch has ended this one.",
                self.count,
            )
            return
        self.summary = Summary(ranks=ranks)
        if self.ctx.is_main:
            file, text = Path(self._spec.folder) / "summary.json", dumps(self.summary)
            self._write(file, lambda part: Path(part).write_text(text))


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
        of the block `summary.json`, on rank 0. Two exchanges of packets when the block begins, and
        two when it ends; none at one rank. Parameters and random generators are not affected. A
        dry run records nothing.

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
    agree_on_plan("profile", ctx, Plan(profile=spec))
    if spec is None:
        yield Trace(ctx, Profile())
        return
    with fail_together(ctx):
        _prepare(spec, ctx)
    trace = Trace(ctx, spec, on_trace_ready)
    try:
        if _is_recorded(spec, ctx):
            trace._start()
        yield trace
        trace._finish()
    except BaseException:
        trace._abandon()
        raise
    finally:
        # torch's profiler is part of a reference cycle, which Python's collector may free late.
        trace._recorder = None
        if ctx.device.type == "cuda" and spec.memory:
            torch.cuda.memory._record_memory_history(enabled=None)


def _is_recorded(spec: Profile, ctx: DistContext) -> bool:
    return spec.ranks is None or ctx.rank in spec.ranks


def _prepare(spec: Profile, ctx: DistContext) -> None:
    """Check that this rank can record, and create the folder."""
    if is_profiling():
        raise StepError(
            "profile: another profiler of torch is running, which this one would end. A process "
            "can run one profiler at a time: end the other one first."
        )
    beyond = [rank for rank in spec.ranks or () if rank >= ctx.world_size]
    if beyond:
        raise PlanError(
            f"profile(ranks={spec.ranks}): no rank {', '.join(map(str, beyond))}. This context "
            f"has ranks 0 to {ctx.world_size - 1}."
        )
    if any(Path(spec.folder).glob("cycle-*")):
        raise PlanError(
            f"profile(folder={spec.folder!r}): it contains traces of an earlier profile. Choose "
            f"another folder, or remove them."
        )
    activities_of(spec, ctx)
    try:
        if _is_recorded(spec, ctx):
            Path(spec.folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"profile: {error}. Choose another folder.") from error
