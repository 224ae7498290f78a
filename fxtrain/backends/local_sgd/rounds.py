"""What independent replicas keep from one average to the next, what they send, and what follows.

A mean over replicas of a fragment of a model may be under way during training.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from fxtrain.ops.whole_tensors import local_values, plain_name
from fxtrain.state import DiLoCo, DistContext, Key, LocalSGD, Round, StateReader
from fxtrain.state.keys import ROUND

# Among the fragments, the key of floating-point buffers. They have the weights of the last one,
# which this is the index of as well.
BUFFERS = -1
BLOCK = 1024  # values that share a scale
_WEIGHT_BYTES = 8
_ANCHOR, _MOMENTUM = "anchor", "momentum"  # in keys of tensors
# Added to every weight: too small to change one, but gives replicas of weight zero a mean.
MIN_WEIGHT = 2.0**-60


@attrs.frozen(kw_only=True, eq=False)
class PendingMean:
    """A weighted mean over the replicas, which may be under way. Equality and hash are by identity.

    Attributes:
        due: The update at which it is applied.
        sent: What this replica sends, by dtype of the sums; empty once it is under way, if no
            checkpoint needs it.
        received: What the collectives fill; empty until they have begun.
        works: The collectives that are under way.
    """

    due: int
    sent: list[Tensor]
    received: list[Tensor] = attrs.field(factory=list)
    works: list[Any] = attrs.field(factory=list)

    @property
    def complete(self) -> bool:
        """Whether everything was received that was sent and kept."""
        return len(self.received) == len(self.sent) and not self.works


def pack_means(
    tensors: Sequence[Tensor], weight: Tensor | float, device: torch.device, *, due: int
) -> PendingMean:
    """What a replica sends for a mean of each tensor over the replicas, weighted by one number.

    Args:
        tensors: Of the same shapes and dtypes on every replica.
        device: Where the replicas communicate.
    """
    sent: list[Tensor] = []
    for dtype, numbers in _by_dtype(tensors).items():
        parts = [real(tensors[n]).reshape(-1).to(device, dtype) for n in numbers]
        flat = torch.cat([*parts, torch.ones(1, dtype=dtype, device=parts[0].device)])
        sent.append(flat.mul_(weight))
    return PendingMean(due=due, sent=sent)


def pack_int8(
    tensors: Sequence[Tensor],
    residuals: Sequence[Tensor],
    weight: Tensor | float,
    device: torch.device,
    *,
    due: int,
) -> PendingMean:
    """Like `pack_means`, with values of eight bits; what they lose is sent the next time.

    Args:
        residuals: What earlier exchanges have lost of each tensor; replaced in place.
    """
    sent: list[Tensor] = []
    for dtype, numbers in _by_dtype(tensors).items():
        exact = torch.cat(
            [(real(tensors[n]).to(device, dtype) + residuals[n]).reshape(-1) for n in numbers]
        )
        payload = quantize(exact)
        lost = exact - dequantize(payload, len(exact), dtype)
        sizes = [residuals[n].numel() for n in numbers]
        for n, part in zip(numbers, lost.split(sizes), strict=True):
            residuals[n].copy_(part.view_as(residuals[n]))
        share = torch.as_tensor(weight, dtype=torch.float64, device=device).reshape(1)
        sent.append(torch.cat([payload, share.view(torch.uint8)]))
    return PendingMean(due=due, sent=sent)


def send(exchange: PendingMean, group: Any, ranks: int, *, keep: bool) -> PendingMean:
    """Start the collectives of an exchange.

    Args:
        group: The process group of the ranks that hold the same part of each replica.
        ranks: Their number.
        keep: Whether to keep what is sent, to send it again.

    Effects:
        Starts one all-reduce per dtype in which sums are computed; of eight bits, an all-gather.
    """
    received: list[Tensor] = []
    works: list[Any] = []
    for flat in exchange.sent:
        if flat.dtype == torch.uint8:
            received.append(flat.new_empty(ranks, len(flat)))
            # As a list, since torchft's groups have no gather into one tensor.
            works.append(dist.all_gather([*received[-1]], flat, group=group, async_op=True))
        else:
            received.append(flat.clone() if keep else flat)
            works.append(dist.all_reduce(received[-1], group=group, async_op=True))
    sent = exchange.sent if keep else []
    return attrs.evolve(exchange, sent=sent, received=received, works=works)


def _means_of(exchange: PendingMean, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The mean of each tensor, with its shape, dtype and device, after everything was received."""
    means: list[Tensor] = [*tensors]
    numbers_of = _by_dtype(tensors).items()
    for (dtype, numbers), received in zip(numbers_of, exchange.received, strict=True):
        sizes = [real(tensors[number]).numel() for number in numbers]
        flat = _mean_of(received, sum(sizes), dtype)
        for number, part in zip(numbers, flat.split(sizes), strict=True):
            means[number] = _like(part, tensors[number]).to(tensors[number].device)
    return means


def _mean_of(received: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    if received.dtype != torch.uint8:
        return received[:-1] / received[-1]
    total = torch.zeros(count, dtype=dtype, device=received.device)
    weights = torch.zeros(1, dtype=dtype, device=received.device)
    # Every replica adds in the same order, and so gets the same bits.
    for payload in received:
        weight = payload[-_WEIGHT_BYTES:].clone().view(torch.float64).to(dtype)
        total += dequantize(payload[:-_WEIGHT_BYTES], count, dtype) * weight
        weights += weight
    return total / weights


def quantize(values: Tensor) -> Tensor:
    """Values as integers of eight bits, and a scale for each 1024 of them.

    Args:
        values: Floating-point, 1-D.

    Returns:
        uint8, 1-D: the integers, then the scales as fp32.

    Example:
        >>> import torch
        >>> dequantize(quantize(torch.tensor([127.0, -3.0, 0.2])), 3, torch.float32).tolist()
        [127.0, -3.0, 0.0]
    """
    blocks = F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = (blocks.abs().amax(1, keepdim=True) / 127).float()
    safe = torch.where(scales == 0, 1.0, scales).to(values.dtype)
    integers = (blocks / safe).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([integers.view(-1).view(torch.uint8), scales.view(-1).view(torch.uint8)])


def dequantize(payload: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The first values that `quantize` was given, as far as eight bits hold them."""
    blocks = -(-count // BLOCK)
    integers = payload[: blocks * BLOCK].view(torch.int8).view(blocks, BLOCK)
    scales = payload[blocks * BLOCK :].clone().view(torch.float32)  # aligned
    return (integers.to(dtype) * scales.to(dtype)[:, None]).view(-1)[:count]


def _by_dtype(tensors: Sequence[Tensor]) -> dict[torch.dtype, list[int]]:
    """By dtype in which their sums are computed, the numbers of the tensors."""
    numbers_of: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        numbers_of.setdefault(accumulation_dtype(tensor.dtype), []).append(number)
    return numbers_of


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which means are computed: half precision would lose the update."""
    if dtype.is_complex:
        return dtype.to_real()
    return dtype if dtype.itemsize >= 4 else torch.float32


def real(tensor: Tensor) -> Tensor:
    """A complex tensor as one of pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _like(flat: Tensor, tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_complex(flat.view(*tensor.shape, 2).clone())  # aligned
    return flat.view(tensor.shape)


def first_round(
    module: nn.Module,
    local: LocalSGD | DiLoCo,
    copies: DistContext,
    within: DistContext,
    peers: tuple[int, ...],
) -> Round:
    """What replicas keep between averages, beginning from the present parameters.

    Args:
        copies: The ranks that hold the same part of each replica.
        within: The ranks of this replica, over which the weights of its losses are added up.
        peers: Their numbers on the data axis.
    """
    device = copies.device
    named = ((plain_name(name), p) for name, p in module.named_parameters())
    parameters = {name: p for name, p in named if p.requires_grad}
    anchor: dict[str, Tensor] = {}
    residual: dict[str, Tensor] = {}
    if isinstance(local, DiLoCo):
        anchor = {name: _accumulation_copy(p.detach()).clone() for name, p in parameters.items()}
        if local.compress == "int8":
            residual = {
                name: torch.zeros_like(real(part), device=device)
                for name, part in zip(anchor, parts_of(anchor, anchor), strict=True)
            }
    fragments = _fragments(parameters, local.fragments if isinstance(local, DiLoCo) else 1)
    shape, dtype = (len(fragments), 3), torch.float32 if device.type == "mps" else torch.float64
    return Round(
        copies=copies,
        within=within,
        peers=peers,
        parameters=parameters,
        fragments=fragments,
        rows=torch.zeros(shape, dtype=torch.int64, device="cpu"),
        weight=torch.zeros(shape[:1], dtype=dtype, device=device),
        open_rows=torch.zeros(3, dtype=torch.int64, device="cpu"),
        open_weight=torch.zeros((), dtype=dtype, device=device),
        anchor=anchor,
        momentum={name: torch.zeros_like(value) for name, value in anchor.items()},
        residual=residual,
    )


def outer_state(now: Round) -> dict[Key, Tensor]:
    """What is equal on all replicas."""
    anchor = {Key.of(ROUND, _ANCHOR, name): value for name, value in now.anchor.items()}
    momentum = {Key.of(ROUND, _MOMENTUM, name): value for name, value in now.momentum.items()}
    return anchor | momentum


def load_outer_state(now: Round, saved: StateReader) -> None:
    """Restore what is equal on all replicas; from the current parameters if none was saved."""
    for name, value in now.anchor.items():
        if (anchor := Key.of(ROUND, _ANCHOR, name)) in saved.shapes:
            saved.fill(anchor, value)
            saved.fill(Key.of(ROUND, _MOMENTUM, name), now.momentum[name])
        else:
            value.copy_(now.parameters[name].detach())
            now.momentum[name].zero_()


def _fragments(parameters: Mapping[str, nn.Parameter], count: int) -> tuple[tuple[str, ...], ...]:
    """Neighboring parameters, of about the same size together."""
    fragments: list[list[str]] = [[] for _ in range(count)]
    total, before = sum(p.numel() for p in parameters.values()), 0
    for name, parameter in parameters.items():
        middle = before + parameter.numel() / 2
        fragments[min(count - 1, int(count * middle / max(total, 1)))].append(name)
        before += parameter.numel()
    return tuple(map(tuple, fragments))


def buffers_of(module: nn.Module, *, floating: bool) -> list[Tensor]:
    """The buffers that are averaged, or the others."""
    return [
        buffer
        for buffer in module.buffers()
        if buffer.numel() and (buffer.is_floating_point() or buffer.is_complex()) == floating
    ]


def pack_fragment(
    module: nn.Module,
    now: Round,
    local: LocalSGD | DiLoCo,
    key: int,
    weight: Tensor | float,
    due: int,
) -> PendingMean:
    """What this replica sends of a fragment, or of its buffers.

    Args:
        weight: Of this replica.
        due: The update at which the mean is applied.

    Effects:
        Counting for the next average of a fragment begins.
    """
    if key == BUFFERS:
        buffers = buffers_of(module, floating=True)
        return pack_means(buffers, weight, now.copies.device, due=due)
    names = now.fragments[key]
    tensors = parts_of(now.parameters, names)
    if isinstance(local, DiLoCo):
        anchor = parts_of(now.anchor, names)
        tensors = [_accumulation_copy(new) - old for new, old in zip(tensors, anchor, strict=True)]
    now.rows[key].zero_()
    if now.residual:
        residuals = [now.residual[name] for name in names]
        packed = pack_int8(tensors, residuals, weight, now.copies.device, due=due)
    else:
        packed = pack_means(tensors, weight, now.copies.device, due=due)
    now.weight[key].zero_()
    return packed


def apply_means(
    module: nn.Module, now: Round, local: LocalSGD | DiLoCo, key: int, exchange: PendingMean
) -> None:
    """Replace parameters or buffers by what follows from their means, once all was received."""
    if key == BUFFERS:
        tensors = buffers_of(module, floating=True)
        means = _means_of(exchange, tensors)
    else:
        names = now.fragments[key]
        tensors = parts_of(now.parameters, names)
        means = _means_of(exchange, parts_of(now.anchor or now.parameters, names))
        if isinstance(local, DiLoCo):
            means = _outer_step(now, names, means, local)
    for tensor, mean in zip(tensors, means, strict=True):
        tensor.copy_(mean)


def _outer_step(
    now: Round, names: Sequence[str], moved: list[Tensor], local: DiLoCo
) -> list[Tensor]:
    """torch's SGD on the gradient `-moved`; the resulting parameters."""
    anchor, momentum = parts_of(now.anchor, names), parts_of(now.momentum, names)
    if not anchor:
        return []
    for start, average, change in zip(anchor, momentum, moved, strict=True):
        average.mul_(local.outer_momentum).add_(change)
        step = change.add(average, alpha=local.outer_momentum) if local.nesterov else average
        start.add_(step, alpha=local.outer_lr)
    return anchor


def parts_of(tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[Tensor]:
    """The local part of each tensor."""
    return [local_values(tensors[name]) for name in names]


def _accumulation_copy(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_complex() else tensor.to(accumulation_dtype(tensor.dtype))
