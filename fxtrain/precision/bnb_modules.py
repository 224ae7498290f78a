"""Layers of bitsandbytes whose forward leaves weights and biases as they are.

The library's own forward packs four-bit weights for CPUs, which loses bits of their scales, and
casts biases to the format of the input in place: a checkpoint would differ after an evaluation.
"""

import logging
from typing import Any

import bitsandbytes as bnb
from torch import Tensor

__all__ = ["Linear4bit", "Linear8bitLt"]

# Logged in each forward of each layer that is not fp16.
logging.getLogger("bitsandbytes.autograd._functions").addFilter(
    lambda record: not str(record.msg).startswith("MatMul8bitLt: inputs will be cast")
)


class Linear4bit(bnb.nn.Linear4bit):
    """A layer with four-bit weights, computed in `compute_dtype` or in the format of the input."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`."""
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        # Moving a module in a dry run replaces parameters without their attributes.
        state: Any = getattr(self.weight, "quant_state", self.quant_state)
        made = bnb.matmul_4bit(x.to(dtype), self.weight, quant_state=state, bias=bias)
        return made.to(x.dtype)

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
        made: Tensor = bnb.matmul(x, self.weight, bias=bias, state=self.state)
        return made

    def init_8bit_state(self) -> None:
        """Keep the scales at the weight, where moving the module finds them."""
        weight: Any = self.weight
        self.state.CB, self.state.SCB = weight.data, getattr(weight, "SCB", self.state.SCB)
