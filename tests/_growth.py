"""Count (not time) the cost of each operation as a model grows, and check that it is linear."""

import cProfile
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from fxtrain.backends import wrap
from fxtrain.checkpoint import restore, save
from fxtrain.data import shard
from fxtrain.loop import StepFns, step
from fxtrain.models import export, load_model
from fxtrain.state import DistContext, Mesh, Plan
from fxtrain.testing.cluster import Cluster
from fxtrain.testing.laws import Terms
from fxtrain.testing.traffic import wraps_tensors
from fxtrain.testing.training import on_mesh, token_rows
from fxtrain.testing.transformer import Transformer

OPERATIONS = ("wrap", "step", "save", "restore", "export", "load_model")
_BLOCKS = (2, 3, 4)  # models that differ in the number of parameters
_WIDTHS = (64, 96, 128)  # models that differ in the size of each parameter
_SLACK = 1.1
# Buffers of a manifest that no longer fits in a packet, and is gathered as well.
_MESSAGE_BYTES = 1 << 16


@attrs.frozen(kw_only=True)
class Cost:
    """The cost of one call of an operation on one rank, in the calling thread.

    Attributes:
        calls: Calls of Python and C functions.
        operators: Torch operators.
        bytes: Bytes of the tensors that operators create.
    """

    calls: int
    operators: int
    bytes: int


@attrs.frozen(kw_only=True)
class _Measured:
    """The size of a model, and the cost of each operation on it."""

    parameters: int
    bytes: int
    costs: dict[str, Cost]


def grows_linearly(
    ranks: Cluster,
    plan: Plan,
    mesh: Mesh | None = None,
    terms: Terms = Terms(),  # noqa: B008 - a frozen value
    *,
    without: tuple[str, ...] = (),
) -> None:
    """Calls and bytes of every operation grow at most linearly with parameters and their bytes.

    Counts each operation for three models that differ in the number of layers, and for three
    that differ in their width. From the second to the third, the cost per additional parameter
    or byte must not exceed that from the first to the second. Wider layers must not add calls.

    Args:
        ranks: A pool of workers.
        plan: The plan, which selects the strategy.
        mesh: Ranks per axis; None uses the context unchanged.
        terms: Its dtype is the model's dtype.
        without: Names in `OPERATIONS` that the strategy does not support.

    Raises:
        AssertionError: an operation costs more per parameter or per byte as the model grows.
    """
    sizes = [(blocks, _WIDTHS[0]) for blocks in _BLOCKS]
    sizes += [(_BLOCKS[0], width) for width in _WIDTHS[1:]]
    with tempfile.TemporaryDirectory(prefix="fxtrain-growth-") as folder:
        task = (plan, mesh, terms.dtype, tuple(sizes), without, folder)
        of_ranks = ranks.run(_measured, *task)
    found = [_total(models) for models in zip(*of_ranks, strict=True)]
    deeper, wider = found[: len(_BLOCKS)], [found[0], *found[len(_BLOCKS) :]]
    for name in found[0].costs:
        _check_deeper(f"{name}, more layers", name, deeper)
        _check_wider(f"{name}, wider layers", name, wider)


def costs_of(run: Callable[[], object]) -> Cost:
    """Call a function and count its cost."""
    meter = _Meter()
    # Counts in C, which takes half the time of a Python function that is called at each call.
    counter = cProfile.Profile(subcalls=False)
    with meter, counter:
        run()
    calls = sum(entry.callcount for entry in counter.getstats())
    return Cost(calls=calls, operators=meter.operators, bytes=meter.bytes)


class _Meter(TorchDispatchMode):
    """Runs every operator, and counts it and the bytes that it creates."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # DTensors are unwrapped first; operators on their local tensors are dispatched here later.
        if any(map(wraps_tensors, types)):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.operators += 1
        if not (func.is_view or func._schema.is_mutable):
            several = result if isinstance(result, list | tuple) else (result,)
            self.bytes += sum(one.nbytes for one in several if isinstance(one, Tensor))
        return result


def _measured(
    ctx: Any,
    plan: Plan,
    mesh: Mesh | None,
    dtype: torch.dtype,
    sizes: tuple[tuple[int, int], ...],
    without: tuple[str, ...],
    folder: str,
) -> list[_Measured]:
    """The costs for models of several sizes; the first size runs twice, as a warm-up."""
    with on_mesh(ctx, mesh) as placed:
        return [
            _of_one(placed, plan, Transformer(blocks=blocks, width=width, dtype=dtype), without,
                    Path(folder, str(number)))
            for number, (blocks, width) in enumerate((sizes[0], *sizes))
        ][1:]  # fmt: skip


def _of_one(
    ctx: DistContext, plan: Plan, net: Transformer, without: tuple[str, ...], folder: Path
) -> _Measured:
    sizes = [parameter.nbytes for parameter in net.parameters()]
    model: Any = None

    def wrapping() -> None:
        nonlocal model
        model = wrap(net, ctx, plan, optimizer=_adam)

    wrapped = costs_of(wrapping)
    tokens, _ = token_rows(4 * ctx.axis("data").world_size)
    table = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    batches = list(shard(DataLoader(table, batch_size=2), ctx, plan))
    fns = StepFns(model=model, loss=_loss)
    step(ctx, batches[0], fns)  # the first step creates the optimizer's states
    runs = {
        "step": lambda: step(ctx, batches[1], fns),
        "save": lambda: save(folder / "run", ctx, model, position=batches[1].position),
        "restore": lambda: restore(folder / "run", ctx, model),
        "export": lambda: export(model, folder / "model"),
        "load_model": lambda: load_model(folder / "model", model),
    }
    costs = {name: costs_of(run) for name, run in runs.items() if name not in without}
    costs |= {} if "wrap" in without else {"wrap": wrapped}
    return _Measured(parameters=len(sizes), bytes=sum(sizes), costs=costs)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _total(ranks: tuple[_Measured, ...]) -> _Measured:
    """Sum over all ranks, because the division of work between them depends on the model."""
    kinds = [field.name for field in attrs.fields(Cost)]
    costs = {
        name: Cost(**{kind: sum(getattr(one.costs[name], kind) for one in ranks) for kind in kinds})
        for name in ranks[0].costs
    }
    return attrs.evolve(ranks[0], costs=costs)


def _check_deeper(where: str, name: str, models: list[_Measured]) -> None:
    parameters, sizes = [one.parameters for one in models], [one.bytes for one in models]
    _grows_linearly(f"{where}: calls", parameters, [one.costs[name].calls for one in models])
    _grows_linearly(
        f"{where}: operators", parameters, [one.costs[name].operators for one in models]
    )
    moved = [one.costs[name].bytes for one in models]
    _grows_linearly(f"{where}: bytes", sizes, moved, allowed=_MESSAGE_BYTES)


def _check_wider(where: str, name: str, models: list[_Measured]) -> None:
    costs = [one.costs[name] for one in models]
    # Skips the first, whose shapes are already in caches.
    calls, operators = [one.calls for one in costs[1:]], [one.operators for one in costs[1:]]
    assert calls[1] <= _SLACK * calls[0], f"{where}: calls are {calls}"
    assert operators[1] <= _SLACK * operators[0], f"{where}: operators are {operators}"
    _grows_linearly(
        f"{where}: bytes",
        [one.bytes for one in models],
        [one.bytes for one in costs],
        allowed=_MESSAGE_BYTES,
    )


def _grows_linearly(where: str, sizes: list[int], counts: list[int], *, allowed: int = 0) -> None:
    """Assert that the second slope is not steeper than the first.

    Allows as noise 1 % of the total, 0.1 per byte or parameter, and `allowed` in total.
    """
    first, second = (
        (high - low) / (right - left)
        for (left, right), (low, high) in zip(pairwise(sizes), pairwise(counts), strict=True)
    )
    noise = 0.1 + (0.01 * counts[-1] + allowed) / (sizes[-1] - sizes[-2])
    assert second <= _SLACK * max(first, 0) + noise, (
        f"{where}: {counts} for models of {sizes}: the cost grows faster than linearly"
    )
