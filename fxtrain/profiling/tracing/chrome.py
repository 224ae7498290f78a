"""Reads Chrome traces, as torch's profiler writes them."""

import re
import zlib
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import attrs

from fxtrain._errors import PlanError
from fxtrain.profiling.tracing.spans import Span, union
from fxtrain.profiling.tracing.trace_file import EVENTS, entries_of
from fxtrain.state import shown

__all__ = ["PHASES", "Activity", "Phase", "read_trace"]

Phase = Literal["optimizer", "backward", "data", "forward"]
# Where two phases compute at the same moment, it counts for the first.
PHASES: tuple[Phase, ...] = ("optimizer", "backward", "data", "forward")

_STEP = "ProfilerStep#"
_STARTS: Mapping[str, Phase] = {
    "Optimizer.step#": "optimizer",
    "Optimizer.zero_grad#": "optimizer",
    "enumerate(DataLoader)#": "data",
    "autograd::engine::evaluate_function": "backward",
}
_COLLECTIVE = re.compile(
    r"c10d::|_?c10d_functional|(gloo|nccl|mpi|ucc|xccl|hccl):|record_param_comms|fxtrain::exchange"
)
_COLLECTIVE_KERNEL = re.compile(r"(nccl|rccl|oneccl)", re.IGNORECASE)
_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "xpu_runtime")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_MOST_EVENTS = 8_000_000  # that last: 2 GB of a trace as torch writes it
_LATEST = 1 << 53  # microseconds; also the limit of ranks, cycles and steps
_MOST_FLOPS = 10**30
_ROUNDED_NS = 1000  # by which steps may overlap, since times are written as floats


@attrs.frozen(kw_only=True)
class Activity:
    """What one rank did in one cycle, as sets of moments.

    Attributes:
        rank: The rank.
        cycle: Number of the cycle, from 0.
        steps: The recorded steps.
        compute: When the device computed, by phase: kernels on an accelerator, operators on a CPU.
        collectives: When collectives ran, including the wait for other ranks.
        host: When this process worked on a phase without computing, such as reading data.
        flops: Floating-point operations of all recorded steps; None if not counted.
    """

    rank: int
    cycle: int
    steps: tuple[Span, ...]
    compute: Mapping[Phase, list[Span]]
    collectives: list[Span]
    host: Mapping[Phase, list[Span]]
    flops: int | None = None


class _Event(NamedTuple):
    begin: int
    end: int
    kind: str
    name: str
    correlation: Any


def read_trace(file: str | Path) -> Activity:
    """Read the trace of one rank, written by `fx.profile` or by torch's profiler itself.

    Memory holds what is kept of its events and one event at a time, so anybody may have written
    the trace.

    Raises:
        PlanError: the file is missing, damaged, too large or not a regular file, is not a trace, or
            contains no steps.
    """
    path = Path(file)
    found = _Found()
    try:
        for name, value in entries_of(path):
            found.add(name, value)
        return _activity(path, found)
    except PlanError:
        raise
    except OSError as error:
        raise PlanError(f"{path}: cannot read this trace: {error.strerror or error}.") from error
    except RecursionError:
        raise PlanError(f"{path}: this trace is nested too deeply. Record it again.") from None
    except _Damaged as error:
        raise PlanError(f"{path}: this trace is damaged: {error}. Record it again.") from None
    except (ValueError, EOFError, zlib.error) as error:
        raise PlanError(
            f"{path}: this file is not a complete Chrome trace ({error}). Record it again."
        ) from error


class _Damaged(Exception):
    """A value of a trace that torch does not write."""


class _Found:
    """What has been read of a trace."""

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}
        self.threads: dict[Any, list[_Event]] = defaultdict(list)
        self.device: list[_Event] = []
        self.steps: list[Span] = []
        self.count = 0

    def add(self, name: str, value: Any) -> None:
        """Keep one entry of the file."""
        if name in ("fxtrain", "distributedInfo"):
            self.about[name] = value
        elif name == EVENTS:
            self.about[name] = True
            if type(value) is not dict:
                raise _Damaged("an event is not an object")
            if value.get("ph") == "X" and "dur" in value:
                self._add_event(value)

    def _add_event(self, event: Mapping[str, Any]) -> None:
        self.count += 1
        if self.count > _MOST_EVENTS:
            raise _Damaged(f"it has more than {_MOST_EVENTS:,} events; record fewer steps")
        found = _event(event)
        if found.kind == "user_annotation" and found.name.startswith(_STEP):
            self.steps.append((found.begin, found.end))
        elif found.kind in _HOST:
            thread = event.get("pid"), event.get("tid")
            if not all(type(one) in _PLAIN for one in thread):
                raise _Damaged("an event has no thread")
            self.threads[thread].append(found)
        elif found.kind in _DEVICE:
            self.device.append(found)


_PLAIN = (int, str, float, type(None))


def _event(event: Mapping[str, Any]) -> _Event:
    """An event that lasts."""
    begin, lasts = (_time(event, name) for name in ("ts", "dur"))
    kind, name, arguments = event.get("cat", ""), event.get("name", ""), event.get("args", {})
    correlation = arguments.get("correlation") if type(arguments) is dict else arguments
    if type(kind) is not str or type(name) is not str or type(correlation) not in _PLAIN:
        raise _Damaged(f"an event has the name {shown(name)} and the category {shown(kind)}")
    return _Event(round(begin * 1000), round((begin + lasts) * 1000), kind, name, correlation)


def _time(event: Mapping[str, Any], name: str) -> float:
    value: Any = event.get(name)
    if type(value) not in (int, float) or not -_LATEST < value < _LATEST:
        raise _Damaged(f"an event has {name} {shown(value)}")
    return value


def _activity(path: Path, found: _Found) -> Activity:
    if EVENTS not in found.about:
        raise PlanError(f"{path}: this file is not a Chrome trace: it contains no {EVENTS}.")
    if not found.steps:
        raise PlanError(
            f"{path}: this trace contains no steps. Record it with fx.profile and trace.step(), "
            f"or with a schedule of torch's profiler."
        )
    about, ranks = (_table(found, name) for name in ("fxtrain", "distributedInfo"))
    lanes = _Lanes()
    for events in found.threads.values():
        _walk(events, lanes, on_device=bool(found.device))
    for kernel in found.device:
        _add_kernel(kernel, lanes)
    steps = _in_order(found.steps)[: _count(about, "steps", len(found.steps), least=1)]
    return Activity(
        rank=_count(about, "rank", _count(ranks, "rank", 0)),
        cycle=_count(about, "cycle", 0),
        steps=steps,
        compute={phase: union(lanes.compute[phase]) for phase in PHASES},
        collectives=union(lanes.collectives),
        host={phase: union(lanes.host[phase]) for phase in PHASES},
        flops=None if about.get("flops") is None else _count(about, "flops", 0, most=_MOST_FLOPS),
    )


def _table(found: _Found, name: str) -> Mapping[str, Any]:
    about = found.about.get(name, {})
    if type(about) is not dict:
        raise _Damaged(f"{name} is {shown(about)}")
    return about


def _count(
    about: Mapping[str, Any], name: str, default: int, *, least: int = 0, most: int = _LATEST
) -> int:
    value = about.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise _Damaged(f"{name} is {shown(value)}")
    return value


def _in_order(steps: list[Span]) -> tuple[Span, ...]:
    """The steps of a loop, one after the other."""
    steps.sort()
    for (_, end), (begin, _) in pairwise(steps):
        if begin < end - _ROUNDED_NS:
            raise _Damaged("its steps overlap")
    return tuple(steps)


class _Lanes:
    """The spans found so far."""

    def __init__(self) -> None:
        self.compute: dict[Phase, list[Span]] = {phase: [] for phase in PHASES}
        self.host: dict[Phase, list[Span]] = {phase: [] for phase in PHASES}
        self.collectives: list[Span] = []
        self.launched: dict[Any, Phase] = {}  # phases of kernels, by correlation


def _walk(events: list[_Event], lanes: _Lanes, *, on_device: bool) -> None:
    """Assign the events of one thread, which are nested, to phases."""
    events.sort(key=lambda one: (one.begin, -one.end))
    around: list[tuple[int, Phase]] = []  # ends and phases of the events around this one
    for index, event in enumerate(events):
        while around and around[-1][0] <= event.begin:
            around.pop()
        own: Phase | None = next(
            (to for name, to in _STARTS.items() if event.name.startswith(name)), None
        )
        inherited: Phase = around[-1][1] if around else "forward"
        phase: Phase = own or inherited
        around.append((event.end, phase))
        if event.correlation is not None:
            lanes.launched[event.correlation] = phase
        span = event.begin, event.end
        follower = events[index + 1] if index + 1 < len(events) else None
        is_leaf = follower is None or follower.begin >= event.end
        if on_device:
            if own == "data":
                lanes.host["data"].append(span)
        elif _COLLECTIVE.match(event.name):
            lanes.collectives.append(span)
        elif event.kind == "cpu_op" and is_leaf:
            lanes.compute[phase].append(span)
        elif event.kind == "cpu_op" or own:
            lanes.host[phase].append(span)


def _add_kernel(kernel: _Event, lanes: _Lanes) -> None:
    span = kernel.begin, kernel.end
    if kernel.kind == "kernel" and _COLLECTIVE_KERNEL.match(kernel.name):
        lanes.collectives.append(span)
    elif kernel.kind == "gpu_memcpy" and "HtoD" in kernel.name:
        lanes.compute["data"].append(span)
    else:
        lanes.compute[lanes.launched.get(kernel.correlation, "forward")].append(span)
