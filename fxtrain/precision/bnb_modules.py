"""Layers of bitsandbytes whose forward changes neither weights nor biases.

In evaluation mode on some CPUs, the library's own forward packs four-bit weights in place, which
rounds their scales, and it casts biases to the dtype of the input in place: a checkpoint that is
saved after an evaluation would differ from one that is saved before.
"""

import logging
from typing import Any

import bitsandbytes as bnb
from torch import Tensor

# Logged in each forward of each layer that is not fp16.
logging.getLogger("bitsandbytes.autograd._functions").addFilter(
    lambda record: not str(record.msg).startswith("MatMul8bitLt: inputs will be cast")
)


class Linear4bit(bnb.nn.Linear4bit):
    """A layer with four-bit weights, computed in `compute_dtype` or in the dtype of the input."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`."""
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        weight = self.weight
        # Moving a module in a dry run replaces parameters without their attributes.
        state: Any = getattr(weight, "quant_state", self.quant_state)
        inputs = x.to(dtype).contiguous()
        return bnb.matmul_4bit(inputs, weight, quant_state=state, bias=bias).to(x.dtype)

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
