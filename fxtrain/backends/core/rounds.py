"""What independent replicas keep from one average to the next, what they send, and what follows."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fxtrain.backends.core.fragments import (
    Exchange,
    accumulation_dtype,
    pack_int8,
    pack_means,
    real,
)
from fxtrain.state import DiLoCo, DistContext, LocalSGD, Round, StateReader

# Added to every weight: too small to change one, but gives replicas of weight zero a mean.
MIN_WEIGHT = 2.0**-60


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
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
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


def outer_state(now: Round) -> dict[str, Tensor]:
    """What is equal on all replicas, by its names in a checkpoint."""
    anchor = {f"round.anchor.{name}": value for name, value in now.anchor.items()}
    return anchor | {f"round.momentum.{name}": value for name, value in now.momentum.items()}


def load_outer_state(now: Round, saved: StateReader) -> None:
    """Restore what is equal on all replicas; from the current parameters if none was saved."""
    for name, value in now.anchor.items():
        if f"round.anchor.{name}" in saved.shapes:
            saved.fill(f"round.anchor.{name}", value)
            saved.fill(f"round.momentum.{name}", now.momentum[name])
        else:
            value.copy_(now.parameters[name].detach())
            now.momentum[name].zero_()


def _fragments(parameters: Mapping[str, nn.Parameter], count: int) -> tuple[tuple[str, ...], ...]:
    """Neighbouring parameters, of about the same size together."""
    fragments: list[list[str]] = [[] for _ in range(count)]
    total, before = sum(p.numel() for p in parameters.values()), 0
    for name, parameter in parameters.items():
        middle = before + parameter.numel() / 2
        fragments[min(count - 1, int(count * middle / max(total, 1)))].append(name)
        before += parameter.numel()
    return tuple(map(tuple, fragments))


def pack_fragment(
    now: Round,
    local: LocalSGD | DiLoCo,
    fragment: int,
    weight: Tensor | float,
    due: int,
    buffers: Sequence[Tensor] = (),
) -> Exchange:
    """What this replica sends of a fragment; counting for its next average begins.

    Args:
        weight: Of this replica.
        due: The update at which the mean is applied.
        buffers: Averaged with the parameters, where nothing is compressed.
    """
    names = now.fragments[fragment]
    tensors = parts_of(now.parameters, names)
    if isinstance(local, DiLoCo):
        anchor = parts_of(now.anchor, names)
        tensors = [_accumulation_copy(new) - old for new, old in zip(tensors, anchor, strict=True)]
    now.rows[fragment].zero_()
    if now.residual:
        residuals = [now.residual[name] for name in names]
        packed = pack_int8(tensors, residuals, weight, now.copies.device, due=due)
    else:
        packed = pack_means([*tensors, *buffers], weight, now.copies.device, due=due)
    now.weight[fragment].zero_()
    return packed


def averaged_parts(now: Round, fragment: int) -> list[Tensor]:
    """Tensors of the shapes and dtypes of a fragment's means."""
    return parts_of(now.anchor or now.parameters, now.fragments[fragment])


def apply_means(
    now: Round, local: LocalSGD | DiLoCo, fragment: int, means: Sequence[Tensor]
) -> int:
    """Replace the parameters of a fragment by what follows from their means; how many there are."""
    names = now.fragments[fragment]
    held = parts_of(now.parameters, names)
    values = [*means[: len(held)]]
    if isinstance(local, DiLoCo):
        values = _outer_step(now, names, values, local)
    copy_all(held, values)
    return len(held)


def _outer_step(
    now: Round, names: Sequence[str], moved: list[Tensor], local: DiLoCo
) -> list[Tensor]:
    """torch's SGD on the gradient `-moved`; the resulting parameters."""
    anchor, momentum = parts_of(now.anchor, names), parts_of(now.momentum, names)
    if not anchor:
        return []
    torch._foreach_mul_(momentum, local.outer_momentum)
    torch._foreach_add_(momentum, moved)
    if local.nesterov:
        moved = list(torch._foreach_add(moved, momentum, alpha=local.outer_momentum))
    else:
        moved = momentum
    torch._foreach_add_(anchor, moved, alpha=local.outer_lr)
    return anchor


def copy_all(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value to its target."""
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def parts_of(tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[Tensor]:
    """The local part of each tensor."""
    return [getattr(tensors[name], "_local_tensor", tensors[name]) for name in names]


def _accumulation_copy(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_complex() else tensor.to(accumulation_dtype(tensor.dtype))
