"""Weights in two bits: torchao chooses and packs the values, and its kernels unpack them.

torchao has no tensor for two bits that is packed: below eight bits it holds a value per byte, or
packs four bits for Triton kernels.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchao.prototype.dtypes.uintx.bitpacking import pack_cpu
from torchao.quantization.quantize_.workflows import (
    IntxChooseQParamsAlgorithm,
    IntxUnpackedToInt8Tensor,
)
from torchao.utils import TorchAOBaseTensor

_LOWEST = -2


class Int2Tensor(TorchAOBaseTensor):
    """A matrix of which a byte holds four values.

    Attributes:
        qdata: uint8, (rows, columns / 4).
        scale: (rows, columns / group), in the format of the matrix.
        group: Values of a row with the same scale.
    """

    tensor_data_names: ClassVar = ["qdata", "scale"]
    tensor_attribute_names: ClassVar = ["group"]

    def __new__(cls, qdata: Tensor, scale: Tensor, group: int) -> "Int2Tensor":
        """A tensor of the matrix's shape and format, without memory of its own."""
        make = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
        shape = (qdata.shape[0], 4 * qdata.shape[1])
        return make(cls, shape, dtype=scale.dtype, device=qdata.device, requires_grad=False)

    def __init__(self, qdata: Tensor, scale: Tensor, group: int) -> None:
        self.qdata, self.scale, self.group = qdata, scale, group

    def _stable_hash_for_caching(self) -> str:
        """The key of the tensor in torch's cache of compiled graphs."""
        return f"Int2Tensor({tuple(self.shape)}, {self.dtype}, {self.device}, {self.group})"

    def dequantize(self) -> Tensor:
        """The matrix, as a plain tensor."""
        rows, columns = self.shape
        values = self.qdata.new_empty(rows, 4, columns // 4)
        for place in range(4):  # two bits of each byte: a quarter of the row
            torch.bitwise_and(self.qdata >> 2 * place, 3, out=values[:, place])
        signed = values.view(torch.int8).add_(_LOWEST).to(self.scale.dtype)
        grouped = signed.view(rows, -1, self.group).mul_(self.scale.unsqueeze(-1))
        return grouped.view(rows, columns)


def int2_of(weight: Tensor, group: int) -> Int2Tensor:
    """Quantise a matrix, also on the meta device, in groups of a row of a multiple of 8 values."""
    rows, columns = weight.shape
    if weight.is_meta:  # the search for scales reads values
        packed = torch.empty(rows, columns // 4, dtype=torch.uint8, device="meta")
        return Int2Tensor(packed, weight.new_empty((rows, columns // group)), group)
    how = IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY  # a tenth less error than from the extremes
    # torchao types blocks of one dim only, and torch's stubs leave the small integers out.
    quantize: Any = IntxUnpackedToInt8Tensor.from_hp
    dtype = vars(torch)["int2"]
    quantized = quantize(weight, (1, group), dtype, intx_choose_qparams_algorithm=how)
    (packed,) = pack_cpu((quantized.qdata - _LOWEST).to(torch.uint8), 2)
    return Int2Tensor(packed, quantized.scale, group)


def _product(x: Tensor, weight: Int2Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.dequantize().to(x.dtype), bias)


@Int2Tensor.implements_torch_function(F.linear)
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    x, weight = args[:2]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    trained = x.requires_grad or (bias is not None and bias.requires_grad)
    if not (trained and torch.is_grad_enabled()):
        return _product(x, weight, bias)
    # Unpacked again in backward, so that autograd keeps no matrix alive.
    return checkpoint(_product, x, weight, bias, use_reentrant=False, preserve_rng_state=False)
