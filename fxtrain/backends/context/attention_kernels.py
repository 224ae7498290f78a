"""Kernels of attention with the signatures that torch's ring attention expects."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_HEAD_ALIGNMENT = 8  # head sizes that CUDA's kernels take are multiples of it
# Tokens to whose multiple the memory-efficient kernel pads logsumexp; AMD's kernel does not.
_SUM_ALIGNMENT = 1 if torch.version.hip else 32
_aten = torch.ops.aten


class AttentionKernel(NamedTuple):
    """The two halves of a kernel.

    Attributes:
        forward: (query, key, value, is_causal=…) → out, logsumexp, what backward needs.
        backward: → gradients of query, key and value.
        grad: Name of backward's first argument.
        given: Further arguments of forward.
        kept: Names under which backward takes the other results of forward, in order.
        back: Further arguments of backward.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    grad: str
    given: dict[str, Any]
    kept: tuple[str, ...]
    back: dict[str, Any]


def padded_size(query: Tensor, value: Tensor) -> int:
    """The head size that kernels compute with: queries, keys and values have the same there."""
    largest = max(query.shape[-1], value.shape[-1])
    if query.device.type == "cpu":
        return largest
    return math.ceil(largest / _HEAD_ALIGNMENT) * _HEAD_ALIGNMENT


def choose_kernel(query: Tensor) -> AttentionKernel:
    """The fastest kernel for queries, and keys and values like them.

    On CUDA, those that torch itself would choose from for this device, dtype and head size, and
    that `torch.nn.attention.sdpa_kernel` allows. For all else there is one made of products.
    """
    if query.device.type == "cpu":
        return _CPU
    if query.device.type == "cuda":
        asked = torch.backends.cuda.SDPAParams(query, query, query, None, 0.0, False, False)  # noqa: FBT003
        if torch.backends.cuda.can_use_flash_attention(asked):
            return _FLASH
        if torch.backends.cuda.can_use_efficient_attention(asked):
            return _EFFICIENT
    return PLAIN


def _efficient_forward(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    out, sums, *rest = _aten._scaled_dot_product_efficient_attention.default(
        query, key, value, **options
    )
    return out, sums[..., : query.shape[2]], *rest


def _efficient_backward(*, logsumexp: Tensor, **options: Any) -> Any:
    missing = -logsumexp.shape[2] % _SUM_ALIGNMENT
    padded = F.pad(logsumexp, (0, missing), value=math.inf).contiguous()
    return _aten._scaled_dot_product_efficient_attention_backward.default(
        logsumexp=padded, **options
    )


def _scores(query: Tensor, key: Tensor, scale: float | None, *, is_causal: bool) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.to(wide) @ key.to(wide).mT * factor
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _plain_forward(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, scale, is_causal=is_causal)
    sums = scores.logsumexp(-1)
    out = (scores - sums[..., None]).exp() @ value.to(scores.dtype)
    return out.to(query.dtype), sums


def _plain_backward(
    *,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    # Of all keys of the ring are `out` and `logsumexp`; of one rank are `key` and `value`.
    scores = _scores(query, key, scale, is_causal=is_causal)
    grad, wide = grad_out.to(scores.dtype), scores.dtype
    shares = (scores - logsumexp[..., None]).exp()
    mean = (grad * out.to(wide)).sum(-1, keepdim=True)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    slopes = shares * (grad @ value.to(wide).mT - mean) * factor
    found = slopes @ key.to(wide), slopes.mT @ query.to(wide), shares.mT @ grad
    return found[0].to(query.dtype), found[1].to(key.dtype), found[2].to(value.dtype)


_NO_DROPOUT: dict[str, Any] = {"dropout_p": 0.0}
_CPU = AttentionKernel(
    forward=_aten._scaled_dot_product_flash_attention_for_cpu.default,
    backward=_aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    grad="grad_out",
    given=_NO_DROPOUT,
    kept=(),
    back=_NO_DROPOUT,
)
_FLASH = AttentionKernel(
    forward=_aten._scaled_dot_product_flash_attention.default,
    backward=_aten._scaled_dot_product_flash_attention_backward.default,
    grad="grad_out",
    given=_NO_DROPOUT,
    kept=("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset"),
    back=_NO_DROPOUT,
)
_EFFICIENT = AttentionKernel(
    forward=_efficient_forward,
    backward=_efficient_backward,
    grad="grad_out_",
    given={**_NO_DROPOUT, "attn_bias": None, "compute_log_sumexp": True},
    kept=("philox_seed", "philox_offset"),
    back={**_NO_DROPOUT, "attn_bias": None, "grad_input_mask": (True, True, True, False)},
)
PLAIN = AttentionKernel(
    forward=_plain_forward,
    backward=_plain_backward,
    grad="grad_out",
    given={},
    kept=(),
    back={},
)
