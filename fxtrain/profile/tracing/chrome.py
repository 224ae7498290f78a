"""Reads Chrome traces, as torch's profiler writes them."""

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import attrs

from fxtrain._errors import PlanError
from fxtrain.profile.tracing.spans import Span, union

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

    Raises:
        PlanError: the file is missing or damaged, is not a trace, or contains no steps.
    """
    data = _load(Path(file))
    try:
        return _activity(file, data)
    except PlanError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"{file}: an event of this trace is damaged ({type(error).__name__}: {error}). Record "
            f"it again."
        ) from error


def _activity(file: str | Path, data: Mapping[str, Any]) -> Activity:
    about = data.get("fxtrain", {})
    threads: dict[Any, list[_Event]] = defaultdict(list)
    device: list[_Event] = []
    steps: list[Span] = []
    for thread, found in _events(data["traceEvents"]):
        if found.kind == "user_annotation" and found.name.startswith(_STEP):
            steps.append((found.begin, found.end))
        elif found.kind in _HOST:
            threads[thread].append(found)
        elif found.kind in _DEVICE:
            device.append(found)
    if not steps:
        raise PlanError(
            f"{file}: this trace contains no steps. Record it with fx.profile and trace.step(), "
            f"or with a schedule of torch's profiler."
        )
    lanes = _Lanes()
    for events in threads.values():
        _walk(events, lanes, on_device=bool(device))
    for kernel in device:
        _add_kernel(kernel, lanes)
    return Activity(
        rank=about.get("rank", data.get("distributedInfo", {}).get("rank", 0)),
        cycle=about.get("cycle", 0),
        steps=tuple(sorted(steps)[: about.get("steps")]),
        compute={phase: union(lanes.compute[phase]) for phase in PHASES},
        collectives=union(lanes.collectives),
        host={phase: union(lanes.host[phase]) for phase in PHASES},
        flops=about.get("flops"),
    )


def _load(path: Path) -> Mapping[str, Any]:
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except OSError as error:
        raise PlanError(f"{path}: cannot read this trace: {error.strerror or error}.") from error
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        raise PlanError(
            f"{path}: this file is not a complete Chrome trace ({error}). Record it again."
        ) from error
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise PlanError(f"{path}: this file is not a Chrome trace: it contains no traceEvents.")
    return data


def _events(events: Iterable[Any]) -> Iterable[tuple[Any, _Event]]:
    """The events that last, with their threads."""
    for event in events:
        if event.get("ph") != "X" or "dur" not in event:
            continue
        begin = round(event["ts"] * 1000)
        end = round((event["ts"] + event["dur"]) * 1000)
        correlation = event.get("args", {}).get("correlation")
        kind, name = event.get("cat", ""), event.get("name", "")
        yield (event.get("pid"), event.get("tid")), _Event(begin, end, kind, name, correlation)


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
