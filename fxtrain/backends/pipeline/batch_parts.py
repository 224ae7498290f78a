"""Micro-batches of a batch, and what was computed for them as that of the batch."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain import _tree
from fxtrain.state import Batch


def parts_of_batch(batch: Batch, rank: int, parts: int) -> list[Batch]:
    """Split a batch into micro-batches with equally many rows.

    Args:
        rank: On the data axis.
        parts: Number of micro-batches; divides every rank's rows.
    """
    rows = batch.sizes[rank]
    if rows:
        data, valid = split_parts(batch.data, rows, parts), batch.valid.split(rows // parts)
    else:  # a placeholder on a rank without rows, which counts for nothing
        there = _tree.row_count(batch.data) or 1
        data, valid = split_parts(batch.data, there, there)[:1] * parts, [batch.valid[:1]] * parts
    sizes = tuple(size // parts for size in batch.sizes)
    return [
        attrs.evolve(
            batch,
            data=data[part],
            valid=valid[part],
            sizes=sizes,
            rows=tuple(
                min(max(real - part * size, 0), size)
                for real, size in zip(batch.rows, sizes, strict=True)
            ),
            part=part,
            parts=parts,
        )
        for part in range(parts)
    ]


def split_parts(tree: Any, rows: int, parts: int) -> list[Any]:
    """Split a tree: tensors with this many rows, and lists of this many values, along them.

    Every other leaf is repeated in every part.
    """
    each = rows // parts
    leaves, shape = _tree.flatten(tree, lambda node: _is_column(node, rows))
    pieces: list[list[Any]] = [[] for _ in range(parts)]
    for leaf in leaves:
        rowwise = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == rows
        for part, piece in enumerate(pieces):
            rowwise = rowwise or _is_column(leaf, rows)
            piece.append(leaf[part * each : (part + 1) * each] if rowwise else leaf)
    return [_tree.unflatten(shape, piece) for piece in pieces]


def _is_column(leaf: Any, rows: int) -> bool:
    values = type(leaf) is list and len(leaf) == rows and rows > 0
    return values and not any(isinstance(value, Tensor) for value in leaf)


def join_rows(trees: Sequence[Any], rows: int, *, totals: bool = False) -> Any:
    """Join the trees of several micro-batches with this many rows each.

    Tensors with this many rows are concatenated. Single floating-point numbers are averaged, as
    they are means over rows; single integers are summed, as they are counts. Of any other value,
    the last micro-batch's is used.

    Args:
        totals: Whether other tensors of numbers are averaged or summed as single ones are.
    """
    flat = [_tree.flatten(tree) for tree in trees]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return _tree.unflatten(flat[-1][1], [_joined(column, rows, totals) for column in columns])


def _joined(column: tuple[Any, ...], rows: int, totals: bool) -> Any:  # noqa: FBT001
    last = column[-1]
    if isinstance(last, Tensor):
        if last.ndim and last.shape[0] == rows:
            return torch.cat(column)
        if (last.ndim and not totals) or last.dtype == torch.bool:
            return last
        total = torch.stack(column).sum(0)
        return (total / len(column) if last.is_floating_point() else total).to(last.dtype)
    if type(last) is float:
        return sum(column) / len(column)
    return sum(column) if type(last) is int else last
