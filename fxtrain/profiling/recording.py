"""One cycle of torch's profiler on one rank, and the file that it writes."""

import contextlib
import gzip
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.profiler import ProfilerActivity, record_function

from fxtrain.errors import PlanError
from fxtrain.profiling.step_times import Event, events_of
from fxtrain.state import DistContext, Profile

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
    supported = {one.name.lower(): one for one in torch.profiler.supported_activities()}
    default = tuple(name for name in ("cpu", ctx.device.type) if name in supported)
    names = profile.activities or default
    missing = [name for name in names if name not in supported]
    if missing:
        raise PlanError(
            f"profile(activities={names}): torch cannot record {', '.join(missing)} on this "
            f"machine; it can record {', '.join(sorted(supported))}. Choose among these."
        )
    return [supported[name] for name in dict.fromkeys(names)]


@attrs.define(eq=False)
class Recording:
    """One cycle on this rank.

    Attributes:
        profiler: torch's.
        steps: Recorded steps that are complete.
        started: Whether it records, and does not only warm up.
    """

    profile: Profile
    ctx: DistContext
    profiler: Any
    steps: int = 0
    started: bool = False
    _range: Any = None  # of the step that is recorded

    @classmethod
    def prepare(cls, profile: Profile, ctx: DistContext) -> "Recording":
        """Start to warm up."""
        verbose = _TORCH._profiler._ExperimentalConfig(verbose=True)  # else stacks are empty
        profiler = torch.profiler.profile(
            activities=activities_of(profile, ctx),
            record_shapes=profile.shapes,
            profile_memory=profile.memory,
            with_stack=profile.stacks,
            with_flops=profile.flops,
            with_modules=profile.modules,
            experimental_config=verbose if profile.stacks else None,
        )
        profiler.prepare_trace()
        return cls(profile, ctx, profiler)

    def start(self) -> None:
        """Start to record; the next step begins."""
        if self.ctx.device.type == "cuda":
            torch.cuda.synchronize(self.ctx.device)
            if self.profile.memory:
                torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_EVENTS)
        self.profiler.start_trace()
        self.started = True
        self._open_step()

    def next_step(self) -> None:
        """A step ends, and the next one begins."""
        self._close_step()
        self.steps += 1
        self._open_step()

    def stop(self, *, complete: bool) -> None:
        """Stop recording.

        Args:
            complete: Whether the last step that began is complete.
        """
        self._close_step()
        self.steps += complete
        if self.ctx.world_size > 1:
            _settle()
        if not self.started:
            self.profiler.start_trace()  # torch ends a warm-up only this way
        self.profiler.stop_trace()

    def events(self) -> list[Event]:
        """What was recorded."""
        return events_of(self.profiler.profiler.kineto_results)

    def flops(self) -> int | None:
        """Floating-point operations of all steps; None if they were not counted."""
        if not self.profile.flops:
            return None
        return sum(event.flops() for event in self.profiler.profiler.kineto_results.events())

    def save(self, file: Path) -> None:
        """Write the trace: completely or not at all.

        Raises:
            OSError: it cannot be written.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        part, packed = (file.with_name(f".{file.name}.{end}") for end in ("part", "packed"))
        try:
            self.profiler.export_chrome_trace(str(part))
            with part.open("rb") as trace, gzip.open(packed, "wb", compresslevel=3) as target:
                shutil.copyfileobj(trace, target)
            os.replace(packed, file)
        finally:
            part.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)
        if self.ctx.device.type == "cuda" and self.profile.memory:
            name = file.name.replace(".json.gz", ".pickle")
            torch.cuda.memory._dump_snapshot(str(part))
            os.replace(part, file.with_name(name))

    def close(self) -> None:
        """Free what was recorded, and stop recording the allocator's history."""
        # torch's profiler is part of a reference cycle, which Python's collector may free late.
        self.profiler.profiler = None
        if self.ctx.device.type == "cuda" and self.profile.memory:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _open_step(self) -> None:
        self._range = record_function(f"ProfilerStep#{self.steps}")
        self._range.__enter__()

    def _close_step(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None


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
