"""Layers over torchao's products for training that follow autocast on any device."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchao.float8 import convert_to_float8_training as convert_to_float8_training
from torchao.float8 import float8_linear
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from fxtrain.errors import StepError

_BLOCK = 32
# Values, scales, and where products along the other dimension are cast. Rounding scales up avoids
# overflow in fp8; rounding to the nearest is what torchao advises for training in fp4.
_FORMATS: dict[str, tuple[Any, ...]] = {
    "mxfp8": (
        torch.float8_e4m3fn,
        ScaleCalculationMode.RCEIL,
        MXFP8Dim0CastKernelChoice.TRITON,
        MXFP8Dim1CastKernelChoice.CUDA,
    ),
    "mxfp4": (
        torch.float4_e2m1fn_x2,
        ScaleCalculationMode.EVEN,
        MXFP8Dim0CastKernelChoice.TORCH,
        MXFP8Dim1CastKernelChoice.TORCH,
    ),
}


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


class Float8Linear(float8_linear.Float8Linear):
    """torchao's layer, which itself looks at CUDA's autocast only."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear`."""
        dtype = _autocast_dtype(input.device)
        return super().forward(input if dtype is None else input.to(dtype))


class MXLinear(nn.Linear):
    """A layer whose three products are computed in a microscaling format."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        format: Literal["mxfp8", "mxfp4"],
        high_precision: bool,
        emulate: bool,
    ) -> None:
        super().__init__(in_features, out_features, bias=False, device="meta")
        dtype, scales, rows, columns = _FORMATS[format]
        kernels = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
        self.mx_settings = (
            dtype, dtype, dtype, _BLOCK, kernels, rows, columns, scales, high_precision,
        )  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear`, for a number of rows that 32 divides."""
        rows = input.numel() // self.in_features
        if rows % _BLOCK and torch.is_grad_enabled() and not self.mx_settings[-1]:
            raise StepError(
                f"MX: gradients of weights have one scale per {_BLOCK} rows, and this input has "
                f"{rows} ({list(input.shape)}). Pad it to a multiple of {_BLOCK}, or use "
                f"MX(grad_weight='bf16')."
            )
        dtype, weight = _autocast_dtype(input.device), self.weight
        if dtype is not None:
            input, weight = input.to(dtype), weight.to(dtype)
        outputs: Any = mx_mm.apply(input, weight, *self.mx_settings)
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)
