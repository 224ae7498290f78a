"""Run a model and data under several plans, and compare with a reference."""

from collections.abc import Mapping
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from fxtrain import _tree, ops
from fxtrain._display import counted
from fxtrain.backends import unwrap, wrap
from fxtrain.data import shard
from fxtrain.errors import DataError, PlanError
from fxtrain.loop import StepFns, step
from fxtrain.precision import stored_tensors
from fxtrain.quality.layer_outputs import (
    OUTPUTS,
    Sums,
    add_error,
    compared,
    innermost,
    recorded,
)
from fxtrain.quality.records import Case, Compared, Comparison, error_of
from fxtrain.state import DistContext, Plan, Wrapped
from fxtrain.state.context import check_connected

_KINDS = ("values", "logits", "embeddings")


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
    _check(case, plans, ctx, updates)
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
    return Comparison(
        reference=_name_of(reference),
        weight_bytes=size,
        losses=losses,
        plans=tuple(map(lambda plan, curve: attrs.evolve(plan, losses=curve), outcomes, curves)),
    )


def _check(case: Case, plans: Mapping[str, Plan], ctx: DistContext, updates: int) -> None:
    check_connected("quality.compare", ctx)
    if case.outputs not in _KINDS:
        raise PlanError(f"Case(outputs={case.outputs!r}): choose one of {', '.join(_KINDS)}.")
    if not plans:
        raise PlanError(
            'quality.compare(plans={}): pass plans by name, such as {"bf16": fx.Plan(...)}.'
        )
    if updates < 0:
        raise PlanError(f"quality.compare(updates={updates}): pass a number of updates.")
    if updates and (case.loss is None or case.optimizer is None):
        raise PlanError(
            f"quality.compare(updates={updates}): the case has no "
            f"{'loss' if case.loss is None else 'optimizer'}, which training needs. Use "
            f"Case(loss=lambda model, batch: ..., optimizer=lambda params: ...)."
        )
    ranks = ctx.axis("data").world_size
    if len(case.batches) < ranks:
        raise DataError(
            f"quality.compare: {counted(len(case.batches), 'batch')} for "
            f"{counted(ranks, 'data rank')}. Pass at least one batch for each."
        )


def _name_of(plan: Plan) -> str:
    quantize = "" if plan.quantize is None else f", {type(plan.quantize).__name__}"
    return f"{plan.precision.compute}{quantize}"


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
    sums: Sums = {}
    rows = hits = 0
    cosine = 1.0
    base.eval()
    other.eval()
    mine = ctx.axis("data")
    for batch in case.batches[mine.rank :: mine.world_size]:
        wanted, got = _both(case, _on(batch, ctx), base, other, sums)
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
        outputs=errors[OUTPUTS],
        layers=tuple(errors[layer] for layer in innermost([n for n in errors if n != OUTPUTS])),
        agreement=hits / rows if case.outputs == "logits" else None,
        cosine=ops.reduce(cosine, ctx, op="min") if case.outputs == "embeddings" else None,
        weight_bytes=size,
    )


@torch.no_grad()
def _both(
    case: Case, batch: Any, base: Wrapped, other: Wrapped, sums: Sums
) -> tuple[Tensor, Tensor]:
    """The outputs of both models; adds the errors of all modules to the sums."""
    with recorded(base.module) as seen:
        wanted = _outputs(case, base, batch)
    with compared(other.module, seen, sums):
        got = _outputs(case, other, batch)
    add_error(sums, OUTPUTS, wanted, got)
    return wanted, got


def _on(batch: Any, ctx: DistContext) -> Any:
    return _tree.map_leaves(
        lambda leaf: leaf.to(ctx.device) if isinstance(leaf, Tensor) else leaf, batch
    )


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


def _over_ranks(sums: Sums, ctx: DistContext) -> dict[str, Any]:
    added = ops.reduce({name: squares for name, (*squares, _) in sums.items()}, ctx, op="sum")
    largest = ops.reduce({name: most for name, (*_, most) in sums.items()}, ctx, op="max")
    return {
        name: error_of(name, noise=added[name][0], signal=added[name][1], largest=largest[name])
        for name in sums
    }


def _losses(case: Case, ctx: DistContext, plan: Plan, updates: int) -> tuple[float, ...]:
    """The training loss of each update, from the same weights and batches."""
    if not updates:
        return ()
    model = _wrapped(case, ctx, plan, case.optimizer)
    model.train()
    loader = DataLoader(case.batches, batch_size=1, collate_fn=_only)  # pyright: ignore[reportArgumentType]
    fns = StepFns(model=model, loss=lambda model, batch: case.loss(model, batch.data))  # pyright: ignore[reportOptionalCall]
    losses: list[float] = []
    with ExitStack() as end:
        end.callback(unwrap, model)
        batches = chain.from_iterable(shard(loader, ctx, plan).epochs(updates))
        reports = (step(ctx, batch, fns) for batch in batches)
        due = (report for report in reports if report.applied or report.skipped)
        losses = [float(ops.reduce(report.loss, ctx)) for report in islice(due, updates)]
    return tuple(losses)


def _only(rows: list[Any]) -> Any:
    """The only row: the case's batches are the rows of the loader."""
    return rows[0]
