"""This rank's tokens of a batch, where a plan splits sequences."""

import fnmatch
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxtrain import _tree
from fxtrain.errors import DataError
from fxtrain.state import CP, DistContext, Plan, token_ranges

_KEY = re.compile(r"\['?(.*?)'?\]|\.(\w+)")


def make_splitter(ctx: DistContext, plan: Plan) -> Callable[[Any], Any] | None:
    """A function from full rows to the same tree with this rank's tokens only.

    The ranks of the context axis read the same rows, so they all find the same problems.

    Returns:
        None where sequences stay whole.
    """
    if plan.context is None or ctx.axis("context").world_size == 1:
        return None
    cuts: CP = plan.context
    axis = ctx.axis("context")

    def cut(data: Any) -> Any:
        leaves, shape = _tree.flatten(data)
        names = [_name(path) for path in _tree.leaf_paths(shape)]
        chosen = _chosen(leaves, names, cuts)
        mine = [
            _own_tokens(leaf, name, axis, cuts) if name in chosen else leaf
            for leaf, name in zip(leaves, names, strict=True)
        ]
        return _tree.unflatten(shape, mine)

    return cut


def _name(path: str) -> str:
    """`['inputs'][0]` as written in a plan: `inputs.0`."""
    return ".".join(key or field for key, field in _KEY.findall(path))


def _chosen(leaves: list[Any], names: list[str], config: CP) -> set[str]:
    tensors = {
        name: leaf
        for leaf, name in zip(leaves, names, strict=True)
        if isinstance(leaf, Tensor) and leaf.ndim > config.dim
    }
    known = ", ".join(f"{name or 'the batch'} {list(t.shape)}" for name, t in tensors.items())
    for pattern in config.batch:
        if not fnmatch.filter(tensors, pattern):
            raise DataError(
                f"CP(batch=...) names {pattern!r}, but no tensor of this batch with a dimension "
                f"{config.dim} has that name. It has: {known or 'none'}."
            )
    if config.batch:
        return {n for n in tensors if any(fnmatch.fnmatchcase(n, p) for p in config.batch)}
    lengths = {tensor.shape[config.dim] for tensor in tensors.values()}
    if len(lengths) != 1:
        raise DataError(
            f"CP() splits every tensor that has a dimension {config.dim}, and all must have one "
            f"length; this batch has {known or 'none'}. Name those to split: "
            f"CP(batch=('input_ids', 'labels'))."
        )
    return set(tensors)


def _own_tokens(leaf: Tensor, name: str, axis: DistContext, config: CP) -> Tensor:
    length, ranks = leaf.shape[config.dim], axis.world_size
    ranges = token_ranges(length, ranks, axis.rank, balance=config.balance)
    if ranges is None:
        of, parts = f"{name or 'the batch'} {list(leaf.shape)}", ranks * (1 + config.balance)
        each = " as two equal parts each" if config.balance else " equally"
        fewer = ", or use CP(balance=False)" if config.balance and length % ranks == 0 else ""
        raise DataError(
            f"{of} has {length} tokens along dimension {config.dim}, which {ranks} context ranks "
            f"cannot share{each}. Pad sequences to a multiple of {parts}{fewer}."
        )
    parts = [leaf.narrow(config.dim, start, count) for start, count in ranges]
    return torch.cat(parts, config.dim)
