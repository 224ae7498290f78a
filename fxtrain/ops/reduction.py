"""The arithmetic of `reduce`: combining gathered rows, or one all-reduce per dtype."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fxtrain.errors import CollectiveError
from fxtrain.ops.transport.arrays import combinable
from fxtrain.ops.transport.exchange import Call, rank_loss_guard
from fxtrain.ops.transport.large import pieces
from fxtrain.state import DistContext

_OPS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_FOLDS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda rows: rows.sum(0),
    "sum": lambda rows: rows.sum(0),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
    "product": lambda rows: rows.prod(0),
}
# Dtypes that every library sums natively; others are computed in a wider one.
_NATIVE_DTYPES = {torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8}

_LOWEST = torch.iinfo(torch.int64).min


def check_reducible(tensors: Sequence[Tensor], op: str, others: Iterable[Any]) -> None:
    """Refuse unsupported reductions; call it once the ranks have compared their leaves.

    Args:
        others: Leaves that are kept unchanged.

    Raises:
        CollectiveError: `op` is unknown, `op` compares complex numbers, or a numeric leaf cannot
            be combined (keeping it unchanged would be wrong).
    """
    if op not in _OPS:
        raise CollectiveError(f"reduce(op={op!r}): no such op. Use one of {', '.join(_OPS)}.")
    if op in ("max", "min") and any(tensor.is_complex() for tensor in tensors):
        raise CollectiveError(
            f"reduce(op={op!r}): complex numbers have no order. Use 'mean', 'sum' or 'product', "
            f"or reduce their absolute values."
        )
    found = [problem for leaf in others if (problem := combinable(leaf))]
    if found:
        raise CollectiveError(
            f"reduce: {found[0]} cannot be combined. Pass tensors, NumPy numbers of up to 64 "
            f"bits (complex up to 128), or int, float and complex."
        )


def fold(rows: Tensor, op: str) -> Tensor:
    """Combine (ranks, ...) in rank order, so that the result is bitwise equal on every rank."""
    return _narrow(_FOLDS[op](_widen(rows, op)), rows.dtype, op, len(rows))


def all_reduce(ctx: DistContext, call: Call, tensors: list[Tensor], op: str) -> list[Tensor]:
    """Combine tensors over ranks with one all-reduce per dtype and device, and each of `pieces`."""
    out: list[Tensor | None] = [None] * len(tensors)
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for place, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device.type == "cpu"), []).append(place)
    for (_, on_cpu), places in kinds.items():
        whole = [
            part
            for piece in pieces([tensors[place] for place in places])
            for part in _reduced(ctx, call, piece, op, on_cpu=on_cpu)
        ]
        for place, part in zip(places, whole, strict=True):
            out[place] = part
    return [tensor for tensor in out if tensor is not None]


def _reduced(
    ctx: DistContext, call: Call, piece: list[Tensor], op: str, *, on_cpu: bool
) -> list[Tensor]:
    """New tensors, from one buffer: `piece` has one dtype."""
    parts = [tensor.reshape(-1) for tensor in piece]
    flat = torch.cat(parts) if len(parts) > 1 else parts[0].resolve_conj()
    wide = _widen(flat, op)
    if wide is parts[0]:  # the caller's memory
        wide = wide.clone(memory_format=torch.contiguous_format)
    summed = _all_reduce_flat(ctx, call, wide, op, on_cpu=on_cpu)
    done = _narrow(summed, piece[0].dtype, op, ctx.world_size)
    sizes = [tensor.numel() for tensor in piece]
    return [part.view(t.shape) for part, t in zip(done.split(sizes), piece, strict=True)]


def _all_reduce_flat(
    ctx: DistContext, call: Call, flat: Tensor, op: str, *, on_cpu: bool
) -> Tensor:
    group = ctx.comm.control if on_cpu else ctx.comm.group
    with rank_loss_guard(ctx, call):
        if flat.is_complex() and op == "product":  # does not act on real and imaginary separately
            rows = [torch.empty_like(flat) for _ in range(ctx.world_size)]
            dist.all_gather(rows, flat, group=group)
            return torch.stack(rows).prod(0)
        sent = torch.view_as_real(flat) if flat.is_complex() else flat
        dist.all_reduce(sent, op=_OPS[op], group=group)
    return flat


def _widen(tensor: Tensor, op: str) -> Tensor:
    """The tensor in the dtype of the computation; itself, if that is its own."""
    dtype = tensor.dtype
    if dtype.is_floating_point and dtype.itemsize < 4:
        return tensor.to(torch.float32)
    if dtype == torch.bool:
        return tensor.to(torch.uint8 if op in ("max", "min") else torch.int64)
    if dtype == torch.uint64 and op in ("max", "min"):
        return tensor.view(torch.int64) ^ _LOWEST  # keeps the order of the unsigned numbers
    if dtype == torch.uint64 and op == "mean":
        return tensor.to(torch.float64)
    if dtype.is_complex or dtype in _NATIVE_DTYPES:
        return tensor.to(torch.float64) if _integer_mean(dtype, op) else tensor
    return tensor.to(torch.int64)


def _narrow(wide: Tensor, dtype: torch.dtype, op: str, count: int) -> Tensor:
    if op == "mean":
        whole = not (wide.is_floating_point() or wide.is_complex())
        mean = wide / count if whole else wide.div_(count)
        return mean.to(
            torch.float32 if not (dtype.is_floating_point or dtype.is_complex) else dtype
        )
    if dtype == torch.bool and op in ("sum", "product"):
        return wide
    if dtype == torch.uint64 and op in ("max", "min"):
        return (wide ^ _LOWEST).view(dtype)
    return wide.to(dtype)


def _integer_mean(dtype: torch.dtype, op: str) -> bool:
    return op == "mean" and not (dtype.is_floating_point or dtype.is_complex)
