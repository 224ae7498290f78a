"""The way of small trees: where tensors of a form lie in packets, laid out once.

Sixteen small tensors travel in less time than Python needs to make as many views. So the views
into the packet that is sent and into those that arrive are made with the first call of a form
and kept; each later call is a few calls of torch, whatever the number of tensors. The bytes are
those of `to_bytes`.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from fxtrain.ops._pack import Packed, places_in, signature
from fxtrain.ops._wire import Call, capacity, digest_of, meet, new_packets, payload_in, settle
from fxtrain.state import DistContext

__all__ = ["Route", "route_of", "travel"]

_KEPT = 32  # forms for each communicator, each with room for a packet of every rank
_PLAIN = frozenset({Tensor, nn.Parameter})
_SEEN = "seen once"


@attrs.frozen(eq=False)
class _Group:
    """What arrives of one dtype.

    Attributes:
        places: Of its tensors in the tree.
        parts: By tensor, where it arrives, (ranks, entries).
        like: By tensor, one of the shape in which it is returned; without values.
    """

    places: list[int]
    parts: list[Tensor]
    like: list[Tensor]


@attrs.frozen(eq=False)
class Route:
    """How tensors of one form travel.

    Attributes:
        call: What ranks compare.
        digest: Of the call.
        size: Bytes of the tensors.
        packet: What this rank sends.
        packets: What arrives, (ranks, bytes).
        slots: By tensor, its place in `packet`.
        groups: What arrives, by dtype.
    """

    call: Call
    digest: bytes
    size: int
    packet: Tensor
    packets: Tensor
    slots: list[Tensor]
    groups: list[_Group]


def route_of(
    ctx: DistContext, name: str, packed: Packed, extra: str = "", *, joined: bool = False
) -> Route | None:
    """The route for a call; None if its tensors do not travel so.

    Args:
        name: Of the op.
        extra: Arguments that ranks compare too.
        joined: As in `columns`.
    """
    tensors = packed.tensors.values()
    form = (name, extra, packed.shape.text, joined, *[(t.dtype, t.shape) for t in tensors])
    if not all([t.is_cpu and type(t) in _PLAIN for t in tensors]):
        return None
    routes = ctx.comm.ledger.routes
    if form not in routes:  # which pays with the second call: forms may differ from call to call
        while len(routes) >= _KEPT:
            routes.pop(next(iter(routes)))
        routes[form] = _SEEN
        return None
    if routes[form] is _SEEN:
        call = (name, signature(packed, extra))
        routes[form] = _laid_out(ctx, call, list(tensors), joined=joined)
    return routes[form]


def travel(ctx: DistContext, route: Route, packed: Packed) -> list[Tensor]:
    """Each tensor of all ranks, as `columns` gives it.

    Effects:
        One all-gather of a packet.

    Raises:
        CollectiveError: the calls differ or a rank did not come; on every rank.
    """
    settle(ctx)
    torch._foreach_copy_(route.slots, [*packed.tensors.values()])
    meet(ctx, route.call, route.digest, route.size, route.packet, route.packets)
    out: list[Any] = [None] * len(route.slots)
    for group in route.groups:
        # A part is never contiguous, so this copies, and the next call may overwrite it.
        flat = _flatten_dense_tensors(group.parts)
        made = _unflatten_dense_tensors(flat, group.like)
        for place, tensor in zip(group.places, made, strict=True):
            out[place] = tensor
    return out


def _laid_out(
    ctx: DistContext, call: Call, tensors: Sequence[Tensor], *, joined: bool
) -> Route | None:
    ranks = ctx.world_size
    groups, size = places_in(tensors)
    fits = bool(tensors) and size <= capacity(ranks)
    # torch's unflattening gives tensors without entries another shape.
    usual = all([t.layout is torch.strided and not t.is_quantized and t.numel() for t in tensors])
    if ranks == 1 or ctx.comm.simulated or not fits or not usual:
        return None
    # Used again later, perhaps outside of the mode of this call.
    with torch.inference_mode(mode=False), torch.no_grad():
        packet, packets = new_packets(ctx)
        slots: list[Any] = [None] * len(tensors)
        arriving: list[_Group] = []
        for dtype, places, start in groups:
            shapes = [tensors[place].shape for place in places]
            counts = [shape.numel() for shape in shapes]
            end = start + sum(counts) * dtype.itemsize
            mine = payload_in(packet)[start:end].view(dtype).split(counts)
            theirs = payload_in(packets)[:, start:end].view(dtype).split(counts, dim=1)
            for place, slot in zip(places, mine, strict=True):
                slots[place] = slot.view(tensors[place].shape)
            like = [_like(shape, dtype, ranks, joined=joined) for shape in shapes]
            arriving.append(_Group(places, list(theirs), like))
    return Route(call, digest_of(call), size, packet, packets, slots, arriving)


def _like(shape: torch.Size, dtype: torch.dtype, ranks: int, *, joined: bool) -> Tensor:
    whole = (ranks * shape[0], *shape[1:]) if joined and shape else (ranks, *shape)
    return torch.empty(whole, dtype=dtype, device="meta")
