"""Layers of bitsandbytes whose forward keeps every bit of weights and biases.

The library's own forward packs four-bit weights for CPUs, which loses bits of their scales, and
casts biases to the format of the input in place: a checkpoint would differ after an evaluation.
"""

import logging
import threading
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes import functional
from bitsandbytes.functional import QuantState
from torch import Tensor, nn

# Logged in each forward of each layer that is not fp16.
logging.getLogger("bitsandbytes.autograd._functions").addFilter(
    lambda record: not str(record.msg).startswith("MatMul8bitLt: inputs will be cast")
)


class Linear4bit(bnb.nn.Linear4bit):
    """A layer with four-bit weights, computed in `compute_dtype` or in the format of the input.

    Attributes:
        prepacks: The weight may change to the layout of the CPU's kernel in evaluation.
    """

    prepacks = True

    @property
    def weight(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weight in the layout of files, which a layer that is read in evaluation keeps."""
        if "weight" not in self._parameters:
            raise AttributeError("weight")
        if restore(self):
            self.prepacks = False
        return self._parameters["weight"]

    def restore_layout(self) -> None:
        """Hold the weight as files do, until the next evaluation."""
        restore(self)

    def keep_layout(self) -> None:
        """Hold the weight as files do, for good: a strategy replaces its memory."""
        self.restore_layout()
        self.prepacks = False

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`."""
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        inputs = x.to(dtype)
        weight, state = operands(self, inputs)
        outputs = bnb.matmul_4bit(inputs.contiguous(), weight, quant_state=state, bias=bias)
        return outputs.to(x.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:  # noqa: FBT001, FBT002
        self.restore_layout()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.restore_layout()
        super()._load_from_state_dict(*args)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        self.restore_layout()
        if keep_vars:  # live tensors, without a file's summary of them, which needs values
            destination[f"{prefix}weight"] = self.weight
            if self.bias is not None:
                destination[f"{prefix}bias"] = self.bias
        else:
            super()._save_to_state_dict(destination, prefix, keep_vars)


class Linear8bitLt(bnb.nn.Linear8bitLt):
    """A layer with int8 weights."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`."""
        self.state.is_training = self.training
        self.init_8bit_state()
        bias = None if self.bias is None else self.bias.to(x.dtype)
        rows = x if x.ndim > 1 else x.unsqueeze(0)  # the library takes no single row
        outputs: Tensor = bnb.matmul(rows, self.weight, bias=bias, state=self.state)
        return outputs if x.ndim > 1 else outputs.squeeze(0)

    def init_8bit_state(self) -> None:
        """Keep the scales at the weight, where moving the module finds them."""
        weight: Any = self.weight
        self.state.CB, self.state.SCB = weight.data, getattr(weight, "SCB", self.state.SCB)


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
    state: Any = QuantState(
        absmax=scales,
        shape=exact.shape,
        code=exact.code,
        blocksize=exact.blocksize,
        quant_type=exact.quant_type,
        dtype=torch.bfloat16,
    )
    state.packing_format_for_cpu, state.exact = True, exact
    return state


def _bytes(weight: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():  # a plain tensor, without the library's dispatch
        return weight.detach()


def _pack(weight: Tensor, exact: Any) -> Tensor:
    """Bytes of two neighbours in a row → bytes of the same column in two rows, 16 rows apart."""
    rows, columns = exact.shape
    halves = weight.view(-1).view(torch.uint8).view(rows // _ROWS, 2, _ROWS // 2, -1)
    upper, lower = halves.transpose(2, 3).unbind(1)
    packed = halves.new_empty(rows // _ROWS, columns // 2, _ROWS // 2, 2)
    torch.bitwise_or(upper >> 4, lower & 0xF0, out=packed[..., 0])
    torch.bitwise_or(upper & 0x0F, lower << 4, out=packed[..., 1])
    return packed.view(-1).view(weight.dtype).view(weight.shape)


def _unpack(weight: Tensor, exact: Any) -> Tensor:
    """The inverse of `_pack`."""
    rows, columns = exact.shape
    pairs = weight.view(-1).view(torch.int16)
    pairs = pairs.view(rows // _ROWS, columns // 2, _ROWS // 2).transpose(1, 2).contiguous()
    even, odd = pairs.view(torch.uint8).view(rows // _ROWS, _ROWS // 2, -1, 2).unbind(-1)
    unpacked = even.new_empty(rows // _ROWS, 2, _ROWS // 2, columns // 2)
    torch.bitwise_or(even << 4, odd & 0x0F, out=unpacked[:, 0])
    torch.bitwise_or(even & 0xF0, odd >> 4, out=unpacked[:, 1])
    return unpacked.view(-1).view(weight.dtype).view(weight.shape)
