"""Collectives over trees: gather, reduce, broadcast."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from fxtrain import _tree
from fxtrain._words import canonical_text
from fxtrain.errors import CollectiveError
from fxtrain.ops.transport.device_groups import can_defer, run_on_device_group
from fxtrain.ops.transport.exchange import (
    EMPTY,
    Call,
    capacity,
    combine_payloads,
    compare_calls,
    exchange_payloads,
    exchange_rows,
    has_few_ranks,
    rank_loss_guard,
    send_payload,
)
from fxtrain.ops.transport.mismatches import check_source_rank
from fxtrain.ops.transport.packing import (
    Packed,
    byte_size,
    call_signature,
    combinable,
    from_bytes,
    octets,
    pack,
    packed_leaves,
    split_rows,
    to_bytes,
    unpack_ranks,
)
from fxtrain.ops.transport.pickled import dump, unpickle_all
from fxtrain.state import DistContext
from fxtrain.state.context import check_connected

T = TypeVar("T")
_MAX_PAYLOAD_BYTES = 1 << 20  # of the tensors of a gather that are sent as one payload
_MAX_COMBINED_BYTES = 8 << 10  # of the tensors of a reduction that many ranks combine in rounds
PIECE_BYTES = 256 << 20
# torch 2.13 renamed these functions, and warns about the older names. NCCL receives a list of
# tensors in a buffer of its own, and copies them from there, so the first takes one tensor.
gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# How a library combines the ranks, and how their rows are combined here.
_OPS: dict[str, tuple[Any, Callable[[Tensor, int], Tensor]]] = {
    "mean": (dist.ReduceOp.SUM, torch.sum),
    "sum": (dist.ReduceOp.SUM, torch.sum),
    "max": (dist.ReduceOp.MAX, torch.amax),
    "min": (dist.ReduceOp.MIN, torch.amin),
    "product": (dist.ReduceOp.PRODUCT, torch.prod),
}
# Dtypes that every library sums natively; others are computed in a wider one.
_NATIVE_DTYPES = {torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8}
_LOWEST = torch.iinfo(torch.int64).min


def gather(tree: T, ctx: DistContext, *, grad: bool = False) -> T:
    """Concatenate every rank's tensors along their first dimension.

    Args:
        tree: Nested containers of tensors; the same structure, shapes and dtypes on every
            rank (see `pad`). A 0-d tensor counts as one row. NumPy arrays and scalars of
            numbers are treated as tensors. Other leaves are allowed.
        grad: Whether tensors that require a gradient still do afterwards, for losses over the
            rows of all ranks, such as contrastive ones. Each rank gets the gradients of its own
            rows, summed over the losses of all ranks.

    Returns:
        A new tree, equal on every rank: each tensor or array (r, ...) becomes
        (world size · r, ...) in rank order, without gradient unless `grad`; every other leaf
        becomes the list of all ranks' leaves.

    Effects:
        One exchange of packets, which contains a small tree; a larger one is sent in an
        all-gather per dtype after it. A second exchange if a leaf could fail to unpickle. Nothing
        at one rank. With `grad`, backward sends one reduce-scatter per tensor; all ranks must
        run it.

    Raises:
        CollectiveError: the ranks disagree, one cannot unpickle a leaf, or one never joins;
            on every rank.

    Source:
        torch.distributed.all_gather.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.gather({"loss": torch.tensor(2.0), "ids": ["a"]}, ctx)
        {'loss': tensor([2.]), 'ids': [['a']]}
    """
    check_connected("gather", ctx)
    if not grad:
        return gather_packed("gather", pack(tree), ctx)
    if ctx.world_size > 1 and ctx.device.type == "xla":
        raise CollectiveError(
            "gather(grad=True) is not supported on xla. Call torch_xla's all_gather, which is "
            "differentiable, in the loss."
        )
    leaves, shape = _tree.flatten(tree)
    own = {
        n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    arguments = f"grad=True, with gradients of the leaves {[*own]}"
    return gather_packed("gather", packed_leaves(leaves, shape), ctx, own, arguments)


def gather_packed(
    name: str,
    packed: Packed,
    ctx: DistContext,
    own: Mapping[int, Tensor] = MappingProxyType({}),
    arguments: str = "",
) -> Any:
    """As `gather`, for a packed tree; gradients flow through the leaves in `own`, by place.

    Ranks compare the name of the call, and its other arguments as text.
    """
    others = dump(list(packed.others.values()), ctx) if packed.others else None
    call = (name, call_signature(packed, arguments))
    joined, rest = _gather_leaves(ctx, call, packed, others, joined=True)
    leaves: dict[int, Any] = dict(zip(packed.tensors, joined, strict=True))
    for index, place in enumerate(packed.others):
        leaves[place] = [values[index] for values in rest]
    for place, leaf in own.items():
        leaves[place] = with_gradient(leaf, leaves[place], ctx)
    return packed.rebuild(leaves)


def reduce(
    tree: T, ctx: DistContext, op: Literal["mean", "sum", "max", "min", "product"] = "mean"
) -> T:
    """Combine every rank's tensors and numbers, entry by entry.

    Args:
        tree: Nested containers; the same structure, shapes and dtypes on every rank. NumPy
            arrays and scalars of numbers are treated as tensors; Python numbers are combined
            as float64, int64 or complex128. Every other leaf (text, bool, None) must be
            bitwise equal on all ranks, and is kept.
        op: How entries are combined. Sums and products of bool count as int64, means of
            integers as float32; half precision is summed in float32. Everything else
            keeps its dtype.

    Returns:
        A new tree, bitwise equal on every rank, without gradient: tensors for tensors, NumPy
        values for NumPy values, numbers for numbers.

    Effects:
        One exchange of packets, which contains a small tree; one all-reduce per dtype for a
        larger one. More than 8 ranks combine a small tree in rounds of messages: pairs of ranks,
        then pairs of pairs, in an order that depends on the number of ranks only.

    Raises:
        CollectiveError: the ranks disagree, `op` does not support a dtype, or a rank never
            joins; on every rank.

    Source:
        torch.distributed.all_reduce.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.reduce((torch.tensor([1.0, 3.0]), 2), ctx, op="sum")
        (tensor([1., 3.]), 2)
    """
    check_connected("reduce", ctx)
    packed = pack(tree, numbers=True)
    others = packed.others.values()
    text = ", ".join([canonical_text(value) for value in others])
    extra = " ".join(part for part in (op, text) if part)
    tensors = list(packed.tensors.values())
    call = ("reduce", call_signature(packed, extra))
    if problem := _irreducible(tensors, op, others):
        if ctx.world_size > 1:
            compare_calls(ctx, call)  # where arguments differ, the error says so
        raise CollectiveError(problem)
    small = _on_cpu(tensors) and byte_size(tensors) <= _MAX_COMBINED_BYTES
    if has_few_ranks(ctx) and _fits_in_packet(ctx, tensors):
        stacked, _ = _gather_leaves(ctx, call, packed, None)
        done = [_fold(rows, op) for rows in stacked]
    elif small and not has_few_ranks(ctx):
        done = _combined(ctx, call, tensors, op)
    else:
        compare_calls(ctx, call, wait=_on_cpu(tensors) or not can_defer(ctx))

        def combine(piece: list[Tensor], group: Any) -> Tensor:
            return _reduced(piece, op, ctx.world_size, group)

        done = [rows[0] for rows in in_pieces(ctx, call, tensors, combine)]
    return packed.rebuild(packed.others | dict(zip(packed.tensors, done, strict=True)))


def broadcast(tree: T, ctx: DistContext, src: int = 0) -> T:
    """Send the tensors and other leaves of one rank to every rank.

    Args:
        tree: Nested containers; the same structure, shapes and dtypes on every rank.
        src: The rank of this context that sends its values.

    Returns:
        A new tree, equal on every rank, without gradient.

    Effects:
        One exchange of packets, in which only `src` has a payload, a small tree; a broadcast
        per dtype for a larger one; a second exchange if a leaf could fail to unpickle. Nothing at
        one rank.

    Raises:
        CollectiveError: the ranks disagree on structure or `src`, one cannot unpickle a leaf,
            or one never joins; on every rank.

    Source:
        torch.distributed.broadcast.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.broadcast([torch.ones(2), "lr"], ctx)
        [tensor([1., 1.]), 'lr']
    """
    check_connected("broadcast", ctx)
    return broadcast_packed("broadcast", pack(tree), ctx, src)


def broadcast_packed(name: str, packed: Packed, ctx: DistContext, src: int) -> Any:
    """As `broadcast`, for a packed tree; `name` is that of the call, equal on every rank."""
    tensors = list(packed.tensors.values())
    check_source_rank(name, src, ctx)
    call = (name, call_signature(packed, f"src={src}"))
    # A simulated world has only this rank's values.
    sends = ctx.rank == src or ctx.comm.simulated
    blob = dump(list(packed.others.values()), ctx) if sends and packed.others else EMPTY
    fits = _fits_in_packet(ctx, tensors) and ctx.world_size > 1
    data = torch.cat([to_bytes(tensors), blob]) if fits else blob
    payload = send_payload(ctx, call, data if sends else EMPTY, src)
    if ctx.world_size == 1:
        got = [tensor.clone() for tensor in tensors]
    elif fits:
        size = byte_size(tensors)
        got = from_bytes(payload[:size], tensors)
        payload = payload[size:]
    else:

        def send(piece: list[Tensor], group: Any) -> Tensor:
            return broadcast_piece(piece, ctx.comm.ranks[src], group, sends=sends)

        got = [rows[0] for rows in in_pieces(ctx, call, tensors, send)]
    (others,) = unpickle_all(name, {src: payload}, ctx) if packed.others else ([],)
    leaves = dict(zip(packed.tensors, got, strict=True))
    return packed.rebuild(leaves | dict(zip(packed.others, others, strict=True)))


def _gather_leaves(
    ctx: DistContext, call: Call, packed: Packed, others: Tensor | None, *, joined: bool = False
) -> tuple[list[Tensor], list[list[Any]]]:
    """Each tensor of all ranks, as `split_rows` returns it, and the other leaves of each rank."""
    tensors = list(packed.tensors.values())
    if ctx.world_size == 1:
        copies = [t.clone() if joined and t.ndim else t.clone()[None] for t in tensors]
        return copies, [list(packed.others.values())]
    blobs: Sequence[Tensor] = []
    if _on_cpu(tensors) and sum([tensor.nbytes for tensor in tensors]) <= _MAX_PAYLOAD_BYTES:
        # Of more bytes, each dtype is sent by itself, which takes fewer copies.
        flat = to_bytes(tensors)
        data = flat if others is None else torch.cat([flat, others])
        rows, sizes = exchange_rows(ctx, call, data)
        stacked = unpack_ranks(rows, tensors, joined=joined)
        if others is not None:
            blobs = [row[flat.numel() : size] for row, size in zip(rows, sizes, strict=True)]
    else:
        if others is None:
            compare_calls(ctx, call, wait=_on_cpu(tensors) or not can_defer(ctx))
        else:
            blobs = exchange_payloads(ctx, call, others)

        def gather(piece: list[Tensor], group: Any) -> Tensor:
            return gather_piece(piece, ctx.world_size, group)

        stacked = in_pieces(ctx, call, tensors, gather, joined=joined)
    if others is None:
        return stacked, [[]] * ctx.world_size
    return stacked, unpickle_all(call[0], dict(enumerate(blobs)), ctx)


def _fits_in_packet(ctx: DistContext, tensors: list[Tensor]) -> bool:
    """Whether tensors can be sent in the packet itself: they are on the CPU and fit."""
    if ctx.world_size == 1:
        return True
    return byte_size(tensors) <= capacity(ctx.world_size) and _on_cpu(tensors)


def _on_cpu(tensors: list[Tensor]) -> bool:
    return all([tensor.is_cpu for tensor in tensors])


def in_pieces(
    ctx: DistContext,
    call: Call,
    tensors: Sequence[Tensor],
    run: Callable[[list[Tensor], Any], Tensor],
    *,
    joined: bool = False,
) -> list[Tensor]:
    """Carry out a collective of tensors that do not fit in a packet.

    A collective of many tensors copies them into a buffer; of one tensor it needs none. So the
    memory beyond arguments and results does not grow with the tree. `run` is the collective of one
    of `pieces` over a group: (ranks, values), with one rank or several.
    """
    out: dict[int, Tensor] = {}
    for places in pieces(tensors):
        piece = [tensors[place] for place in places]
        with rank_loss_guard(ctx, call):
            if piece[0].is_cpu:
                rows = run(piece, ctx.comm.control)
            else:
                rows = run_on_device_group(ctx, partial(run, piece))
        out |= zip(places, split_rows(rows, piece, joined=joined), strict=True)
    return [out[place] for place in range(len(tensors))]


def pieces(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of tensors sent together: of one device and dtype, up to `PIECE_BYTES`."""
    out: list[list[int]] = []
    last: dict[Any, tuple[list[int], int]] = {}  # by kind, its last piece and the bytes of that
    for place, tensor in enumerate(tensors):
        kind = (tensor.device.type, tensor.dtype)
        piece, size = last.get(kind, ([], 0))
        if not piece or size + tensor.nbytes > PIECE_BYTES:
            piece, size = [], 0
            out.append(piece)
        piece.append(place)
        last[kind] = piece, size + tensor.nbytes
    return out


def gather_piece(piece: list[Tensor], ranks: int, group: Any) -> Tensor:
    """The values of all ranks, (ranks, values), by one all-gather."""
    flat = _flattened(piece)
    rows = flat.new_empty((ranks, flat.numel()))
    if flat.device.type == "xla":
        received = [torch.empty_like(flat) for _ in range(ranks)]
        dist.all_gather(received, flat, group=group)
        return torch.stack(received)
    if flat.is_cpu:
        dist.all_gather(list(_octets(rows.view(-1)).view(ranks, -1)), _octets(flat), group=group)
    else:
        gather_into(_octets(rows.view(-1)), _octets(flat), group=group)
    return rows


def broadcast_piece(piece: list[Tensor], src: int, group: Any, *, sends: bool) -> Tensor:
    """The values of one global rank, which `sends`, as (1, values), by one broadcast."""
    first = piece[0]
    if sends or first.device.type == "xla":
        flat = _flattened(piece)
        flat = flat.clone() if len(piece) == 1 else flat
    else:
        flat = first.new_empty(sum([tensor.numel() for tensor in piece]))
    dist.broadcast(_octets(flat), src=src, group=group)
    return flat[None]


def _flattened(piece: list[Tensor]) -> Tensor:
    """The values of tensors of one dtype; those of a single contiguous tensor without a copy."""
    parts = [tensor.resolve_conj().resolve_neg().reshape(-1) for tensor in piece]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _octets(tensor: Tensor) -> Tensor:
    """The same memory as bytes; XLA gives no access to it."""
    return tensor if tensor.device.type == "xla" else octets(tensor)


def with_gradient(own: Tensor, whole: Tensor, ctx: DistContext) -> Tensor:
    """The gathered rows of all ranks, differentiable with respect to this rank's.

    Backward sends one reduce-scatter over the ranks.
    """
    return _Gathered.apply(own, (whole, ctx))  # autograd looks into no tuple, and so copies no rows


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(state: Any, own: Tensor, rows: tuple[Tensor, DistContext]) -> Tensor:  # type: ignore[override]
        whole, state.ctx = rows
        state.shape = own.shape
        return whole

    @staticmethod
    @once_differentiable
    def backward(state: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx: DistContext = state.ctx
        if ctx.world_size == 1:
            return grad.reshape(state.shape), None
        local = grad.new_empty(state.shape)
        sent, received = _as_real(grad).reshape(-1), _as_real(local).view(-1)
        with rank_loss_guard(ctx, ("gather", "grad=True"), ("gather", "its backward")):
            if grad.is_cpu:
                reduce_scatter(received, sent, group=ctx.comm.control)
            else:
                run_on_device_group(ctx, lambda group: reduce_scatter(received, sent, group=group))
        return local, None


def _as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs, which every library sums."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _irreducible(tensors: Sequence[Tensor], op: str, others: Iterable[Any]) -> str:
    """Why these cannot be combined: an unknown `op`, or one without an order, or other numbers.

    Those would be kept unchanged.
    """
    if op not in _OPS:
        return f"reduce(op={op!r}): no such op. Use one of {', '.join(_OPS)}."
    if op in ("max", "min") and any(tensor.is_complex() for tensor in tensors):
        return (
            f"reduce(op={op!r}): complex numbers have no order. Use 'mean', 'sum' or 'product', "
            f"or reduce their absolute values."
        )
    problems = [problem for leaf in others if (problem := combinable(leaf))]
    if problems:
        return (
            f"reduce: {problems[0]} cannot be combined. Pass tensors, NumPy numbers of up to 64 "
            f"bits (complex up to 128), or int, float and complex."
        )
    return ""


def _fold(rows: Tensor, op: str) -> Tensor:
    """Combine (ranks, ...) in rank order, so that the result is bitwise equal on every rank."""
    return _narrow(_OPS[op][1](_widen(rows, op), 0), rows.dtype, op, len(rows))


def _combined(ctx: DistContext, call: Call, tensors: list[Tensor], op: str) -> list[Tensor]:
    """Combine small tensors of many ranks, two ranks at a time."""
    wide = [_widen(tensor, op) for tensor in tensors]

    def combine(low: Tensor, high: Tensor) -> Tensor:
        pairs = unpack_ranks(torch.stack([low, high]), wide)
        return to_bytes([_OPS[op][1](pair, 0).to(pair.dtype) for pair in pairs])

    both = from_bytes(combine_payloads(ctx, call, to_bytes(wide), combine), wide)
    return [
        _narrow(values, tensor.dtype, op, ctx.world_size)
        for values, tensor in zip(both, tensors, strict=True)
    ]


def _reduced(piece: list[Tensor], op: str, ranks: int, group: Any) -> Tensor:
    """New combined values, (1, values)."""
    flat = _flattened(piece)
    wide = _widen(flat, op)
    if wide is flat and len(piece) == 1:  # may be the caller's memory
        wide = wide.clone()
    if wide.is_complex() and op == "product":  # does not act on real and imaginary separately
        wide = gather_piece([wide], ranks, group).prod(0)
    else:
        dist.all_reduce(_as_real(wide), op=_OPS[op][0], group=group)
    return _narrow(wide, flat.dtype, op, ranks)[None]


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
        whole = not (dtype.is_floating_point or dtype.is_complex)
        return tensor.to(torch.float64) if whole and op == "mean" else tensor
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
