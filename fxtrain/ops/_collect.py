"""Collectives over trees: gather, reduce, broadcast, scatter."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist

from fxtrain import _tree
from fxtrain._errors import CollectiveError
from fxtrain.ops._bulk import broadcast_all, gather_all
from fxtrain.ops._pack import (
    Packed,
    columns,
    dump,
    from_bytes,
    load,
    pack,
    signature,
    to_bytes,
)
from fxtrain.ops._packets import capacity
from fxtrain.ops._reduce import all_reduce, fold, reducible
from fxtrain.ops._route import route_of, travel
from fxtrain.ops._views import known_context
from fxtrain.ops._wire import Call, compare, exchange, exchange_rows, guarded
from fxtrain.state import DistContext

__all__ = ["broadcast", "gather", "reduce", "scatter"]

_EMPTY = torch.empty(0, dtype=torch.uint8)


def gather(tree: Any, ctx: DistContext) -> Any:
    """Concatenate every rank's tensors along their first dimension.

    Args:
        tree: Nested containers of tensors; the same structure, shapes and dtypes on every
            rank (see `pad`). A 0-d tensor counts as one row. Other leaves are allowed.

    Returns:
        A new tree, equal on every rank: each tensor (r, ...) becomes (world size · r, ...)
        in rank order, without gradient; every other leaf becomes the list of all ranks'.

    Effects:
        One exchange of packets, in which the whole tree rides along if it is small; if not,
        an all-gather too. Nothing at one rank.

    Raises:
        CollectiveError: the ranks disagree, or one did not come; on every rank.

    Source:
        torch.distributed.all_gather.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.gather({"loss": torch.tensor(2.0), "ids": ["a"]}, ctx)
        {'loss': tensor([2.]), 'ids': [['a']]}
    """
    known_context("gather", ctx)
    packed = pack(tree)
    if not packed.others and (route := route_of(ctx, "gather", packed, joined=True)):
        return _tree.unflatten(packed.shape, travel(ctx, route, packed))
    others = dump(list(packed.others.values())) if packed.others else _EMPTY
    call = ("gather", signature(packed))
    joined, found = _every_rank(ctx, call, packed, others, joined=True)
    leaves: dict[int, Any] = dict(zip(packed.tensors, joined, strict=True))
    for index, place in enumerate(packed.others):
        leaves[place] = [values[index] for values in found]
    return packed.rebuild(leaves)


def reduce(
    tree: Any, ctx: DistContext, op: Literal["mean", "sum", "max", "min", "product"] = "mean"
) -> Any:
    """Combine every rank's tensors and numbers, entry by entry.

    Args:
        tree: Nested containers; the same structure, shapes and dtypes on every rank. Python
            numbers are combined as float64 or int64. Every other leaf must be equal on all
            ranks and is kept.
        op: How entries are combined. Sums and products of bool count as int64, means of
            integers as float32; half precision is summed in float32. Everything else
            keeps its dtype.

    Returns:
        A new tree, equal in every bit on every rank, without gradient.

    Effects:
        One exchange of packets; one all-reduce per dtype too if the tree is not small.

    Raises:
        CollectiveError: the ranks disagree, a dtype cannot be combined so, or a rank did
            not come; on every rank.

    Source:
        torch.distributed.all_reduce.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.reduce((torch.tensor([1.0, 3.0]), 2), ctx, op="sum")
        (tensor([1., 3.]), 2)
    """
    known_context("reduce", ctx)
    numbers = _tree.map_leaves(_as_tensor, tree)
    packed = pack(numbers)
    kept = ", ".join(repr(value) for value in packed.others.values())
    extra = " ".join(part for part in (op, kept) if part)
    tensors = list(packed.tensors.values())
    route = route_of(ctx, "reduce", packed, extra)
    call = ("reduce", signature(packed, extra)) if route is None else route.call
    if route is not None or _rides(ctx, tensors):
        stacked = travel(ctx, route, packed) if route else _every_rank(ctx, call, packed, _EMPTY)[0]
        reducible(tensors, op)
        done = [fold(rows, op) for rows in stacked]
    else:
        compare(ctx, call, wait=_on_cpu(tensors))
        reducible(tensors, op)
        done = all_reduce(ctx, call, tensors, op)
    leaves = packed.others | dict(zip(packed.tensors, done, strict=True))
    return _tree.unflatten(
        packed.shape,
        [
            leaves[place].item() if _is_number(before) else leaves[place]
            for place, before in enumerate(_tree.flatten(tree)[0])
        ],
    )


def broadcast(tree: Any, ctx: DistContext, src: int = 0) -> Any:
    """Give every rank the tensors and other leaves of one rank.

    Args:
        tree: Nested containers; the same structure, shapes and dtypes on every rank.
        src: The rank of this context whose values count.

    Returns:
        A new tree, equal on every rank, without gradient.

    Effects:
        One exchange of packets, in which only `src` has a payload; a broadcast of the
        whole tree if it is not small; none at one rank.

    Raises:
        CollectiveError: the ranks disagree on structure or `src`, or one did not come.

    Source:
        torch.distributed.broadcast.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.broadcast([torch.ones(2), "lr"], ctx)
        [tensor([1., 1.]), 'lr']
    """
    known_context("broadcast", ctx)
    packed = pack(tree)
    tensors = list(packed.tensors.values())
    _known_rank("broadcast", src, ctx)
    call = ("broadcast", signature(packed, f"src={src}"))
    # A pretended world holds this rank's values only.
    sends = ctx.rank == src or ctx.comm.simulated
    blob = dump(list(packed.others.values())) if sends and packed.others else _EMPTY
    rides = _rides(ctx, tensors) and ctx.world_size > 1
    mine = torch.cat([to_bytes(tensors), blob]) if rides else blob
    payload = _exchange(ctx, call, mine if sends else _EMPTY)[src]
    if ctx.world_size == 1:
        got = [tensor.clone() for tensor in tensors]
    elif rides:
        size = to_bytes(tensors).numel()
        got = from_bytes(payload[:size], tensors)
        payload = payload[size:]
    else:
        got = _broadcast_bulk(ctx, call, tensors, src)
    others = _loaded("broadcast", src, payload) if packed.others else []
    leaves = dict(zip(packed.tensors, got, strict=True))
    return packed.rebuild(leaves | dict(zip(packed.others, others, strict=True)))


def scatter(values: Sequence[Any] | None, ctx: DistContext, src: int = 0) -> Any:
    """Send each rank its own tree from one rank.

    Args:
        values: On `src` one tree per rank, of any structure and shapes; ignored elsewhere.
        src: The rank of this context that sends.

    Returns:
        This rank's tree; its tensors are new, on the CPU or this context's device as they
        were on `src`, without gradient.

    Effects:
        One exchange of packets, then one message from `src` to each other rank, which
        holds that rank's tree only.

    Raises:
        CollectiveError: `src` has not one tree per rank, or a rank did not come; on every
            rank.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.scatter([{"x": torch.arange(2)}], ctx)
        {'x': tensor([0, 1])}
    """
    known_context("scatter", ctx)
    _known_rank("scatter", src, ctx)
    call = ("scatter", f"src={src}")
    letters: list[Tensor] = []
    note = _EMPTY
    if ctx.comm.simulated and ctx.rank != src:
        raise CollectiveError(
            f"scatter: in a pretended world nobody sends this rank {ctx.rank} a tree; be rank "
            f"{src}, which sends."
        )
    if ctx.rank == src:
        letters, problem = _letters(values, ctx)
        note = dump(problem or [letter.numel() for letter in letters])
    told = _loaded("scatter", src, _exchange(ctx, call, note)[src])
    if isinstance(told, str):
        raise CollectiveError(f"scatter: {told} Found on rank {src}.")
    if ctx.rank == src:
        _post(ctx, call, letters)
        letter = letters[src]
    else:
        letter = torch.empty(told[ctx.rank], dtype=torch.uint8)
        with guarded(ctx, call):
            dist.recv(letter, src=ctx.comm.ranks[src], group=ctx.comm.control)
    return _open_letter(letter, ctx)


def _every_rank(
    ctx: DistContext, call: Call, packed: Packed, others: Tensor, *, joined: bool = False
) -> tuple[list[Tensor], list[list[Any]]]:
    """Each tensor of all ranks, as `columns` gives it, and the other leaves of each rank."""
    tensors = list(packed.tensors.values())
    if ctx.world_size == 1:
        alone = [t.clone() if joined and t.ndim else t.clone()[None] for t in tensors]
        return alone, [list(packed.others.values())]
    if _rides(ctx, tensors):
        flat = to_bytes(tensors)
        mine = torch.cat([flat, others]) if others.numel() else flat
        rows, sizes = exchange_rows(ctx, call, mine)
        stacked = columns(rows, tensors, joined=joined)
        ends = zip(rows, sizes, strict=True) if packed.others else ()
        blobs: Sequence[Tensor] = [row[flat.numel() : size] for row, size in ends]
    else:
        blobs = _compared(ctx, call, tensors, others)
        stacked = _gather_bulk(ctx, call, tensors, joined=joined)
    found = [
        _loaded(call[0], rank, blob) if blob.numel() else [] for rank, blob in enumerate(blobs)
    ]
    return stacked, found


def _compared(
    ctx: DistContext, call: Call, tensors: list[Tensor], blob: Tensor
) -> Sequence[Tensor]:
    if blob.numel():
        return _exchange(ctx, call, blob)
    compare(ctx, call, wait=_on_cpu(tensors))
    return [_EMPTY] * ctx.world_size


def _exchange(ctx: DistContext, call: Call, payload: Tensor) -> list[Tensor]:
    return [payload.clone()] if ctx.world_size == 1 else exchange(ctx, call, payload)


def _rides(ctx: DistContext, tensors: list[Tensor]) -> bool:
    """Whether tensors travel in the packet itself: they are on the CPU and fit."""
    if ctx.world_size == 1:
        return True
    size = sum([tensor.nbytes + 15 for tensor in tensors])
    return size <= capacity(ctx.world_size) and _on_cpu(tensors)


def _on_cpu(tensors: list[Tensor]) -> bool:
    return all([tensor.is_cpu for tensor in tensors])


def _by_device(ctx: DistContext, tensors: list[Tensor]) -> list[tuple[Any, list[int]]]:
    """Which group carries which tensors: CPU tensors the control group, others their own."""
    cpu = [i for i, tensor in enumerate(tensors) if tensor.device.type == "cpu"]
    device = [i for i, tensor in enumerate(tensors) if tensor.device.type != "cpu"]
    pairs = [(ctx.comm.control, cpu), (ctx.comm.group, device)]
    return [(group, places) for group, places in pairs if places]


def _gather_bulk(
    ctx: DistContext, call: Call, tensors: list[Tensor], *, joined: bool
) -> list[Tensor]:
    stacked: dict[int, Tensor] = {}
    for group, places in _by_device(ctx, tensors):
        mine = [tensors[i] for i in places]
        with guarded(ctx, call):
            got = gather_all(mine, ctx.world_size, group, joined=joined)
        stacked |= zip(places, got, strict=True)
    return [stacked[place] for place in range(len(tensors))]


def _broadcast_bulk(ctx: DistContext, call: Call, tensors: list[Tensor], src: int) -> list[Tensor]:
    out: list[Any] = [None] * len(tensors)
    for group, places in _by_device(ctx, tensors):
        mine = [tensors[i] for i in places]
        with guarded(ctx, call):
            got = broadcast_all(mine, ctx.comm.ranks[src], group)
        for i, tensor in zip(places, got, strict=True):
            out[i] = tensor
    return out


def _known_rank(op: str, src: int, ctx: DistContext) -> None:
    if not 0 <= src < ctx.world_size:
        raise CollectiveError(
            f"{op}(src={src}): this context has the ranks 0 to {ctx.world_size - 1}."
        )


def _loaded(op: str, rank: int, blob: Tensor) -> Any:
    """A pickled value, or the reason why its sender could not pickle it, as an error."""
    fine, value = load(blob)
    if not fine:
        raise CollectiveError(
            f"{op}: rank {rank} passed a value that cannot be sent: {value}. Send tensors, "
            f"or objects that pickle."
        )
    return value


def _letters(values: Any, ctx: DistContext) -> tuple[list[Tensor], str | None]:
    """Each rank's tree as bytes, or what is wrong with the trees."""
    if not isinstance(values, Sequence) or len(values) != ctx.world_size:
        found = f"{len(values)}" if isinstance(values, Sequence) else type(values).__name__
        return [], f"asked for one tree for each of {ctx.world_size} ranks, found {found}."
    letters: list[Tensor] = []
    for value in values:
        packed = pack(value)
        kinds = [(t.dtype, tuple(t.shape), t.device.type) for t in packed.tensors.values()]
        # Tensors travel as bytes; a slot stands for each in the pickled tree.
        slots: dict[int, Any] = {p: _Slot(i) for i, p in enumerate(packed.tensors)}
        head = dump((packed.rebuild(packed.others | slots), kinds))
        fine, reason = load(head)
        if not fine:
            return [], f"a tree that cannot be sent: {reason}."
        size = torch.tensor([head.numel()]).view(torch.uint8)
        body = to_bytes([tensor.cpu() for tensor in packed.tensors.values()])
        gap = torch.empty(-(8 + head.numel()) % 16, dtype=torch.uint8)
        letters.append(torch.cat([size, head, gap, body]))
    return letters, None


class _Slot:
    """Stands for a tensor in a pickled tree."""

    def __init__(self, index: int) -> None:
        self.index = index


def _post(ctx: DistContext, call: Call, letters: list[Tensor]) -> None:
    with guarded(ctx, call):
        sent = [
            dist.isend(letter, dst=ctx.comm.ranks[rank], group=ctx.comm.control)
            for rank, letter in enumerate(letters)
            if rank != ctx.rank
        ]
        for work in sent:
            if work is not None:
                work.wait()


def _open_letter(letter: Tensor, ctx: DistContext) -> Any:
    size = int(letter[:8].view(torch.int64))
    _, (tree, kinds) = load(letter[8 : 8 + size])
    like = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape, _ in kinds]
    start = 8 + size + (-(8 + size) % 16)
    tensors = [
        tensor if device == "cpu" else tensor.to(ctx.device)
        for tensor, (_, _, device) in zip(from_bytes(letter[start:], like), kinds, strict=True)
    ]

    def fill(leaf: Any) -> Any:
        return tensors[leaf.index] if isinstance(leaf, _Slot) else leaf

    return _tree.map_leaves(fill, tree)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def _as_tensor(leaf: Any) -> Any:
    if not _is_number(leaf):
        return leaf
    return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.int64)
