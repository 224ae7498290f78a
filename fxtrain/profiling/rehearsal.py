"""Run a user's function or script as one rank of a simulated world, which transfers nothing."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import distributed as dist

from fxtrain import ops
from fxtrain._byte_units import read_bytes
from fxtrain.errors import ContextError, PlanError, StepError
from fxtrain.ops.connecting import launched_plan
from fxtrain.profiling.dispatched_traffic import Collective, summary
from fxtrain.profiling.fake_tensors import FakeValuesMode
from fxtrain.profiling.problems import ends_the_run, find_problems
from fxtrain.profiling.torch_patches import (
    formattable,
    lazy_chunks,
    load_in_process,
    real_tables,
    swappable,
)
from fxtrain.profiling.watching import LoopRecorder, Mark, StepsConverged, recording
from fxtrain.state import DistContext, DryRun, Mesh, dumps
from fxtrain.state.files import PLAN_VARIABLE
from fxtrain.state.mesh import AXES, axis_groups, resolve_mesh
from fxtrain.state.topology.environments import read_topology

# The first step sets up, DDP reorders its buckets in the second, the third is typical, and the
# fourth confirms it.
_MOST_UPDATES = 4
_MOMENTS = 240
_OWN_MESH = "mesh_"
NODE_RANKS = 8


def dry_run(
    fn: Callable[[DistContext], object],
    *,
    world: int,
    rank: int = 0,
    mesh: Mesh | None = None,
    device_memory: int | str | None = None,
) -> DryRun:
    """Run a training loop without values, as one rank of any world size, and report its needs.

    The function runs on torch's fake tensors and fake process group, with `fx.wrap`, `fx.shard`
    and `fx.step` or with plain torch. Build the model inside it. The dry run ends once steps
    are equal, so an endless loop is fine.

    Args:
        fn: Takes a context and trains; at least one optimizer must update.
        world: World size to simulate.
        rank: The rank to run as.
        mesh: Ranks per axis; by default that of the launch's plan, or else all ranks replicate.
        device_memory: Memory of one device: bytes, or text such as "80GB" or "24GiB".

    Returns:
        Memory of this rank by part, traffic by kind and axis, and problems. Problems include
        errors in the plan and operations that need values.

    Effects:
        Opens and closes torch's default process group. All other effects of the function are
        real, such as files that it writes and lines that it prints.

    Raises:
        ContextError: the mesh does not fit the world size, or a process group is open.
        PlanError: the rank does not exist, or `device_memory` is malformed.
        StepError: the function returned without an update.

    Example:
        >>> import fxtrain as fx, torch
        >>> def train(ctx):
        ...     net = torch.nn.Linear(1000, 1000, bias=False)
        ...     model = fx.wrap(net, ctx, optimizer=lambda params: torch.optim.Adam(params))
        ...     loader = torch.utils.data.DataLoader(torch.ones(9999, 1000), batch_size=4)
        ...     fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
        ...     for batch in fx.shard(loader, ctx):
        ...         fx.step(ctx, batch, fns)
        >>> run = fx.dry_run(train, world=64)
        >>> run.memory.parameters, run.memory.gradients, run.memory.optimizer
        (4000000, 4000000, 8000004)
        >>> [(row.kind, row.axis, row.count, row.bytes) for row in run.step]
        [('all_reduce', 'replicate', 1, 4000000)]
    """
    given = launched_plan()
    planned = None if given is None else given.mesh
    variables = place(world, rank, mesh or planned)
    launched = {} if given is None else {PLAN_VARIABLE: dumps(given)}

    def call() -> None:
        with ops.detect({**variables, **launched}, device="cpu", mesh=mesh) as ctx:
            fn(ctx)

    name = getattr(fn, "__name__", type(fn).__name__)
    return rehearse(call, variables, name=name, mesh=mesh or planned, device_memory=device_memory)


def rehearse(
    call: Callable[[], Any],
    variables: Mapping[str, str],
    *,
    name: str,
    mesh: Mesh | None,
    device_memory: int | str | None,
) -> DryRun:
    """Like `dry_run`, for a program that connects by itself from environment variables."""
    size = read_bytes(device_memory)
    fakes = FakeValuesMode()
    watch = LoopRecorder(most=_MOST_UPDATES, fakes=fakes.fakes)
    ended: BaseException | None = None
    patches = (
        real_tables(), load_in_process(watch), swappable(fakes), lazy_chunks(), formattable(),
    )  # fmt: skip
    with ExitStack() as stack:
        for one in (fake_group(variables), *patches, fakes, recording(watch, fakes)):
            stack.enter_context(one)
        try:
            call()
        except StepsConverged:
            ended = None
        except Exception as error:
            if not ends_the_run(error):
                raise
            ended = error
        wrapped = watch.wrapped
    if not watch.marks and ended is None:
        raise StepError(
            f"The dry run of {name} recorded no update: it ended without a call of an optimizer's "
            f"step(). Train at least one batch; check that neither an argument nor "
            f"`if __name__ == ...` skips the training."
        )
    at = read_topology(variables)
    chosen = resolve_mesh(mesh or Mesh(), at.world_size) if wrapped is None else wrapped.ctx.mesh
    found = DryRun(
        name=name,
        world=at.world_size,
        rank=at.rank,
        mesh=chosen,
        plan=None if wrapped is None else wrapped.plan,
        updates=len(watch.marks),
        device_memory=size,
        **figures(watch, axis_namer(chosen, at.rank)),
    )
    return find_problems(found, requested=mesh, ended=ended, peeks=fakes.peeks)


def figures(watch: LoopRecorder, axis_of: Callable[[Collective], str]) -> dict[str, Any]:
    """The recorded figures of setup and of the last step, as fields of a `DryRun`."""
    memory, traffic = watch.memory, watch.traffic
    end = Mark(len(memory.changes), len(traffic))
    first = watch.started or end
    marks = [first, *watch.marks] if watch.marks else [Mark(0, 0), end]
    start, stop = marks[-2], marks[-1]
    moments = memory.moments(start.memory, stop.memory, most=_MOMENTS)
    return {
        "memory": memory.most(start.memory, stop.memory),
        "peak": memory.peak(start.memory, stop.memory),
        "setup_peak": memory.peak(0, marks[1].memory),
        "setup": summary(traffic[: first.traffic], axis_of),
        "step": summary(traffic[start.traffic : stop.traffic] if watch.marks else (), axis_of),
        "timeline": moments,
    }


def axis_namer(mesh: Mesh, rank: int) -> Callable[[Collective], str]:
    """A function that maps a collective to the mesh axis along which it runs.

    Args:
        mesh: The resolved mesh.
        rank: A rank that takes part in every collective.

    Example:
        >>> name = axis_namer(Mesh(replicate=2, shard=2, tensor=2), 0)
        >>> for ranks in (0, 1), (0, 2), (0, 2, 4, 6), (0, 3):
        ...     print(name(Collective("all_reduce", ranks, "", 4)))
        tensor
        shard
        data
        2 ranks
    """
    real = [axis for axis in AXES if mesh.sizes[axis] > 1]
    names: dict[tuple[int, ...], str] = {}
    for count in range(1, len(real) + 1):
        for axes in itertools.combinations(real, count):
            (own,) = (group for group in axis_groups(mesh, axes) if rank in group)
            name = "data" if axes == ("replicate", "shard") else " + ".join(axes)
            names.setdefault(tuple(own), "world" if axes == tuple(real) and count > 1 else name)

    def name_of(call: Collective) -> str:
        if call.ranks in names:
            return names[call.ranks]
        # A DeviceMesh of the script.
        axis = call.label.startswith(_OWN_MESH) and call.label[len(_OWN_MESH) :]
        return axis or f"{len(call.ranks)} ranks"

    return name_of


def place(world: int, rank: int, mesh: Mesh | None) -> dict[str, str]:
    """The environment variables of one rank, as a launcher sets them.

    Raises:
        PlanError: the rank does not exist.
        ContextError: the mesh does not fit the world size.
    """
    if type(world) is not int or world < 1:
        raise PlanError(f"A dry run with world={world!r}: pass a number of ranks, 1 or more.")
    if type(rank) is not int or not 0 <= rank < world:
        raise PlanError(
            f"A dry run as rank={rank!r} of {world}: choose a rank from 0 to {world - 1}."
        )
    resolve_mesh(mesh or Mesh(), world)
    # The largest node size that divides the world size.
    local = next(size for size in range(min(world, NODE_RANKS), 0, -1) if world % size == 0)
    variables = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank % local,
        "LOCAL_WORLD_SIZE": local,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }
    return {name: str(value) for name, value in variables.items()}


@contextmanager
def fake_group(variables: Mapping[str, str]) -> Iterator[None]:
    """Open the fake process group that these variables describe.

    Effects:
        Opens and closes torch's default process group in this process.

    Raises:
        ContextError: a process group is already open.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ContextError(
            "dry_run: this process already has a process group, and a dry run opens its own. "
            "Close the context first, or use `fxtrain plan`, which starts a new process."
        )
    at = read_topology(variables)
    dist.init_process_group("fake", store=FakeStore(), rank=at.rank, world_size=at.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
