"""Metrics of torchmetrics and Hugging Face `evaluate`, told apart by their methods."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fxtrain import _tree
from fxtrain._errors import DataError
from fxtrain.state import DistContext, shown

# What Hugging Face's metrics call the two columns that most of them take.
_COLUMNS = ("predictions", "references")


@contextmanager
def local_metric(metric: Any, ctx: DistContext) -> Iterator[None]:
    """Begin an evaluation with a metric, which sees the rows of all ranks on each of them.

    Raises:
        DataError: it has none of the methods of a metric.
    """
    if not callable(getattr(metric, "compute", None)) or not (
        hasattr(metric, "add_batch") or hasattr(metric, "update")
    ):
        raise DataError(
            f"evaluate(metrics=...): {shown(metric)} is no metric. Pass an object with `update` or "
            f"`add_batch`, and `compute`, such as torchmetrics.classification.MulticlassAccuracy."
        )
    if hasattr(metric, "add_batch"):
        yield
        return
    if hasattr(metric, "to"):
        metric.to(ctx.device)
    if hasattr(metric, "reset"):
        metric.reset()
    # torchmetrics would add up the states of all ranks, which are the same.
    parts = [one for one in _parts(metric) if hasattr(one, "distributed_available_fn")]
    before = [one.distributed_available_fn for one in parts]
    for one in parts:
        one.distributed_available_fn = _never
    try:
        yield
    finally:
        for one, earlier in zip(parts, before, strict=True):
            one.distributed_available_fn = earlier


def update_metric(metric: Any, arguments: Any) -> None:
    """Give a metric the rows of one global batch."""
    update = metric.update if not hasattr(metric, "add_batch") else metric.add_batch
    if hasattr(metric, "add_batch"):
        arguments = _tree.map_leaves(_plain, arguments)
        if type(arguments) is tuple:
            arguments = dict(zip(_COLUMNS, arguments, strict=True))
    if isinstance(arguments, Mapping):
        update(**arguments)
    elif type(arguments) is tuple:
        update(*arguments)
    else:
        update(arguments)


def compute_metric(metric: Any) -> Any:
    """The value of a metric, with floats in the place of scalar tensors."""
    return _tree.map_leaves(_float, metric.compute())


def _parts(metric: Any) -> list[Any]:
    return list(metric.modules()) if hasattr(metric, "modules") else [metric]


def _never() -> bool:
    return False


def _plain(leaf: Any) -> Any:
    return leaf.tolist() if isinstance(leaf, Tensor) else leaf


def _float(leaf: Any) -> Any:
    return leaf.item() if getattr(leaf, "shape", None) == () else leaf
