"""Layers of bitsandbytes whose forward keeps every bit of weights and biases.

The library's own forward packs four-bit weights for CPUs, which loses bits of their scales, and
casts biases to the format of the input in place: a checkpoint would differ after an evaluation.
"""

import logging
from typing import Any

import bitsandbytes as bnb
from torch import Tensor

from fxtrain.precision import bnb_prepacked

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
        if bnb_prepacked.restore(self):
            self.prepacks = False
        return self._parameters["weight"]

    def restore_layout(self) -> None:
        """Hold the weight as files do, until the next evaluation."""
        bnb_prepacked.restore(self)

    def keep_layout(self) -> None:
        """Hold the weight as files do, for good: a strategy replaces its memory."""
        self.restore_layout()
        self.prepacks = False

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`."""
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        inputs = x.to(dtype)
        weight, state = bnb_prepacked.operands(self, inputs)
        made = bnb.matmul_4bit(inputs.contiguous(), weight, quant_state=state, bias=bias)
        return made.to(x.dtype)

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
        made: Tensor = bnb.matmul(rows, self.weight, bias=bias, state=self.state)
        return made if x.ndim > 1 else made.squeeze(0)

    def init_8bit_state(self) -> None:
        """Keep the scales at the weight, where moving the module finds them."""
        weight: Any = self.weight
        self.state.CB, self.state.SCB = weight.data, getattr(weight, "SCB", self.state.SCB)
