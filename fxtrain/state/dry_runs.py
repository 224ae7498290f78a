"""What a dry run found out, as records."""

from typing import Literal

import attrs
from attrs import validators

from fxtrain._record import record
from fxtrain.state.mesh import Mesh
from fxtrain.state.plan import Plan

__all__ = ["PARTS", "DryRun", "Memory", "Problem", "Traffic"]

PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "other")


@record
class Memory:
    """Bytes that one rank holds at one moment, by what they are.

    Attributes:
        parameters: Parameters of modules, as this rank holds them.
        gradients: Their gradients.
        optimizer: State of the optimizers.
        buffers: Buffers of modules.
        activations: What a step makes and frees again: activations, gathered parameters,
            gradients on their way, temporary values.
        other: What outlives a step and is none of these, such as buckets and batches.
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
    """Collectives of one kind along one mesh axis, as one rank makes them.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, send, ...
        axis: Mesh axis; "world" for all ranks of a mesh of several axes.
        ranks: Ranks that take part in one of them.
        count: How many.
        bytes: Of the tensors that this rank puts in: its part of an all-gather, the whole of
            an all-reduce or reduce-scatter. What travels is this times what the algorithm
            sends per byte.
    """

    kind: str
    axis: str
    ranks: int
    count: int
    bytes: int


@record
class Problem:
    """Something that would go wrong, or that the figures do not cover.

    Attributes:
        kind: memory: it does not fit; plan: fxtrain refuses; value: the code looks at the
            value of a tensor, which a dry run does not have; unsupported: an operation that
            cannot run without values; mesh: the script chose another mesh than was asked;
            steps: too few updates for the figures of a usual one.
        text: In words, with what to do.
        where: File and line of the user's code, where known.
        fatal: It ends the run, here or for real.
    """

    kind: Literal["memory", "plan", "value", "unsupported", "mesh", "steps"]
    text: str
    where: str = ""
    fatal: bool = False


@record
class DryRun:
    """What one rank of a pretended world would need for a training step.

    Attributes:
        name: The script or function that ran.
        world: Ranks pretended.
        rank: Which of them this is about.
        mesh: How they are laid out.
        plan: The plan of the first model that was wrapped; None where none was.
        updates: Optimizer updates that ran.
        memory: The most of each part during a step.
        peak: Bytes at the fullest moment of a step, which is less than all these mosts.
        setup_peak: Most bytes at any moment before the end of the first update.
        device_memory: Bytes that a device has; None where not asked.
        setup: Traffic before the first forward.
        step: Traffic of one step: everything from one update to the next.
        timeline: Memory through one step, at its fullest moments in order.
        problems: What was found.

    Example:
        >>> import fxtrain as fx
        >>> run = fx.DryRun(name="train.py", world=2, device_memory=10, setup_peak=12)
        >>> run.fits, fx.loads(fx.dumps(run), fx.DryRun) == run
        (True, True)
    """

    name: str
    world: int = attrs.field(validator=validators.ge(1))
    rank: int = attrs.field(default=0, validator=validators.ge(0))
    mesh: Mesh = Mesh()
    plan: Plan | None = None
    updates: int = 0
    memory: Memory = Memory()
    peak: int = 0
    setup_peak: int = 0
    device_memory: int | None = None
    setup: tuple[Traffic, ...] = ()
    step: tuple[Traffic, ...] = ()
    timeline: tuple[Memory, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether nothing was found that would end the run."""
        return not any(problem.fatal for problem in self.problems)
