"""Four-bit weights in the layout of bitsandbytes' kernel for CPUs with AVX512-BF16.

The kernel is several times faster than unpacking the weight for a product. It reads 32 rows at a
time, and scales in bf16. Here a weight in this layout keeps its own scales beside those of the
kernel, so that it can be restored bit for bit; bitsandbytes' own layers round them.
"""

import threading
from typing import Any

import torch
from bitsandbytes import functional
from bitsandbytes.functional import QuantState
from torch import Tensor, nn

_ROWS = 32  # of a block, whose upper half shares bytes with its lower half
_HAS_KERNEL = bool(functional.has_avx512bf16())
_LOCK = threading.Lock()  # several threads may evaluate one model


def operands(layer: Any, x: Tensor) -> tuple[Tensor, QuantState]:
    """The weight of a layer and its state, as `bitsandbytes.matmul_4bit` takes them for an input.

    In evaluation without gradients, a weight that the layer holds itself changes to the layout of
    the kernel, and back when it is needed otherwise. One whose memory a strategy replaces is
    converted each time, so that its products are the same.
    """
    weight: Any = layer._parameters["weight"]
    if not _HAS_KERNEL or weight.device.type != "cpu" or type(weight).__name__ == "FakeTensor":
        restore(layer)  # of a model that was copied from another machine
        return weight, _state(layer)
    if torch.compiler.is_compiling():
        return _traced(layer, x)
    with _LOCK:
        state = _state(layer)
        exact = getattr(state, "exact", state)
        fits = _suits(layer, x, exact)
        if fits == (state is not exact):
            return _bytes(weight), state
        with torch.inference_mode(mode=False), torch.no_grad():
            if not fits:
                _restore(weight)
                return _bytes(weight), exact
            if not (layer.prepacks and hasattr(weight, "quant_state")):
                return _pack(_bytes(weight), exact), _kernel_state(exact)
            weight.data, weight.quant_state = _pack(_bytes(weight), exact), _kernel_state(exact)
            return _bytes(weight), weight.quant_state


def restore(layer: Any) -> bool:
    """Give a layer the weight that it had before an evaluation; whether that changed it."""
    weight = layer._parameters.get("weight")
    if not hasattr(getattr(weight, "quant_state", None), "exact"):
        return False
    with _LOCK, torch.inference_mode(mode=False), torch.no_grad():
        return _restore(weight)


def _state(layer: Any) -> Any:
    # Moving a module in a dry run replaces parameters without their attributes.
    return getattr(layer._parameters["weight"], "quant_state", layer.quant_state)


def _restore(weight: Any) -> bool:
    state: Any = getattr(weight, "quant_state", None)
    if not hasattr(state, "exact"):
        return False
    weight.data, weight.quant_state = _unpack(_bytes(weight), state.exact), state.exact
    return True


def _traced(layer: Any, x: Tensor) -> tuple[Tensor, QuantState]:
    """As `operands`, in a graph that is compiled, which cannot change a weight."""
    weight, state = layer._parameters["weight"], _state(layer)
    exact = getattr(state, "exact", state)
    if state is exact or _suits(layer, x, exact):
        return weight, state
    return _unpack(weight, exact), exact


def _suits(layer: nn.Module, x: Tensor, state: Any) -> bool:
    """Whether the kernel computes this product; it has no backward.

    `x.requires_grad` would do, but then values would depend on which biases require grad.
    """
    rows, columns = state.shape
    return (
        not layer.training
        and not torch.is_grad_enabled()
        and x.dtype == torch.bfloat16
        and x.numel() > 0
        and x.shape[-1] == columns
        and rows % _ROWS == 0
        and columns % state.blocksize == 0
    )


def _kernel_state(exact: Any) -> Any:
    scales = exact.absmax
    if exact.nested:
        scales = functional.dequantize_blockwise(scales, exact.state2) + exact.offset
    rows, columns = exact.shape
    scales = scales.view(rows, columns // exact.blocksize).T.to(torch.bfloat16).contiguous()
    made: Any = QuantState(
        absmax=scales,
        shape=exact.shape,
        code=exact.code,
        blocksize=exact.blocksize,
        quant_type=exact.quant_type,
        dtype=torch.bfloat16,
    )
    made.packing_format_for_cpu, made.exact = True, exact
    return made


def _bytes(weight: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():  # a plain tensor, without the library's dispatch
        return weight.detach()


def _pack(weight: Tensor, exact: Any) -> Tensor:
    """Bytes of two neighbours in a row → bytes of the same column in two rows, 16 rows apart."""
    rows, columns = exact.shape
    halves = weight.view(-1).view(torch.uint8).view(rows // _ROWS, 2, _ROWS // 2, -1)
    upper, lower = halves.transpose(2, 3).unbind(1)
    made = halves.new_empty(rows // _ROWS, columns // 2, _ROWS // 2, 2)
    torch.bitwise_or(upper >> 4, lower & 0xF0, out=made[..., 0])
    torch.bitwise_or(upper & 0x0F, lower << 4, out=made[..., 1])
    return made.view(-1).view(weight.dtype).view(weight.shape)


def _unpack(weight: Tensor, exact: Any) -> Tensor:
    """The inverse of `_pack`."""
    rows, columns = exact.shape
    pairs = weight.view(-1).view(torch.int16)
    pairs = pairs.view(rows // _ROWS, columns // 2, _ROWS // 2).transpose(1, 2).contiguous()
    even, odd = pairs.view(torch.uint8).view(rows // _ROWS, _ROWS // 2, -1, 2).unbind(-1)
    made = even.new_empty(rows // _ROWS, 2, _ROWS // 2, columns // 2)
    torch.bitwise_or(even << 4, odd & 0x0F, out=made[:, 0])
    torch.bitwise_or(even & 0xF0, odd >> 4, out=made[:, 1])
    return made.view(-1).view(weight.dtype).view(weight.shape)
