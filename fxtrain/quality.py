"""What number formats cost in accuracy: a model and data under several plans, and a reference."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from operator import itemgetter
from typing import Any, Literal

import attrs
import torch
import torch.nn.functional as F
from rich.console import Group, RenderableType
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fxtrain import _tree, ops
from fxtrain._display import counted, describe, show_bytes
from fxtrain._drawing import COLOURS, make_figure, make_table
from fxtrain._record import record
from fxtrain.backends import unwrap, wrap
from fxtrain.data import shard
from fxtrain.errors import DataError, PlanError
from fxtrain.loop import StepFns, step
from fxtrain.precision.quantizing import stored_tensors
from fxtrain.state import DistContext, Plan, Wrapped
from fxtrain.state.context import check_connected

__all__ = ["Case", "Compared", "Comparison", "LayerError", "compare", "plot", "table"]
__dir__ = __all__.copy  # for completion


@record
class Case:
    """A model and data on which plans are compared.

    Attributes:
        build: () → the model. Called once or twice per plan, each time with equally seeded random
            generators, so that all plans get the same weights.
        batches: The data. With several ranks, each takes every n-th batch.
        forward: (model, batch) → the outputs to compare, as one tensor. By default the model is
            called with a tuple's or list's entries, a dict's entries by name, or the batch itself.
        outputs: "logits" also compares the best entry of the last dim, "embeddings" the direction
            along the last dim.
        loss: (model, batch) → the training loss, for a curve.
        optimizer: The optimizer factory for the curve, as `fx.wrap` takes it.
    """

    build: Callable[[], nn.Module]
    batches: Sequence[Any] = attrs.field(repr=describe)
    forward: Callable[[Any, Any], Tensor] | None = None
    outputs: Literal["values", "logits", "embeddings"] = "values"
    loss: Callable[[Any, Any], Any] | None = None
    optimizer: Any = None


@attrs.frozen(kw_only=True)
class LayerError:
    """How far the outputs of one layer are from the reference, over all batches.

    The inputs of a layer differ too, so that errors of earlier layers are included.

    Attributes:
        name: Its name in the model; empty for the model's outputs.
        relative: Norm of the difference over the norm of the reference.
        largest: Largest absolute difference of an entry.
        snr_db: `relative` as a signal-to-noise ratio in decibels: -20 · log10(relative).
    """

    name: str
    relative: float
    largest: float
    snr_db: float = attrs.field(
        init=False, default=attrs.Factory(lambda layer: _decibels(layer.relative), takes_self=True)
    )


def _decibels(relative: float) -> float:
    return -20 * math.log10(relative) if relative else math.inf


@attrs.frozen(kw_only=True)
class Compared:
    """One plan beside the reference.

    Attributes:
        name: Its name.
        outputs: The error of the model's outputs.
        layers: Errors of the innermost modules, in the order of the model.
        agreement: Share of rows whose largest entry is that of the reference; None unless the
            outputs are logits.
        cosine: Smallest cosine between an embedding and that of the reference; None unless the
            outputs are embeddings.
        weight_bytes: Bytes of parameters and buffers.
        losses: The training loss of each update, of its last micro-batch; empty without a curve.
    """

    name: str
    outputs: LayerError
    layers: tuple[LayerError, ...]
    agreement: float | None = None
    cosine: float | None = None
    weight_bytes: int
    losses: tuple[float, ...] = ()


@attrs.frozen(kw_only=True)
class Comparison:
    """Plans beside a reference.

    Attributes:
        reference: The name of the reference.
        weight_bytes: Bytes of its parameters and buffers.
        losses: Its training loss of each update; empty without a curve.
        plans: The others, in the order given.
    """

    reference: str
    weight_bytes: int
    losses: tuple[float, ...] = ()
    plans: tuple[Compared, ...]


_OUTPUTS = ""  # the name of the model's own outputs
# By module: sums of squares of the difference and of the reference, and the largest difference.
_Sums = dict[str, tuple[float, float, float]]


def compare(
    case: Case,
    plans: Mapping[str, Plan],
    ctx: DistContext,
    *,
    reference: Plan = Plan(),  # noqa: B008 - a frozen value
    updates: int = 0,
) -> Comparison:
    """Compare what a model computes under several plans with a reference.

    Args:
        case: The model and the data.
        plans: By name. The names appear in tables and pictures.
        ctx: The context in which to run, on one or more ranks.
        reference: The plan to compare with; by default, fp32.
        updates: Updates of training per plan, for a curve of losses. `case` then has a loss and an
            optimizer factory. Under a quantised plan, only layers that stay unquantised train.

    Returns:
        Errors by layer and of the outputs, bytes of the weights, and losses; on every rank.

    Effects:
        Builds the reference once and each plan's model once, and both once more for a curve; two
        models are in memory at a time. Runs the reference for each plan, in evaluation mode and
        without gradients. Restores random generators.

    Raises:
        PlanError: an argument is invalid, a plan does not fit the model or this machine, or the
            model computes tensors of other shapes under a plan.
        DataError: there is no batch for a rank.
        MissingPackageError: a plan's library is not installed.

    Example:
        >>> import fxtrain as fx, torch
        >>> case = fx.quality.Case(
        ...     build=lambda: torch.nn.Linear(8, 8), batches=[torch.ones(2, 8)])
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     found = fx.quality.compare(case, {"bf16": fx.Plan(precision="bf16")}, ctx)
        >>> found.plans[0].outputs.relative < 0.01
        True
    """
    check_connected("quality.compare", ctx)
    if updates and (case.loss is None or case.optimizer is None):
        raise PlanError(f"quality.compare(updates={updates}) needs Case(loss=..., optimizer=...).")
    ranks = ctx.axis("data").world_size
    if len(case.batches) < ranks:
        raise DataError(
            f"quality.compare: {counted(len(case.batches), 'batch')} for "
            f"{counted(ranks, 'data rank')}. Pass at least one batch for each."
        )
    with ops.fork_rng(ctx, reference.seed):
        base = _wrapped(case, ctx, reference)
        outcomes = [
            _compare_outputs(case, name, base, _wrapped(case, ctx, plan))
            for name, plan in plans.items()
        ]
        size = _weight_bytes(base)
        unwrap(base)
        del base
        losses = _losses(case, ctx, reference, updates)
        curves = [_losses(case, ctx, plan, updates) for plan in plans.values()]
    quantize = "" if reference.quantize is None else f", {type(reference.quantize).__name__}"
    return Comparison(
        reference=f"{reference.precision.compute}{quantize}",
        weight_bytes=size,
        losses=losses,
        plans=tuple(map(lambda plan, curve: attrs.evolve(plan, losses=curve), outcomes, curves)),
    )


def _wrapped(case: Case, ctx: DistContext, plan: Plan, optimizer: Any = None) -> Wrapped:
    ops.seed(plan.seed, ctx)
    return wrap(case.build(), ctx, plan, optimizer=optimizer)


def _weight_bytes(model: Wrapped) -> int:
    """Bytes of the tensors of a model; shared ones count once."""
    stored = stored_tensors(model.module).values()
    tensors = {id(tensor): tensor for tensor in stored if isinstance(tensor, Tensor)}
    return sum(tensor.nbytes for tensor in tensors.values())


def _compare_outputs(case: Case, name: str, base: Wrapped, other: Wrapped) -> Compared:
    ctx = other.ctx
    sums: _Sums = {}
    rows = hits = 0
    cosine = 1.0
    base.eval()
    other.eval()
    mine = ctx.axis("data")
    for batch in case.batches[mine.rank :: mine.world_size]:
        moved = _tree.map_tensors(lambda tensor: tensor.to(ctx.device), batch)
        wanted, got = _both(case, moved, base, other, sums)
        if case.outputs == "logits":
            same = wanted.argmax(-1) == got.argmax(-1)
            rows, hits = rows + same.numel(), hits + int(same.sum())
        elif case.outputs == "embeddings":
            cosine = min(
                cosine, float(F.cosine_similarity(wanted.float(), got.float(), dim=-1).min())
            )
    size = _weight_bytes(other)
    unwrap(other)
    errors = _over_ranks(sums, ctx)
    rows, hits = ops.reduce((rows, hits), ctx, op="sum")
    return Compared(
        name=name,
        outputs=errors[_OUTPUTS],
        layers=tuple(errors[layer] for layer in innermost([n for n in errors if n != _OUTPUTS])),
        agreement=hits / rows if case.outputs == "logits" else None,
        cosine=ops.reduce(cosine, ctx, op="min") if case.outputs == "embeddings" else None,
        weight_bytes=size,
    )


@torch.no_grad()
def _both(
    case: Case, batch: Any, base: Wrapped, other: Wrapped, sums: _Sums
) -> tuple[Tensor, Tensor]:
    """The outputs of both models; adds the errors of all modules to the sums, call by call."""
    seen: dict[str, list[Tensor]] = {}

    def compare(name: str, value: Tensor) -> None:
        if seen.get(name):
            _add_error(sums, name, seen[name].pop(0), value)

    with _watched(base.module, lambda name, value: seen.setdefault(name, []).append(value.clone())):
        wanted = _outputs(case, base, batch)
    with _watched(other.module, compare):
        got = _outputs(case, other, batch)
    _add_error(sums, _OUTPUTS, wanted, got)
    return wanted, got


def _outputs(case: Case, model: Wrapped, batch: Any) -> Tensor:
    if case.forward is not None:
        output = case.forward(model, batch)
    elif isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, tuple | list):
        output = model(*batch)
    else:
        output = model(batch)
    if not isinstance(output, Tensor):
        raise PlanError(
            f"quality.compare: the model returned a {type(output).__name__}, not a tensor. Choose "
            f"one: Case(forward=lambda model, batch: model(**batch).logits)."
        )
    return output


def _over_ranks(sums: _Sums, ctx: DistContext) -> dict[str, LayerError]:
    """The error of each module, from the sums of all ranks."""
    added = ops.reduce({name: squares for name, (*squares, _) in sums.items()}, ctx, op="sum")
    largest = ops.reduce({name: most for name, (*_, most) in sums.items()}, ctx, op="max")
    errors: dict[str, LayerError] = {}
    for name, (noise, signal) in added.items():
        relative = math.sqrt(noise / signal) if noise and signal else math.inf if noise else 0.0
        errors[name] = LayerError(name=name, relative=relative, largest=largest[name])
    return errors


def _losses(case: Case, ctx: DistContext, plan: Plan, updates: int) -> tuple[float, ...]:
    """The training loss of each update, from the same weights and batches."""
    if not updates:
        return ()
    model = _wrapped(case, ctx, plan, case.optimizer)
    model.train()
    # The batches of the case are the rows of the loader.
    loader = DataLoader(case.batches, batch_size=1, collate_fn=itemgetter(0))  # pyright: ignore[reportArgumentType]
    fns = StepFns(model=model, loss=lambda model, batch: case.loss(model, batch.data))  # pyright: ignore[reportOptionalCall]
    try:
        batches = chain.from_iterable(shard(loader, ctx, plan).epochs(updates))
        reports = (step(ctx, batch, fns) for batch in batches)
        due = (report for report in reports if report.applied or report.skipped)
        losses = [float(ops.reduce(report.loss, ctx)) for report in islice(due, updates)]
    finally:
        unwrap(model)
    return tuple(losses)


@contextmanager
def _watched(module: nn.Module, take: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call a function with name and output of every submodule that is called."""

    def hook(name: str) -> Callable[..., None]:
        def run(part: nn.Module, inputs: Any, output: Any) -> None:
            leaves, _ = _tree.flatten(output)
            tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
            first = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
            if first is not None:
                take(name, first.detach())

        return run

    handles = [
        part.register_forward_hook(hook(name)) for name, part in module.named_modules() if name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add_error(sums: _Sums, name: str, reference: Tensor, value: Tensor) -> None:
    """Add the difference of two outputs to the sums of a module."""
    if reference.shape != value.shape:
        raise PlanError(
            f"quality.compare: {name or 'the output of the model'} has shape "
            f"{list(reference.shape)} under the reference and {list(value.shape)} under this plan. "
            f"Compare plans under which the model computes the same tensors."
        )
    wide = reference.float()
    difference = wide - value.float()
    noise, signal, largest = sums.get(name, (0.0, 0.0, 0.0))
    if difference.numel():
        noise += float(torch.linalg.vector_norm(difference)) ** 2
        signal += float(torch.linalg.vector_norm(wide)) ** 2
        maximum = float(difference.abs().max())
        largest = maximum if math.isnan(maximum) else max(largest, maximum)
    sums[name] = noise, signal, largest


def innermost(names: list[str]) -> list[str]:
    """Names that are not parents of others, in the same order."""
    parents = {
        ".".join(parts[:length])
        for parts in (name.split(".") for name in names)
        for length in range(1, len(parts))
    }
    return [name for name in names if name not in parents]


def table(comparison: Comparison, *, layers: int = 5) -> RenderableType:
    """Tables of a comparison, to print with rich.

    Args:
        comparison: What `compare` returned.
        layers: How many layers with the largest errors to show per plan.
    """
    parts: list[RenderableType] = [_plans(comparison)]
    for plan in comparison.plans if layers else ():
        if plan.layers:
            parts += ["", _layers(plan, layers)]
    return Group(*parts)


def _plans(comparison: Comparison) -> Table:
    reference = comparison.reference, show_bytes(comparison.weight_bytes), "reference"
    rows = [[*reference, "", "", "", "", _last(comparison.losses)]]
    for plan in comparison.plans:
        outputs = plan.outputs
        rows.append([
            plan.name, show_bytes(plan.weight_bytes), _number(outputs.relative, ".3g"),
            _db(outputs.snr_db), _number(outputs.largest, ".3g"), _number(plan.agreement, ".2%"),
            _number(plan.cosine, ".5f"), _last(plan.losses),
        ])  # fmt: skip
    titles = (
        "plan", ">weights", ">error", ">SNR", ">largest difference", ">best agrees",
        ">smallest cosine", ">last loss",
    )  # fmt: skip
    columns = [cells for cells in zip(titles, *rows, strict=True) if any(cells[1:])]
    titles, *cells = zip(*columns, strict=True)
    return make_table(titles, cells)


def _last(losses: Sequence[float]) -> str:
    return f"{losses[-1]:.4f}" if losses else ""


def _layers(plan: Compared, count: int) -> Table:
    worst = sorted(plan.layers, key=lambda layer: (not math.isnan(layer.relative), -layer.relative))
    rows = [(layer.name, f"{layer.relative:.3g}", _db(layer.snr_db)) for layer in worst[:count]]
    return make_table((f"{plan.name}: largest errors", ">error", ">SNR"), rows)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _db(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.1f} dB"


def plot(comparison: Comparison) -> Any:
    """Errors along the layers of a model, and losses, as a `matplotlib.figure.Figure`.

    Save it with `savefig`, as SVG, PNG or PDF.

    Args:
        comparison: What `compare` returned.

    Raises:
        MissingPackageError: matplotlib is not installed (the extra `plots`).
    """
    count = 2 if comparison.losses else 1
    title = f"error relative to {comparison.reference}"
    drawn = make_figure("fxtrain.quality.plot", title, height=1 + 3 * count, rows=count)
    every = drawn.axes
    every[0].set_xlabel("layers, in the order of the model")
    every[0].set_yscale("log")
    if comparison.losses:
        every[1].set_title("training loss", loc="left")
        every[1].set_xlabel("updates")
        every[1].plot(comparison.losses, label=comparison.reference, color="black", linestyle="--")
    for number, plan in enumerate(comparison.plans):
        colour = COLOURS[number % len(COLOURS)]
        # A logarithmic axis has no place for an exact layer.
        errors = [layer.relative or math.nan for layer in plan.layers]
        every[0].plot(errors, label=plan.name, color=colour)
        if comparison.losses:
            every[1].plot(plan.losses, label=plan.name, color=colour)
    if comparison.plans:
        drawn.legend(*every[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return drawn
