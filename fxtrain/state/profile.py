"""Which steps of a loop are profiled, and what is recorded. Data only."""

from typing import Any, Literal

import attrs

from fxtrain._record import at_least, record


def _is_folder(_: Any, __: Any, value: str) -> None:
    if not value.strip() or not value.isprintable():
        raise ValueError("choose a folder with a name of printable characters.")


def _are_ranks(_: Any, __: Any, value: tuple[int, ...]) -> None:
    if not value or min(value) < 0 or len(set(value)) < len(value):
        raise ValueError("choose different ranks, numbered from 0, or None for all.")


@record
class Profile:
    """Which steps of a loop are profiled, and what is recorded.

    A cycle is `wait` steps without the profiler, `warmup` steps with it whose events are
    discarded, and `active` steps that are recorded. Each cycle writes one trace per rank.

    Attributes:
        folder: Where traces are written, as `cycle-000/rank-00003.json.gz`; on every machine.
        skip_first: Steps before the first cycle.
        wait: Steps of a cycle before the profiler is started, at no cost.
        warmup: Steps of a cycle in which the profiler runs and discards what it sees, since its
            first steps are slower.
        active: Steps of a cycle that are recorded. None records the whole block, with or without
            calls of `trace.step`; the other numbers of steps have no effect then.
        repeat: Number of cycles.
        activities: Devices of which events are recorded; empty for the CPU and the context's
            device.
        shapes: Record the shapes of operators' arguments.
        memory: Record memory that operators allocate and free; on CUDA also write a snapshot of
            the allocator, `cycle-000/rank-00003.pickle`, for pytorch.org/memory_viz.
        stacks: Record Python stacks; doubles the cost and triples the size.
        flops: Count the FLOPs of matrix products, convolutions, additions and multiplications;
            records shapes too.
        modules: Record the hierarchy of modules, for TorchScript.
        ranks: The ranks that are profiled; None for all.

    Example:
        >>> import fxtrain as fx
        >>> plan = fx.Plan(profile=fx.Profile(skip_first=10, active=5))
        >>> fx.state.loads(fx.state.dumps(plan), fx.Plan).profile.active
        5
    """

    folder: str = attrs.field(default="profile", validator=_is_folder)
    skip_first: int = attrs.field(default=0, validator=at_least(0))
    wait: int = attrs.field(default=1, validator=at_least(0))
    warmup: int = attrs.field(default=1, validator=at_least(0))
    active: int | None = attrs.field(default=3, validator=at_least(1))
    repeat: int = attrs.field(default=1, validator=at_least(1))
    activities: tuple[Literal["cpu", "cuda", "xpu", "mtia", "hpu"], ...] = ()
    shapes: bool = False
    memory: bool = False
    stacks: bool = False
    flops: bool = False
    modules: bool = False
    ranks: tuple[int, ...] | None = attrs.field(default=None, validator=_are_ranks)
