"""Attention over sequences that are split over ranks: torch's ring attention, and its kernels.

torch's own entry point, `context_parallel`, passes DTensors to kernels that exist on GPUs only, and
replaces `scaled_dot_product_attention` for the whole process. Its two loops, forward and backward,
take any kernel, including the CPU's. Here they run below an autograd function, on calls that a
dispatch mode intercepts in the thread that runs the model.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import _make_grads
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from fxtrain.errors import StepError
from fxtrain.state import CP

_PACKAGE = "torch.distributed.tensor.experimental"
_MOVED = find_spec(f"{_PACKAGE}._context_parallel") is not None  # since torch 2.10
theirs: Any = import_module(f"{_PACKAGE}.{'_context_parallel.' * _MOVED}_attention")

_TOKENS = 2  # dimension of queries, keys and values
_ROTATE = {
    "allgather": theirs._RotateMethod.ALL_GATHER,
    "alltoall": theirs._RotateMethod.ALL_TO_ALL,
}
_HEAD_ALIGNMENT = 8  # head sizes that CUDA's kernels take are multiples of it
# Tokens to whose multiple the memory-efficient kernel pads logsumexp; AMD's kernel does not.
_SUM_ALIGNMENT = 1 if torch.version.hip else 32
_aten = torch.ops.aten
_NO_DROPOUT: dict[str, Any] = {"dropout_p": 0.0}


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


class RingAttention(TorchFunctionMode):
    """While entered, attention in this thread is computed over a ring of ranks.

    Attributes:
        calls: Number of intercepted calls.
    """

    def __init__(self, group: Any, config: CP, kernel: AttentionKernel | None = None) -> None:
        super().__init__()
        self.group, self.config, self.kernel, self.calls = group, config, kernel, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _outside(self, *args, **(kwargs or {}))
        if func is Tensor.backward or func is torch.autograd.backward:
            return _backward(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _backward(
    mode: RingAttention,
    tensors: Tensor | Sequence[Tensor],
    grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,  # noqa: FBT001 - torch's own signature
    create_graph: bool = False,  # noqa: FBT001, FBT002
    *,
    gradient: Tensor | None = None,
    inputs: Any = None,
) -> None:
    """torch's backward, run inside the mode.

    torch disables a mode while a function that it intercepted runs. Recomputed blocks call
    attention in backward, so the autograd engine has to run inside the mode.
    """
    roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    gradients = gradient if grad_tensors is None else grad_tensors
    grads = (gradients,) if gradients is None or isinstance(gradients, Tensor) else tuple(gradients)
    grads = _make_grads(roots, grads * len(roots) if gradients is None else grads, False)  # noqa: FBT003
    leaves = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs or ())
    keep = create_graph if retain_graph is None else retain_graph
    with mode:
        _engine_run_backward(
            roots, grads, keep, create_graph, leaves, allow_unreachable=True, accumulate_grad=True
        )


def _attention_override(
    mode: RingAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's own signature
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    mode.calls += 1
    config = mode.config
    _refuse(query, key, attn_mask, dropout_p, config)
    causal = config.causal or is_causal
    if causal and query.shape[_TOKENS] != key.shape[_TOKENS]:
        raise StepError(
            f"Causal attention of {query.shape[_TOKENS]} queries to {key.shape[_TOKENS]} keys: "
            f"over a context axis, both must have the same length. Use is_causal=False, or equal "
            f"lengths."
        )
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    heads = query.shape[1] // key.shape[1] if enable_gqa else 1
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    # Zeros change neither the products nor the rest of the outputs.
    features, size = value.shape[-1], padded_size(query, value)
    query, key, value = (
        x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in (query, key, value)
    )
    kernel = mode.kernel or choose_kernel(query)
    options = {"is_causal": causal, "scale": factor}
    out: Any = _Attention.apply(query, key, value, mode, kernel, heads, options)
    return out if size == features else out[..., :features]


# Compiled code calls this function without tracing it.
_outside: Any = torch.compiler.disable(_attention_override)


def _refuse(query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, config: CP) -> None:
    if query.ndim != 4 or key.ndim != 4:
        raise StepError(
            f"Attention over a context axis takes (batch, heads, tokens, features), found queries "
            f"{list(query.shape)} and keys {list(key.shape)}. Reshape them to four dimensions."
        )
    if mask is not None and not config.causal:
        raise StepError(
            f"Attention received a mask of shape {list(mask.shape)}, which covers this rank's "
            f"tokens only. Over a context axis, attention is causal or full: call it with "
            f"is_causal, or set CP(causal=True) if the mask is causal."
        )
    if dropout > 0:
        raise StepError(
            f"Attention with dropout_p={dropout}: torch's ring attention cannot reproduce the "
            f"random numbers in backward. Set the dropout of attention to 0."
        )


class _Attention(torch.autograd.Function):
    """Attention of this rank's queries to all keys.

    `heads` query heads share one head of keys and values; `options` are those of any kernel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mode: RingAttention,
        kernel: AttentionKernel,
        heads: int,
        options: dict[str, Any],
    ) -> Tensor:
        op: Any = functools.partial(_many_heads, kernel.forward, heads)
        with _torch_options(mode.config, options, query.dtype):
            out, sums, *rest = theirs._templated_ring_attention(
                mode.group,
                _TOKENS,
                op,
                query=query,
                key=key,
                value=value,
                **options,
                **kernel.given,
            )
        ctx.mode, ctx.kernel, ctx.heads, ctx.options = mode, kernel, heads, options
        ctx.kept = dict(zip(kernel.kept, rest, strict=False))
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        query, key, value, out, sums = ctx.saved_tensors
        kernel: AttentionKernel = ctx.kernel
        op: Any = functools.partial(_many_heads_back, kernel.backward, ctx.heads)
        with _torch_options(ctx.mode.config, ctx.options, query.dtype):
            grads = theirs._templated_ring_attention_backward(
                ctx.mode.group,
                _TOKENS,
                op,
                grad_out=grad,
                grad_out_name=kernel.grad,
                query=query,
                key=key,
                value=value,
                out=out,
                logsumexp=sums,
                **ctx.options,
                **ctx.kept,
                **kernel.back,
            )
        return (*grads[:3], None, None, None, None)


def _many_heads(
    op: Callable[..., Any], n: int, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> Any:
    """Grouped-query attention: n query heads share one key head; only that one is sent."""
    return op(q, _repeated(k, n), _repeated(v, n), **options)


def _many_heads_back(
    op: Callable[..., Any], n: int, *, key: Tensor, value: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = op(key=_repeated(key, n), value=_repeated(value, n), **options)
    query, keys, values = gradients[:3]
    return query, _summed(keys, n), _summed(values, n)


def _repeated(x: Tensor, n: int) -> Tensor:
    return x if n == 1 else x.repeat_interleave(n, dim=1)


def _summed(x: Tensor, n: int) -> Tensor:
    return x if n == 1 else x.unflatten(1, (-1, n)).sum(2)


@contextmanager
def _torch_options(config: CP, call: dict[str, Any], dtype: torch.dtype) -> Iterator[None]:
    """torch keeps the options of its loops per process; here each call sets its own."""
    options = theirs._cp_options
    before = (options.convert_to_f32, options.enable_load_balance, options.rotate_method)
    # Full attention needs no balancing: every query sees every key.
    balance = config.balance and call["is_causal"]
    wanted = (dtype != torch.float64, balance, _ROTATE[config.rotate])
    options.convert_to_f32, options.enable_load_balance, options.rotate_method = wanted
    try:
        yield
    finally:
        options.convert_to_f32, options.enable_load_balance, options.rotate_method = before


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
    gradients = slopes @ key.to(wide), slopes.mT @ query.to(wide), shares.mT @ grad
    return gradients[0].to(query.dtype), gradients[1].to(key.dtype), gradients[2].to(value.dtype)


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
