"""`fx.profile`: records steps of a loop on every rank."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
from torch.autograd.profiler import profile as Profiler
from torch.autograd.profiler_util import EventList

from fxtrain import ops
from fxtrain._arguments import known_arguments
from fxtrain._errors import FxError, PlanError, StepError
from fxtrain.ops.plan_agreement import check_same_plan
from fxtrain.ops.same_errors import gather_with_errors
from fxtrain.profiling.tracing.chrome import Activity, read_trace
from fxtrain.profiling.tracing.recording import (
    Recording,
    activities_of,
    is_profiling,
    trace_path,
)
from fxtrain.profiling.tracing.schedules import Transition, transitions
from fxtrain.profiling.tracing.summaries import Summary, summarize
from fxtrain.state import DistContext, Plan, Profile, check_connected, shown

__all__ = ["Trace", "profile"]

_NEVER = Transition(-1, "stop")


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
    _profile: Profile | None
    _todo: Iterator[Transition] = attrs.field(repr=False)
    _on_trace_ready: "Callable[[Trace], object] | None" = attrs.field(default=None, repr=False)
    _next: Transition = _NEVER
    _due: int = -1  # of `_next`; one attribute less to read in each step
    _cycle: int = 0
    _recording: Recording | None = attrs.field(default=None, repr=False)
    _recorded: Profiler | None = attrs.field(default=None, repr=False)  # of the last cycle
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
        while self.count == self._due:
            self._act()

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
            >>> [one.flops for one in trace.key_averages() if one.key == "aten::mm"]
            [1024]
        """
        if self._recorded is None:
            return EventList()
        return self._recorded.key_averages(group_by_input_shape, group_by_stack_n)

    def _plan_next(self) -> None:
        self._next = next(self._todo, _NEVER)
        self._due = self._next.step

    def _act(self) -> None:
        action, recording = self._next.action, self._recording
        self._plan_next()
        conflict = None if action == "mark" else self._conflict(action)
        if action == "stop":
            # Before the exchange: its event must not be open when the profiler stops.
            conflict = self._stop(complete=True) or conflict
        if action != "mark":
            ops.raise_together(conflict, self.ctx)
        if action == "prepare":
            self._recording = self._prepare()
        elif recording is not None and action == "start":
            recording.start()
        elif recording is not None and action == "mark":
            recording.next_step()

    def _prepare(self) -> Recording | None:
        spec = self._profile
        if spec is None or not _records(spec, self.ctx):
            return None
        return Recording.prepare(spec, self.ctx)

    def _conflict(self, action: str) -> StepError | None:
        """Whether another profiler interferes; torch itself would end the first one silently."""
        if action == "stop":
            if self._recording is None or is_profiling():
                return None
            self._recording = None
            return StepError(
                f"trace.step: another profiler of torch has ended this one, in cycle "
                f"{self._cycle}. A process can run one profiler at a time: remove the other."
            )
        return _refusal("trace.step") if is_profiling() else None

    def _stop(self, *, complete: bool) -> Exception | None:
        """Write the trace of a cycle.

        Returns:
            What `on_trace_ready` raised.
        """
        recording, self._recording = self._recording, None
        cycle, self._cycle = self._cycle, self._cycle + 1
        if recording is None:
            return None
        file = trace_path(recording.profile, cycle, self.ctx.rank)
        try:
            recording.stop(complete=complete)
            if recording.steps:
                self._recorded = recording.profiler.profiler
                recording.save(file, cycle)
                self.files = (*self.files, file)
        except OSError as error:
            ops.log(self.ctx, "fxtrain.profiling").warning(
                "%s: cannot write this trace: %s. Training continues without it; free disk space "
                "or choose another folder.",
                *(file, error.strerror or error),
                rank=self.ctx.rank,
            )
        finally:
            recording.close()
        if not recording.steps or self._on_trace_ready is None:
            return None
        try:
            self._on_trace_ready(self)
        except Exception as error:  # any error of the user's function: other ranks must receive it
            return error
        return None

    def _begin(self) -> None:
        self._plan_next()
        while self._due == 0:
            self._act()

    def _abandon(self) -> None:
        """Stop the profiler after an error; write nothing."""
        recording, self._recording = self._recording, None
        self._due = -1
        if recording is not None:
            recording.stop(complete=False)
            recording.close()

    def _finish(self) -> None:
        self._due = -1
        spec = self._profile
        if spec is None:
            return
        started = self._recording is not None and self._recording.started
        problem: Exception | None = self._conflict("stop") if started else None
        if self._recording is not None:
            problem = self._stop(complete=started and not self.count)
        ops.raise_together(problem, self.ctx)
        found, problem = self._read()
        values, problems = gather_with_errors((found, self.count), problem, self.ctx)
        if problems:
            raise PlanError("\n".join(["profile: traces cannot be read:", *problems])) from problem
        self._warn_if_short(spec)
        activities = [one for of_rank, _ in values for one in of_rank]
        self.summary = summarize(activities) if activities else None

    def _read(self) -> tuple[list[Activity], FxError | None]:
        try:
            return [read_trace(file) for file in self.files], None
        except FxError as error:
            return [], error

    def _warn_if_short(self, spec: Profile) -> None:
        if spec.active is None or (not self.count and self.files):
            return
        needed = [one.step for one in transitions(spec)][-1]
        if self.count < needed:
            ops.log(self.ctx, "fxtrain.profiling").warning(
                "The loop ended after %d steps; %d cycles of this profile take %d. Use fewer "
                "cycles, a smaller skip_first or wait, or active=None for the whole block.",
                *(self.count, spec.repeat, needed),
            )


@known_arguments(PlanError)
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
        Writes `cycle-000/rank-00000.json.gz` and so on into the profile's folder. Each rank reads
        its own traces at the end of the block. Two exchanges of packets when the block begins, two
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
    if not isinstance(spec, Profile | None):
        raise PlanError(f"profile({shown(what)}): pass an fx.Plan or an fx.Profile.")
    if ctx.comm.simulated:
        spec = None
    check_same_plan("profile", ctx, Plan(profile=spec), {})
    if spec is not None:
        _raise_first(_problem(spec, ctx), ctx)
        _raise_first(_unwritable(spec, ctx), ctx)
    if not (on_trace_ready is None or callable(on_trace_ready)):
        raise PlanError(f"profile(on_trace_ready={shown(on_trace_ready)}): pass a function.")
    trace = Trace(ctx, spec, iter(()) if spec is None else transitions(spec), on_trace_ready)
    try:
        trace._begin()
        yield trace
    except BaseException:
        trace._abandon()
        raise
    trace._finish()


def _records(spec: Profile, ctx: DistContext) -> bool:
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
    if not _records(spec, ctx):
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


def _raise_first(problem: FxError | None, ctx: DistContext) -> None:
    """Raise the same error on every rank if any has a problem."""
    words = None if problem is None else (type(problem) is StepError, str(problem))
    for found in ops.gather_objects(words, ctx):
        if found is not None:
            is_step, text = found
            raise (StepError if is_step else PlanError)(text) from problem
