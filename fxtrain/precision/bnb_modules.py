"""Layers of bitsandbytes whose forward keeps every bit of weights and biases.

The library's own forward packs four-bit weights for CPUs, which loses bits of their scales, and
casts biases to the format of the input in place: a checkpoint would differ after an evaluation.
"""

import copy
import logging
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes import functional
from torch import Tensor

# Logged in each forward of each layer that is not fp16.
logging.getLogger("bitsandbytes.autograd._functions").addFilter(
    lambda record: not str(record.msg).startswith("MatMul8bitLt: inputs will be cast")
)

_ROWS = 32  # of a block of the CPU's kernel
_HAS_KERNEL = bool(functional.has_avx512bf16())


class Linear4bit(bnb.nn.Linear4bit):
    """A layer with four-bit weights, computed in `compute_dtype` or in the format of the input.

    For evaluation on some CPUs, the library has a kernel with a layout of its own. The layer keeps
    a copy of its weight in that layout, until it trains or moves; the weight itself never changes.

    Attributes:
        keeps_copy: False where a strategy replaces the weight's memory: it is copied each time.
    """

    keeps_copy = True
    _copy: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`."""
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        inputs, weight = x.to(dtype), self.weight
        # Moving a module in a dry run replaces parameters without their attributes.
        state: Any = getattr(weight, "quant_state", self.quant_state)
        if self._suits(inputs, weight, state):
            weight, state = self._packed(weight, state)
        outputs = bnb.matmul_4bit(inputs.contiguous(), weight, quant_state=state, bias=bias)
        return outputs.to(x.dtype)

    def _suits(self, x: Tensor, weight: Tensor, state: Any) -> bool:
        """Whether the kernel computes this product; it has no backward.

        `x.requires_grad` would do, but then values would depend on which biases require grad.
        """
        return (
            _HAS_KERNEL
            and not (self.training or torch.is_grad_enabled() or torch.compiler.is_compiling())
            and weight.device.type == "cpu"
            and type(weight).__name__ != "FakeTensor"
            and x.dtype == torch.bfloat16
            and x.numel() > 0
            and x.shape[-1] == state.shape[1]
            and state.shape[0] % _ROWS == 0
            and state.shape[1] % state.blocksize == 0
        )

    def _packed(self, weight: Any, state: Any) -> Any:
        """The weight and its state as the kernel reads them."""
        versions = [
            (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
            for tensor in (weight, state.absmax)
        ]
        if self._copy is not None and self._copy[0] is weight and self._copy[1] == versions:
            return self._copy[2]
        with torch.inference_mode(mode=False), torch.no_grad():
            plain = weight.detach().as_subclass(Tensor).view(torch.uint8)
            # The library's function changes the state that it is given.
            packed = functional._convert_weight_packed_for_cpu(plain, copy.copy(state))
        if self.keeps_copy:
            self._copy = weight, versions, packed
        return packed

    def train(self, mode: bool = True) -> "Linear4bit":  # noqa: FBT001, FBT002
        """As `nn.Module`."""
        self._copy = None if mode else self._copy
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_copy": None}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:  # noqa: FBT001, FBT002
        self._copy = None
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
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

    def _apply(self, fn: Any, recurse: bool = True) -> Any:  # noqa: FBT001, FBT002
        """Move the scales too: they are an attribute of the weight, which torch does not move."""
        weight: Any = self.weight
        scales = getattr(weight, "SCB", None)
        super()._apply(fn, recurse)
        if scales is not None and self.weight is weight:
            weight.CB, weight.SCB = weight.data, scales.to(weight.device)
        return self
