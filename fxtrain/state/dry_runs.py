"""The results of a dry run, as records."""

from typing import Literal

import attrs

from fxtrain._record import at_least, record
from fxtrain.state.mesh import Mesh
from fxtrain.state.plan import Plan

PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "other")


@record
class Memory:
    """Bytes that one rank uses at one moment, by their use.

    Attributes:
        parameters: Parameters of modules, as this rank holds them.
        gradients: Their gradients.
        optimizer: State of the optimizers.
        buffers: Buffers of modules.
        activations: Temporary memory of a step: activations, gathered parameters, gradients
            being reduced, temporary values.
        other: Everything else that outlives a step, such as buckets and batches.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    activations: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, part) for part in PARTS)


@record
class Traffic:
    """Collectives of one kind along one mesh axis, as issued by one rank.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, send, ...
        axis: Mesh axis; "world" for all ranks of a mesh of several axes.
        ranks: Ranks that take part in each.
        count: Number of collectives.
        bytes: Size of this rank's input tensors: its shard for an all-gather, the full tensor
            for an all-reduce or reduce-scatter. The traffic is this times what the algorithm
            sends per byte.
    """

    kind: str
    axis: str
    ranks: int
    count: int
    bytes: int


@record
class Operator:
    """Calls of one operator in a step whose sizes are equal.

    Attributes:
        name: torch's name, such as addmm.
        phase: forward, also where it is recomputed; backward; or update, in the optimizer.
        dtype: Of its first floating-point argument: fp32, bf16, fp16, fp8, or torch's name.
        flops: FLOPs of one call, of matrix products, convolutions and attention.
        bytes: Bytes that one call reads and writes.
        count: Number of calls.
    """

    name: str
    phase: Literal["forward", "backward", "update"]
    dtype: str
    flops: int
    bytes: int
    count: int


@record
class Problem:
    """A problem of the run, or a limit of the figures.

    Attributes:
        kind: memory: it does not fit; plan: fxtrain refuses; value: the code reads the value of
            a tensor, which a dry run does not have; unsupported: an operation that cannot run
            without values; mesh: the script chose another mesh than requested; steps: too few
            updates for the figures of a typical one.
        text: Description, with what to do.
        where: File and line of the user's code, if known.
        fatal: Whether it ends the run, here or for real.
    """

    kind: Literal["memory", "plan", "value", "unsupported", "mesh", "steps"]
    text: str
    where: str = ""
    fatal: bool = False


@record
class DryRun:
    """What one rank of a simulated world would need for a training step.

    Attributes:
        name: The script or function that ran.
        world: Simulated world size.
        rank: The rank that was simulated.
        mesh: Ranks per axis.
        plan: The plan of the first wrapped model; None without one.
        updates: Optimizer updates that ran.
        memory: The maximum of each part during a step.
        peak: Maximum bytes at any moment of a step, which is less than the sum of all maxima.
        setup_peak: Maximum bytes at any moment before the end of the first update.
        device_memory: Memory of a device in bytes; None if not given.
        setup: Traffic before the first forward.
        step: Traffic of one step: everything from one update to the next.
        operators: Operators of one step.
        timeline: Memory during one step, at its peaks, in order.
        problems: The problems found.
    """

    name: str
    world: int = attrs.field(validator=at_least(1))
    rank: int = attrs.field(default=0, validator=at_least(0))
    mesh: Mesh = Mesh()
    plan: Plan | None = None
    updates: int = 0
    memory: Memory = Memory()
    peak: int = 0
    setup_peak: int = 0
    device_memory: int | None = None
    setup: tuple[Traffic, ...] = ()
    step: tuple[Traffic, ...] = ()
    operators: tuple[Operator, ...] = ()
    timeline: tuple[Memory, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether no fatal problem was found."""
        return not any(problem.fatal for problem in self.problems)
