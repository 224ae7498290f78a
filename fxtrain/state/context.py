"""The context: which rank this is, of how many, on which device, and whom it can reach."""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from fxtrain._errors import ContextError, MeshError
from fxtrain._other_names import call_hint
from fxtrain.state.mesh import Mesh
from fxtrain.state.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import distributed as dist

__all__ = ["Comm", "CommState", "DistContext", "check_connected", "with_plan"]


@attrs.define(eq=False)
class CommState:
    """What changes while one communicator is used; owned by exactly one `Comm`.

    The one mutable part of a context, as a process group has its sequence number. What depends
    on it: whether a call is allowed at all (`thread`, `closed`, `failure`), which calls are
    compared between ranks (`verified_calls`, `pending_check`), and what closing and saving must
    wait for, keep or release (`background_tasks`, `restored_from`, the groups and buffers).
    Identity decides equality and hash.

    Attributes:
        thread: The thread that makes the calls, by its identifier; None until the first call
            of a communicator that was made for another thread.
        call_count: Collectives started on this communicator.
        verified_calls: Digests of call signatures that every rank was found to share.
        pending_check: The check of the last device collective, not yet waited for.
        failure: The message of the failure that left the communicator unusable.
        background_tasks: Work in the background that still needs the ranks, with a `result()`;
            closing waits for it.
        save_context: The ranks over a group of their own, for saves in the background.
        save_buffer: Host memory that saves copy tensors to, uint8, used again by the next one.
        restored_from: The checkpoint of the last restore, which no save may prune.
        in_main_first: This rank is inside a block of `ops.main_first`.
        submesh_groups: Groups opened for models that split ranks otherwise than the mesh does,
            by how they split them.
        packets: Room for what the ranks send each other.
        routes: Ways of small calls through it, by their form.
        opened_groups: Process groups that were opened for this context, to be closed with it.
        closed: The context was closed, so that no call can be made.
        children: Of the axes and duplicates of this communicator, which are closed with it.
        logged_plans: Plans of the script whose difference from the launch's was logged.
    """

    thread: int | None = attrs.field(factory=threading.get_ident)
    call_count: int = 0
    verified_calls: set[bytes] = attrs.field(factory=set)
    pending_check: Any = None
    failure: str | None = None
    background_tasks: list[Any] = attrs.field(factory=list)
    save_context: DistContext | None = None
    save_buffer: torch.Tensor | None = attrs.field(default=None, repr=False)
    restored_from: str | None = None
    in_main_first: bool = False
    submesh_groups: dict[str, Any] = attrs.field(factory=dict)
    packets: Any = None
    routes: dict[Any, Any] = attrs.field(factory=dict)
    opened_groups: list[Any] = attrs.field(factory=list)
    closed: bool = False
    children: weakref.WeakSet[CommState] = attrs.field(factory=weakref.WeakSet, repr=False)
    logged_plans: set[Plan] = attrs.field(factory=set, repr=False)

    def close(self) -> None:
        """Refuse every later call, of the parts too."""
        self.closed = True
        for part in self.children:
            part.close()


def _nothing(error: BaseException | None) -> None:
    """Close nothing: the groups belong to somebody else."""


@attrs.frozen(kw_only=True, eq=False)
class Comm:
    """The way to the other ranks of a context. Identity decides equality and hash.

    Attributes:
        group: torch's process group for tensors on the context's device; None alone.
        control: A gloo group of the same ranks for checks, objects and CPU tensors, apart
            from the group in which gradients travel.
        store: Where ranks leave their view of a failed call.
        name: Key of this communicator in the store, equal on its ranks.
        ranks: Global rank of every member, in order.
        timeout_s: Longest time that a collective waits for a rank, in seconds.
        checks: Whether calls are compared between the ranks before they run.
        simulated: The ranks are torch's fake backend: traffic is counted, nothing travels.
        close: Destroys the process groups that this context opened; takes the error that ends
            the run, if any, and leaves it for the other ranks to read.
        state: The calls made so far.
        key: Of the run's secret, by which objects that travel are sealed; empty without one.
    """

    group: dist.ProcessGroup | None = None
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

    def finish(self, error: BaseException | None) -> None:
        """Wait for work in the background, then close; its errors are raised or noted."""
        found = error
        while self.state.background_tasks:
            try:
                self.state.background_tasks.pop(0).result()
            except Exception as failed:  # whatever it is: the groups are closed all the same
                if found is None:
                    found = failed
                else:
                    found.add_note(f"And in the background: {failed}")
        self.state.close()
        self.close(found)
        if found is not None and error is None:
            raise found


def _cpu() -> torch.device:
    return importlib.import_module("torch").device("cpu")


@attrs.frozen(kw_only=True)
class DistContext:
    """One rank's place among all ranks, found once and passed to everything.

    Attributes:
        rank: Number of this rank, from 0.
        world_size: Number of ranks.
        local_rank: Number of this rank on its node.
        local_world_size: Ranks on this node.
        node_rank: Number of this node.
        num_nodes: Number of nodes.
        device: Where this rank computes.
        comm: The way to the other ranks.
        mesh: Ranks per axis; the devices of this one rank, where it drives several.
        launcher: What started the ranks: torchrun, slurm, openmpi, mpich, pjrt, plain, none,
            or "group" when a process group was there already.
        devices: Devices that this rank drives as one: several only under XLA's SPMD.
        given_plan: The plan that came with the launch, which `fx.wrap` and `fx.shard` use where
            they get none; None where the launch brought none.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    device: torch.device = attrs.field(factory=_cpu)
    comm: Comm = attrs.field(factory=Comm)
    mesh: Mesh = attrs.field(factory=lambda: Mesh(replicate=1))
    launcher: str = "none"
    devices: int = 1
    given_plan: Plan | None = attrs.field(default=None, repr=False)
    _axes: Mapping[str, DistContext] = attrs.field(
        factory=lambda: MappingProxyType({}), repr=False, eq=False, alias="axes"
    )

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
                tokens.

        Raises:
            MeshError: there is no such axis.

        Example:
            >>> import fxtrain as fx
            >>> with fx.detect(device="cpu") as ctx:
            ...     ctx.axis("tensor").world_size
            1
        """
        found = self._axes.get(name)
        if found is not None:
            return found
        if name in ("data", "loss", "replicate") and not self._axes:
            return self
        if name in self.mesh.sizes and not self._axes:
            part = Comm(state=CommState(closed=self.comm.state.closed))
            self.comm.state.children.add(part.state)
            return attrs.evolve(self, rank=0, world_size=1, comm=part, mesh=Mesh(replicate=1))
        raise MeshError(
            f"ctx.axis({name!r}): this context has no such axis. "
            f"Its axes are data, loss, {', '.join(self.mesh.sizes)}."
        )

    if not TYPE_CHECKING:  # for a type checker, every name would exist

        def __getattr__(self, name: str) -> NoReturn:
            other = "" if name.startswith("__") else call_hint(name)
            raise AttributeError(f"A context has no attribute {name!r}.{other}")

    def __enter__(self) -> DistContext:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.comm.finish(error)


def with_plan(ctx: DistContext, plan: Plan | None) -> DistContext:
    """The same context and axes, with the plan that came with the launch.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.state.with_plan(ctx, fx.Plan(seed=7)).axis("data").given_plan.seed
        7
    """
    axes = {name: with_plan(axis, plan) for name, axis in ctx._axes.items()}
    return attrs.evolve(ctx, given_plan=plan, axes=MappingProxyType(axes))


def check_connected(call: str, ctx: DistContext) -> None:
    """Refuse a context that was closed.

    Raises:
        ContextError: it was; on every rank, before any of them waits.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.state.check_connected("step", ctx)
    """
    if ctx.comm.state.closed:
        raise ContextError(
            f"{call}: this context is closed; call fx.detect() again. fx.close(ctx), or the end of "
            f"a `with` block of the context, closed it."
        )
