"""Dry runs: a function or script as one rank of a simulated world, which transfers nothing."""

import itertools
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils.data import DataLoader

from fxtrain import ops
from fxtrain._display import counted, read_bytes, show_bytes
from fxtrain.errors import ContextError, FxError, PlanError, StepError
from fxtrain.ops.connecting import plan_variables
from fxtrain.ops.splitting import chunk_of
from fxtrain.profiling.fake_tensors import FakeValuesMode, is_library
from fxtrain.profiling.operators import operators
from fxtrain.profiling.tables import show_mesh
from fxtrain.profiling.watching import (
    LoopRecorder,
    RecordedCall,
    StepsConverged,
    recording,
    sum_calls,
)
from fxtrain.state import DistContext, DryRun, Mesh, Plan, Problem, Wrapped
from fxtrain.state.dry_runs import PARTS
from fxtrain.state.files import given_values, plan_with
from fxtrain.state.mesh import AXES, axis_groups, resolve_mesh
from fxtrain.state.topology import read_topology

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
    launched = plan_variables()
    planned = plan_with(given_values(launched), Plan()).mesh
    variables = place(world, rank, mesh or planned)

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
    look: Callable[[Wrapped], object] | None = None,
) -> DryRun:
    """Like `dry_run`, for a program that connects by itself from environment variables.

    `look` is called at the end with the wrapped model that the first optimizer updates, if there is
    one; its open window has the micro-batches of the last update.
    """
    size = read_bytes(device_memory)
    fakes = FakeValuesMode()
    watch = LoopRecorder(most=_MOST_UPDATES, fakes=fakes.fakes)
    ended: BaseException | None = None
    patches = (
        real_tables(), load_in_process(watch), swappable(fakes), lazy_chunks(), formattable(),
    )  # fmt: skip
    with ExitStack() as stack:
        for context in (fake_group(variables), *patches, fakes, recording(watch, fakes)):
            stack.enter_context(context)
        try:
            call()
        except StepsConverged:
            ended = None
        except Exception as error:
            if not ends_the_run(error):
                raise
            ended = error
        wrapped = watch.wrapped
        if wrapped is not None and look is not None:
            look(wrapped)
    if not watch.marks and ended is None:
        raise StepError(
            f"The dry run of {name} recorded no update: it ended without a call of an optimizer's "
            f"step(). Train at least one batch; check that neither an argument nor "
            f"`if __name__ == ...` skips the training."
        )
    at = read_topology(variables)
    chosen = resolve_mesh(mesh or Mesh(), at.world_size) if wrapped is None else wrapped.ctx.mesh
    run = DryRun(
        name=name,
        world=at.world_size,
        rank=at.rank,
        mesh=chosen,
        plan=None if wrapped is None else wrapped.plan,
        updates=len(watch.marks),
        device_memory=size,
        **figures(watch, axis_namer(chosen, at.rank)),
    )
    return find_problems(run, requested=mesh, ended=ended, peeks=fakes.peeks)


def figures(watch: LoopRecorder, axis_of: Callable[[RecordedCall], str]) -> dict[str, Any]:
    """The recorded figures of setup and of the last step, as fields of a `DryRun`."""
    memory, traffic = watch.memory, watch.traffic
    end = len(memory.changes), len(traffic), len(watch.operators)
    first = watch.started or end
    marks = [first, *watch.marks] if watch.marks else [(0, 0, 0), end]
    (start, first_call, first_operator), (stop, last_call, last_operator) = marks[-2:]
    return {
        "memory": memory.most(start, stop),
        "peak": memory.peak(start, stop),
        "setup_peak": memory.peak(0, marks[1][0]),
        "setup": sum_calls(traffic[: first[1]], axis_of),
        "step": sum_calls(traffic[first_call:last_call] if watch.marks else (), axis_of),
        "operators": operators(watch.operators[first_operator:last_operator]),
        "timeline": memory.moments(start, stop, most=_MOMENTS),
    }


def axis_namer(mesh: Mesh, rank: int) -> Callable[[RecordedCall], str]:
    """A function that maps a collective, in which `rank` takes part, to the mesh axis of its ranks.

    Example:
        >>> name = axis_namer(Mesh(replicate=2, shard=2, tensor=2), 0)
        >>> for ranks in (0, 1), (0, 2), (0, 2, 4, 6), (0, 3):
        ...     print(name(RecordedCall("all_reduce", ranks, "", 4)))
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

    def name_of(call: RecordedCall) -> str:
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
    """Open the fake process group that these variables describe, as torch's default one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ContextError("A dry run opens a process group. Close the context first.")
    at = read_topology(variables)
    # torch sets a hook that begins each line of an error with a rank, around the one before it.
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=at.rank, world_size=at.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


_TORCHAO = ("torchao.optim.subclass_4bit", "torchao.optim.subclass_8bit")
_TABLES = ("get_qmap_signed", "get_qmap_unsigned")


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a class or module within the block."""
    usual = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, usual)


def load_in_process(watch: LoopRecorder) -> AbstractContextManager[Any]:
    """Make data loaders load in this process, while recorded.

    Fake tensors cannot be sent between processes.
    """

    usual = DataLoader.__iter__

    class Reading:
        """A loader's iterator, whose reads are no part of a step."""

        def __init__(self, rows: Any) -> None:
            self._rows = rows

        def __iter__(self) -> "Reading":
            return self

        def __next__(self) -> Any:
            with watch.loading():
                return next(self._rows)

    def read_here(loader: Any) -> Any:
        settings = loader.num_workers, loader.timeout
        loader.num_workers, loader.timeout = 0, 0
        try:
            return Reading(usual(loader))
        finally:
            loader.num_workers, loader.timeout = settings

    return replaced(DataLoader, "__iter__", read_here)


def swappable(fakes: FakeValuesMode) -> AbstractContextManager[Any]:
    """Allow `module.to(...)` to swap parameters.

    torch raises if a weak reference to one exists, and its fake mode keeps some.
    """
    usual = torch.utils.swap_tensors

    def swap(tensor: Any, other: Any) -> None:
        fakes.forget_origins()
        usual(tensor, other)

    return replaced(torch.utils, "swap_tensors", swap)


def lazy_chunks() -> AbstractContextManager[Any]:
    """Make FSDP2 create only the chunks of a parameter that it uses.

    It creates one for each rank, and uses this rank's and the first.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    return replaced(_fsdp_param, "_chunk_with_empty", _Chunks)


def formattable() -> AbstractContextManager[Any]:
    """Make `f"{loss:.3f}"` read a value, as for any zero-dimensional tensor."""
    usual = torch.Tensor.__format__

    def write(tensor: torch.Tensor, spec: str) -> str:
        if isinstance(tensor, FakeTensor) and tensor.dim() == 0:
            return format(tensor.item(), spec)
        return usual(tensor, spec)

    return replaced(torch.Tensor, "__format__", write)


class _Chunks:
    """A tensor's chunks, each created on access."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._num_chunks, self._dim = tensor, num_chunks, dim

    def __getitem__(self, index: int) -> torch.Tensor:
        return chunk_of(self._tensor, self._num_chunks, self._dim, index)


@contextmanager
def real_tables() -> Iterator[None]:
    """Around a dry run: the tables that torchao and bitsandbytes keep have values afterwards.

    A table that is computed without values would silently spoil training in the same process.
    """
    try:
        yield
    finally:
        for home in [sys.modules[home] for home in _TORCHAO if home in sys.modules]:
            for name in _TABLES:
                getattr(home, name).cache_clear()
        tables: dict[str, Any] = getattr(
            sys.modules.get("bitsandbytes.functional"), "name2qmap", {}
        )
        for name in [name for name, table in tables.items() if isinstance(table, FakeTensor)]:
            del tables[name]


_NO_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
# torch's messages for reading the memory of a tensor without values.
_WORDS = (".numpy() is not supported for tensor subclasses", "data is not allocated yet")


def ends_the_run(error: BaseException) -> bool:
    """Whether an error is a result of the dry run rather than a bug in the user's code."""
    return isinstance(error, (FxError, *_NO_VALUES)) or any(word in str(error) for word in _WORDS)


def find_problems(
    run: DryRun,
    *,
    requested: Mesh | None,
    ended: BaseException | None,
    peeks: Mapping[tuple[str, str], int],
) -> DryRun:
    """Return the run with its problems, fatal ones first."""
    problems = [*([] if ended is None else [_ending(ended)]), *_of_figures(run, requested)]
    if run.updates <= 1 and ended is None:
        text = (
            "Only one update ran, so the figures are those of a first step and may include setup. "
            "Run at least three updates."
        )
        problems.append(Problem(kind="steps", text=text))
    for (where, substitute), count in peeks.items():
        text = (
            f"This line reads the value of a tensor ({counted(count, 'time')}). A dry run has "
            f"no values and returned {substitute}. If the program branches on it, the figures "
            f"are for that branch. On a real device, the read also waits for all preceding work."
        )
        if where:
            problems.append(Problem(kind="value", text=text, where=where))
    ordered = sorted(problems, key=lambda problem: not problem.fatal)
    return attrs.evolve(run, problems=tuple(ordered))


def _ending(error: BaseException) -> Problem:
    where = _place(error)
    if isinstance(error, FxError):
        text = f"{type(error).__name__}: {error}"
        return Problem(kind="plan", text=text, where=where, fatal=True)
    operator = getattr(error, "func", None)
    if operator is None and isinstance(error, UnsupportedOperatorException):
        operator = error.args[0] if error.args else None
    kind = "value"
    if isinstance(error, DynamicOutputShapeException):
        problem = (
            "returns a shape that depends on values, which a dry run does not have. Use a fixed "
            "shape, for example by multiplying with a mask, or skip it in a dry run."
        )
    elif isinstance(error, UnsupportedOperatorException):
        kind = "unsupported"
        problem = (
            "has no fake implementation. Register one with torch.library.register_fake, or skip it "
            "in a dry run."
        )
    else:
        problem = (
            f"reads values, which a dry run does not have ({str(error).splitlines()[0]}). Skip it "
            f"in a dry run, for example if ctx.comm.simulated."
        )
    what = "This line" if operator is None else f"The operator {operator}"
    return Problem(kind=kind, text=f"{what} {problem}", where=where, fatal=True)


_ADVICE = {
    "parameters": "Shard them over more ranks, or store them in a smaller dtype.",
    "gradients": "Shard them over more ranks.",
    "optimizer": "Shard its state over more ranks, or choose an optimizer with less state.",
    "buffers": "Look for buffers that could be computed on demand.",
    "activations": "Use smaller batches, accumulate=, recompute=, or context or tensor "
    "parallelism.",
    "other": "Look for tensors kept from step to step, such as outputs of earlier batches.",
}


def _of_figures(run: DryRun, requested: Mesh | None) -> Iterator[Problem]:
    """Problems of memory and of the mesh."""
    size = run.device_memory
    if size is not None and run.peak > size:
        largest = max(PARTS, key=lambda part: getattr(run.memory, part))
        text = (
            f"A step needs {show_bytes(run.peak)}, but the device has {show_bytes(size)}. The "
            f"largest part is {largest}, {show_bytes(getattr(run.memory, largest))}. "
            f"{_ADVICE[largest]}"
        )
        yield Problem(kind="memory", text=text, fatal=True)
    elif size is not None and run.setup_peak > size:
        text = (
            f"A step fits, but setup and the first step need {show_bytes(run.setup_peak)}, and "
            f"the device has {show_bytes(size)}. Build the model on the CPU or the meta device, "
            f"and move only this rank's shard to the device."
        )
        yield Problem(kind="memory", text=text)
    if requested is not None and resolve_mesh(requested, run.world) != run.mesh:
        text = (
            f"The program itself chose Mesh({show_mesh(run.mesh)}), so "
            f"Mesh({show_mesh(requested)}) was not used. Call fx.detect() without mesh=."
        )
        yield Problem(kind="mesh", text=text)


def _place(error: BaseException) -> str:
    """File and line of the innermost frame of user code in an error's traceback."""
    frames = [
        (frame.f_globals.get("__name__", ""), frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [f"{file}:{line}" for name, file, line in frames if not is_library(str(name))]
    return own[-1] if own else ""
