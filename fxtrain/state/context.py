"""The context: this rank, the world size, the device, and the communicators."""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import attrs

from fxtrain._display import Displayed
from fxtrain.errors import ContextError, MeshError
from fxtrain.state.mesh import SPANS, Mesh
from fxtrain.state.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import distributed as dist

Slot = TypeVar("Slot")


@attrs.define(eq=False)
class CommState:
    """The mutable state of one communicator; owned by exactly one `Comm`.

    The one mutable part of a context, like the sequence number of a process group: whether it can
    be used, and what closing must wait for and release. What a layer keeps beside that is in a
    record of its own (`Comm.slot`).

    Attributes:
        failure: Message of the failure that made the communicator unusable.
        background_tasks: Background work that still needs the ranks, with a `finish()` that
            waits for it; closing calls it.
        open_runs: Iterators of `fit`; closing ends them first, since they save their runs.
        last_checks: Functions that closing calls before, if no error ends the run; they raise for
            calls that not all ranks made.
        at_close: Functions that closing calls, after no more calls are accepted.
        opened_groups: Process groups that were opened for this context, to be closed with it.
        closed: Whether the context was closed, so that no call can be made.
        children: The axes and duplicates of this communicator, which are closed with it.
        slots: The record of each layer, by its class.
    """

    failure: str | None = None
    background_tasks: list[Any] = attrs.field(factory=list)
    open_runs: weakref.WeakSet[Any] = attrs.field(factory=weakref.WeakSet, repr=False)
    last_checks: list[Callable[[], None]] = attrs.field(factory=list)
    at_close: list[Callable[[], None]] = attrs.field(factory=list)
    opened_groups: list[Any] = attrs.field(factory=list)
    closed: bool = False
    children: weakref.WeakSet[CommState] = attrs.field(factory=weakref.WeakSet, repr=False)
    slots: dict[type, Any] = attrs.field(factory=dict, repr=False)

    def close(self) -> None:
        """Refuse every later call, also on axes and duplicates."""
        self.closed = True
        for part in self.children:
            part.close()
        while self.at_close:
            self.at_close.pop()()

    def end_runs(self) -> list[Exception]:
        """Close every open run; the errors."""
        errors = []
        while self.open_runs:
            try:
                self.open_runs.pop().close()
            except Exception as error:  # any error: the caller raises it
                errors.append(error)
        return errors


def _nothing(error: BaseException | None) -> None:
    """Close nothing: the groups belong to another owner."""


@attrs.define(kw_only=True, eq=False, on_setattr=attrs.setters.frozen)
class Comm:
    """The communicator of a context.

    Attributes:
        group: torch's process group for tensors on the context's device; None at one rank. The one
            field that changes: a block of `separate_groups` has other groups.
        control: A gloo group of the same ranks for checks, objects and CPU tensors. That of all
            ranks is separate from the group for gradients; that of an axis is `group`, if it has
            gloo for the CPU, where messages between two ranks do not mix with collectives.
        store: Where ranks record their view of a failed call.
        name: Key of this communicator in the store, equal on its ranks.
        ranks: Global rank of every member, in order.
        timeout_s: Maximum time that a collective waits for a rank, in seconds.
        checks: Whether calls are compared between the ranks before they run.
        simulated: The ranks are torch's fake backend: traffic is counted, nothing is sent.
        close: Destroys the process groups that this context opened; takes the error that ends
            the run, if any, and publishes it for the other ranks.
        state: The mutable state.
        key: Derived from the run's secret, signs objects that are sent; empty without one.
    """

    group: dist.ProcessGroup | None = attrs.field(default=None, on_setattr=attrs.setters.NO_OP)
    control: dist.ProcessGroup | None = None
    store: Any = None
    name: str = "world"
    ranks: tuple[int, ...] = (0,)
    timeout_s: float = 600.0
    checks: bool = True
    simulated: bool = False
    close: Callable[[BaseException | None], None] = _nothing
    state: CommState = attrs.field(factory=CommState)
    key: bytes = attrs.field(default=b"", repr=False)

    def slot(self, kind: type[Slot]) -> Slot:
        """What a layer keeps about this communicator: a record of its own, made on first use."""
        slots = self.state.slots
        if kind not in slots:
            slots[kind] = kind()
        return slots[kind]

    def finish(self, error: BaseException | None) -> None:
        """End open runs, wait for background work, then close; their errors are raised or noted."""
        errors = self.state.end_runs()
        while self.state.background_tasks:
            try:
                self.state.background_tasks.pop(0).finish()
            except Exception as failed:  # any error: the groups are closed all the same
                errors.append(failed)
        while self.state.last_checks and error is None:
            try:
                self.state.last_checks.pop()()
            except Exception as failed:  # as above
                errors.append(failed)
        raised = error
        for failed in errors:
            if raised is None:
                raised = failed
            else:
                raised.add_note(f"And while the context closed: {failed}")
        self.state.close()
        self.close(raised)
        if raised is not None and error is None:
            raise raised


def _cpu() -> torch.device:
    return importlib.import_module("torch").device("cpu")


@attrs.frozen(kw_only=True, repr=False)
class DistContext(Displayed):
    """This rank in the run, detected once and passed to every function.

    Attributes:
        rank: Number of this rank, from 0.
        world_size: Number of ranks.
        local_rank: Number of this rank on its node.
        local_world_size: Ranks on this node.
        node_rank: Number of this node.
        num_nodes: Number of nodes.
        device: Where this rank computes.
        comm: The communicator.
        mesh: Ranks per axis; if this is the only rank and it drives several devices, those.
        launcher: What started the ranks: torchrun, slurm, openmpi, mpich, pjrt, plain, none,
            or "group" if a process group already existed.
        devices: Devices that this rank drives as one: several only under XLA's SPMD.
        given_plan: The plan of the launch, which `fx.wrap` and `fx.shard` use by default; None
            if the launch has none.
        given_fields: The fields of that plan that the launch sets, such as `strategy.shard`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    device: torch.device = attrs.field(factory=_cpu)
    comm: Comm = attrs.field(factory=Comm, repr=False)
    mesh: Mesh = attrs.field(factory=lambda: Mesh(replicate=1))
    launcher: str = "none"
    devices: int = 1
    given_plan: Plan | None = attrs.field(default=None, repr=False)
    given_fields: tuple[str, ...] = attrs.field(default=(), repr=False)
    _axes: Mapping[str, DistContext] = attrs.field(
        factory=lambda: MappingProxyType({}), repr=False, eq=False, alias="axes"
    )

    def __repr__(self) -> str:
        axes = [f"{name}={size}" for name, size in self.mesh.sizes.items() if size > 1]
        parts = [f"rank {self.rank} of {self.world_size} on {self.device}", *axes]
        parts += [f"node {self.node_rank} of {self.num_nodes}"] if self.num_nodes > 1 else []
        parts += ["closed"] if self.comm.state.closed else []
        return f"DistContext({', '.join(parts)})"

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the highest rank."""
        return self.rank == self.world_size - 1

    def axis(self, name: str) -> DistContext:
        """The context of one mesh axis: the ranks that differ from this one only in it.

        Args:
            name: pipeline, replicate, shard, context or tensor; `data` for replicate × shard
                together, or `loss` for replicate × shard × context, whose ranks see different
                tokens; `node` for the ranks of this machine.

        Raises:
            MeshError: there is no such axis.

        Example:
            >>> import fxtrain as fx
            >>> with fx.detect(device="cpu") as ctx:
            ...     ctx.axis("tensor").world_size
            1
        """
        axis = self._axes.get(name)
        if axis is not None:
            return axis
        if name == "node" and self.num_nodes == 1:
            return self
        meshless = self._axes.keys() <= {"node"}
        if name in ("data", "loss", "replicate") and meshless:
            return self
        if name in self.mesh.sizes and meshless:
            part = Comm(state=CommState(closed=self.comm.state.closed))
            self.comm.state.children.add(part.state)
            return attrs.evolve(self, rank=0, world_size=1, comm=part, mesh=Mesh(replicate=1))
        raise MeshError(
            f"ctx.axis({name!r}): this context has no such axis. "
            f"It has data, loss, node, {', '.join(self.mesh.sizes)}."
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A context cannot be pickled, nor can what belongs to it, such as a loader from "
            "fx.shard: its process groups are those of this process. In another process, call "
            "fx.detect() and create the loader there. batch.position, which says where the data "
            "is, can be pickled."
        )

    def __deepcopy__(self, _: Any) -> DistContext:
        """The context itself: its process groups cannot be copied."""
        return self

    def __enter__(self) -> DistContext:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.comm.finish(error)


def with_plan(ctx: DistContext, plan: Plan, fields: tuple[str, ...]) -> DistContext:
    """The same context and axes, with the plan of the launch; that of an axis names no mesh."""
    within = attrs.evolve(plan, mesh=None)
    axes = {name: with_plan(axis, within, fields) for name, axis in ctx._axes.items()}
    return attrs.evolve(ctx, given_plan=plan, given_fields=fields, axes=MappingProxyType(axes))


def simulated(ctx: DistContext) -> DistContext:
    """The same context with the axes of its mesh and without process groups, to check plans for."""

    def comm(ranks: int) -> Comm:
        return Comm(ranks=tuple(range(ranks)), simulated=True)

    ctx = attrs.evolve(ctx, comm=comm(ctx.world_size))
    if ctx.world_size == 1:
        return ctx
    sizes = {name: math.prod(ctx.mesh.sizes[axis] for axis in span) for name, span in SPANS.items()}
    axes = {
        name: attrs.evolve(ctx, world_size=size, comm=comm(size), mesh=Mesh(replicate=size))
        for name, size in sizes.items()
    }
    return attrs.evolve(ctx, axes=axes)


def check_connected(call: str, ctx: DistContext) -> None:
    """Raise a ContextError if `ctx` is closed or is not a context, before any rank waits."""
    if not isinstance(ctx, DistContext):
        raise ContextError(
            f"{call}: ctx is a {type(ctx).__name__}, not a context from fx.detect(). Check the "
            f"order of the arguments."
        )
    if ctx.comm.state.closed:
        raise ContextError(
            f"{call}: this context is closed; call fx.detect() again. fx.close(ctx), or the end of "
            f"a `with` block of the context, closed it.",
            code="FX105",
        )
