"""Metrics over exactly the rows of the data, and running means, on any number of ranks."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, SupportsFloat, TypeVar, overload

import attrs
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fxtrain import _tree, ops
from fxtrain._display import number
from fxtrain._record import shown
from fxtrain.data import Sharded, every_row
from fxtrain.errors import DataError, PlanError
from fxtrain.loop.stepping import check_loss_function
from fxtrain.ops.devices import as_scalar
from fxtrain.ops.micro_batches import begin_graphs
from fxtrain.state import Batch, DistContext, Report, Weighted, Wrapped
from fxtrain.state.context import check_connected
from fxtrain.state.wrapped import check_open

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
_Value = Tensor | float | Weighted | list[float]
# Of rows that torch's default collate function makes a list of tensors of.
_Tuples = DataLoader[tuple[Tensor | int | float, ...]]
# What Hugging Face's metrics call the two columns that most of them take.
_COLUMNS = ("predictions", "references")


@attrs.frozen(eq=False)
class Mean:
    """A running weighted mean over batches and ranks; a value, like everything that a loop carries.

    `update` waits for no device and for no rank.

    Attributes:
        total: The values so far, each times its weight, of this rank.
        weight: Their weights.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     mean = fx.Mean()
        ...     for loss, rows in ((torch.tensor(1.0), 3), (torch.tensor(5.0), 1)):
        ...         mean = mean.update(loss, rows)
        ...     mean.reduce(ctx)
        2.0
    """

    total: Tensor | float = attrs.field(default=0.0, repr=number)
    weight: Tensor | float = attrs.field(default=0.0, repr=number)

    def update(
        self, value: Tensor | float | Weighted | Report, weight: Tensor | float = 1
    ) -> "Mean":
        """The mean after one more value.

        Args:
            value: A number or a tensor of one element; `fx.Weighted`, with its weight; or the
                report of a step, which is its loss, by the weight of the loss.
            weight: How much the value counts: rows, or tokens.

        Raises:
            DataError: it is no number.
        """
        if type(value) is Report:
            value, weight = value.loss, value.weight
        if type(value) is Weighted:
            return Mean(self.total + total_of(value.total), self.weight + total_of(value.weight))
        if type(weight) is not int:
            weight = total_of(weight)
        return Mean(self.total + total_of(value) * weight, self.weight + weight)

    def reduce(self, ctx: DistContext) -> float:
        """The mean of all ranks together, which is the same on every rank; NaN without values.

        Ranks of a tensor or pipeline axis count once, as they have the same values.

        Effects:
            One all-reduce of two numbers; waits for the device.
        """
        total, weight = ops.reduce(self.pair(ctx), ctx.axis("loss"), op="sum").tolist()
        return total / weight if weight else math.nan

    def pair(self, ctx: DistContext) -> Tensor:
        """Total and weight of this rank, shape (2,), on the device: to reduce several at once."""
        wide = torch.float32 if ctx.device.type == "mps" else torch.float64
        both = (self.total, self.weight)
        if ctx.device.type == "cpu" and type(self.total) is type(self.weight) is float:
            return torch.tensor(both, dtype=wide, device="cpu")
        like = torch.empty((), dtype=wide, device=ctx.device)
        return torch.stack([as_scalar(value, like) for value in both])  # waits for no device


def total_of(value: Any) -> Tensor | float:
    """A number in host memory as Python's, or a tensor in the widest format of its device."""
    if type(value) is Tensor and value.is_cpu and value.numel() == 1 and not value.is_complex():
        return float(value.item())  # sums of Python numbers take a tenth of the time
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            wide = torch.float32 if value.device.type == "mps" else torch.float64
            return value.detach().reshape(()).to(wide)
    elif isinstance(value, int | float):
        return float(value)
    raise DataError(
        f"Mean.update takes a number, a tensor of one element, fx.Weighted or the report of a "
        f"step, found {shown(value)}. Take its mean first."
    )


def number_of(value: Any) -> float | None:
    """What `float` makes of a number, a tensor or a NumPy scalar; None if it is something else."""
    with suppress(TypeError, ValueError, RuntimeError):  # of tensors with several elements
        return float(value) if isinstance(value, SupportsFloat) else None


@overload
def evaluate(
    ctx: DistContext,
    model: Wrapped[M],
    loader: Sharded[T] | DataLoader[T],
    fn: Callable[[Wrapped[M], Batch[T]], _Value],
    *,
    metrics: None = None,
    batches: int | None = None,
) -> float: ...


@overload
def evaluate(
    ctx: DistContext,
    model: Wrapped[M],
    loader: Sharded[T] | DataLoader[T],
    fn: Callable[[Wrapped[M], Batch[T]], Mapping[str, _Value]],
    *,
    metrics: None = None,
    batches: int | None = None,
) -> dict[str, float]: ...


@overload
def evaluate(
    ctx: DistContext,
    model: Wrapped[M],
    loader: _Tuples,
    fn: Callable[[Wrapped[M], Batch[list[Tensor]]], _Value],
    *,
    metrics: None = None,
    batches: int | None = None,
) -> float: ...


@overload
def evaluate(
    ctx: DistContext,
    model: Wrapped[M],
    loader: _Tuples,
    fn: Callable[[Wrapped[M], Batch[list[Tensor]]], Mapping[str, _Value]],
    *,
    metrics: None = None,
    batches: int | None = None,
) -> dict[str, float]: ...


@overload
def evaluate(
    ctx: DistContext,
    model: Wrapped[M],
    loader: Sharded[T] | DataLoader[T],
    fn: Callable[[Wrapped[M], Batch[T]], object],
    *,
    metrics: object = None,
    batches: int | None = None,
) -> Any: ...


def evaluate(
    ctx: DistContext,
    model: Wrapped[M],
    loader: Sharded[Any] | DataLoader[Any],
    fn: Callable[[Wrapped[M], Batch[Any]], object],
    *,
    metrics: object = None,
    batches: int | None = None,
) -> Any:
    """Compute metrics of a model over exactly the rows of the data, once each.

    The result does not depend on the world size, on how rows divide, or on the strategy, beyond
    rounding. The plan's `even` is not applied: no row is repeated or left out.

    Args:
        ctx: The context for which the model was wrapped.
        model: What `fx.wrap` returned. It is in evaluation mode and without gradients here.
        loader: A loader that `fx.shard` made, from its position to the end of the epoch; or a torch
            DataLoader.
        fn: (model, batch) → values, called on every rank for every global batch. A value is a
            tensor or list with an entry per row; a number, such as a mean loss, which counts by
            the rows of the batch; or `Weighted(total, weight)`. Tuples and dicts of values give
            such of results.
        metrics: Objects that compute a metric from many rows, by name: of torchmetrics, of
            Hugging Face `evaluate`, or with their methods (`update` or `add_batch`, and
            `compute`). Under the name of each, `fn` returns its arguments, per row: one, a tuple or
            a dict. A single object takes all that `fn` returns.
        batches: The number of global batches to read, of data with more of them or without an end;
            by default all.

    Returns:
        A float for each value, in the structure that `fn` returns; for a metric, what its
        `compute` gives, with scalar tensors as floats. The same on every rank.

    Effects:
        One all-reduce at the end; with `metrics`, one gather of their arguments for each batch,
        and the objects hold the state of this evaluation afterwards. Training modes of all modules
        and random generators are restored; inside, generators are seeded with the plan's seed.

    Raises:
        DataError: the data has no row, or no end without `batches`, the loader leaves rows out
            (`drop_last=True`), or `fn` returns something else.
        PlanError: `batches` is less than 1, or the strategy gives outputs to some ranks only.
        StepError: the model was unwrapped, or `fn` is a loss of torch's, which takes no model.
        CollectiveError: the ranks return different structures, or a rank never joins.

    Example:
        >>> import fxtrain as fx, torch
        >>> from torch.utils.data import DataLoader
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Identity(), ctx)
        ...     loader = DataLoader(torch.arange(5.0), batch_size=2)
        ...     fx.evaluate(ctx, model, loader, lambda model, batch: {"mean": model(batch.data)})
        {'mean': 2.0}
    """
    check_connected("evaluate", ctx)
    check_open(model, "evaluate")
    check_loss_function("evaluate(fn=...)", fn)
    if ctx.mesh.pipeline > 1 and not model.strategy.outputs_everywhere(model.plan):
        name = type(model.plan.strategy).__name__
        raise PlanError(
            f'evaluate: {name}(outputs="last") gives outputs to the last stage only, and every '
            f'rank computes values from them. Use {name}(outputs="all").'
        )
    given: Any = {} if metrics is None else metrics
    single = not isinstance(given, Mapping)
    objects: dict[str, Any] = {"": given} if single else dict(given)
    if batches is not None and (type(batches) is not int or batches < 1):
        raise PlanError(f"evaluate(batches={shown(batches)}): pass a number of batches, 1 or more.")
    rows = every_row(loader, ctx, model.plan, ends=batches is not None)
    means: list[Mean] | None = None
    shape = _tree.TreeSpec("none")
    with ExitStack() as during:
        during.enter_context(_evaluation_mode(model))
        during.enter_context(ops.fork_rng(ctx, model.plan.seed))
        during.enter_context(torch.no_grad())
        for metric in objects.values():
            during.enter_context(_local_metric(metric, ctx))
        for batch in itertools.islice(rows, batches):
            begin_graphs(model)
            values: Any = fn(model, batch)
            if objects:
                values = _update_metrics({"": values} if single else values, objects, batch, ctx)
            leaves, found = _tree.flatten(values, lambda node: isinstance(node, list | Weighted))
            if not leaves and not objects:
                raise DataError(
                    f"evaluate: fn returned {shown(values)}, which has no values. Return a number, "
                    f"an entry per row, or a tuple or dict of these."
                )
            if means is None:
                means, shape = [Mean()] * len(leaves), found
            if found.text != shape.text:
                raise DataError(
                    f"evaluate: fn returned {found.text} for one batch and {shape.text} for the "
                    f"first. Return the same structure for every batch."
                )
            pairs = zip(means, leaves, strict=True)
            means = [_with_batch(mean, leaf, batch, ctx) for mean, leaf in pairs]
        if means is None:
            raise DataError("evaluate: the loader yields no batch. Pass data with rows.")
        result = _tree.unflatten(shape, _reduced(means, ctx))
        computed = {
            name: _tree.map_leaves(_scalar_as_float, metric.compute())
            for name, metric in objects.items()
        }
    return computed[""] if single else {**result, **computed} if computed else result


def _update_metrics(
    values: Mapping[str, Any], objects: Mapping[str, Any], batch: Batch, ctx: DistContext
) -> dict[str, Any]:
    """Give metric objects the rows of all ranks; what remains of the values."""
    gathered = ops.gather_valid({name: values[name] for name in objects}, batch, ctx)
    for name, metric in objects.items():
        arguments: Any = gathered[name]
        update: Any = getattr(metric, "update", None)
        if hasattr(metric, "add_batch"):  # Hugging Face's take lists, by name
            update = metric.add_batch
            arguments = _tree.map_tensors(Tensor.tolist, arguments)
            if type(arguments) is tuple:
                arguments = dict(zip(_COLUMNS, arguments, strict=True))
        if isinstance(arguments, Mapping):
            update(**arguments)
        else:
            update(*arguments if type(arguments) is tuple else (arguments,))
    return {name: values[name] for name in values if name not in objects}


def _with_batch(mean: Mean, leaf: Any, batch: Batch, ctx: DistContext) -> Mean:
    """A mean after the values of one batch; a stand-in for no rows counts for nothing."""
    rows = batch.rows[ctx.axis("data").rank]
    if isinstance(leaf, Weighted):
        return mean.update(leaf) if rows else mean
    column = _column(leaf)
    given = len(batch.valid)
    if column.ndim and len(column) != given:
        raise DataError(
            f"evaluate: fn returned a value of shape {list(column.shape)} for a batch of {given} "
            f"rows. Return an entry per row, a mean, or fx.Weighted(total, weight)."
        )
    return mean.update(column.mean(), rows) if rows else mean


def _column(leaf: Any) -> Tensor:
    try:
        column = leaf if isinstance(leaf, Tensor) else torch.as_tensor(leaf, device="cpu")
        column = column.detach()
    except (TypeError, ValueError, RuntimeError):
        column = None
    if column is None or column.is_complex() or not column.numel():
        raise DataError(
            f"evaluate: fn returned {shown(leaf)}, which is no number and no column of numbers. "
            f"Return an entry per row, a mean, or fx.Weighted(total, weight); text and other "
            f"objects are arguments of a metric (metrics=...)."
        )
    return column.to(torch.float32 if column.device.type == "mps" else torch.float64)


def _reduced(means: list[Mean], ctx: DistContext) -> list[float]:
    """The means of all ranks, by one all-reduce."""
    if not means:
        return []
    totals = torch.stack([mean.pair(ctx) for mean in means])
    summed = ops.reduce(totals, ctx.axis("loss"), op="sum").tolist()
    return [total / weight if weight else float("nan") for total, weight in summed]


@contextmanager
def _evaluation_mode(model: Wrapped) -> Iterator[None]:
    """Evaluation mode; at the end, every module is in the mode in which it was."""
    of_engine = getattr(model.engine, "modules", tuple)
    modules = (*model.module.modules(), *of_engine())
    modes = [(module, module.training) for module in modules]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _local_metric(metric: Any, ctx: DistContext) -> Iterator[None]:
    """Begin an evaluation with a metric, which sees the rows of all ranks on each of them."""
    if hasattr(metric, "add_batch"):
        yield
        return
    if hasattr(metric, "to"):
        metric.to(ctx.device)
    if hasattr(metric, "reset"):
        metric.reset()
    # torchmetrics would add up the states of all ranks, which are the same.
    inside = metric.modules() if hasattr(metric, "modules") else [metric]
    parts = [part for part in inside if hasattr(part, "distributed_available_fn")]
    before = [part.distributed_available_fn for part in parts]
    for part in parts:
        part.distributed_available_fn = lambda: False
    try:
        yield
    finally:
        for part, earlier in zip(parts, before, strict=True):
            part.distributed_available_fn = earlier


def _scalar_as_float(leaf: Any) -> Any:
    return leaf.item() if getattr(leaf, "shape", None) == () else leaf
