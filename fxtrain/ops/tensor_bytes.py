"""Tensors as bytes: dtype names in files, and tensor memory as a buffer without a copy."""

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from fxtrain.errors import CheckpointError

# The safetensors dtypes that torch supports.
DTYPE_NAMES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
WRITABLE_DTYPES: Mapping[torch.dtype, str] = {dtype: word for word, dtype in DTYPE_NAMES.items()}
# The dtype that checkpoint files store, by its name in the manifest; complex as pairs.
STORED_DTYPES: Mapping[str, str] = {
    str(dtype).removeprefix("torch."): word
    for dtype, word in [
        *((dtype, word) for dtype, word in WRITABLE_DTYPES.items() if not dtype.is_complex),
        (torch.complex64, "F32"),
        (torch.complex128, "F64"),
    ]
}
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in STORED_DTYPES}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(tensor: Tensor, path: str) -> str:
    """The name of a tensor's dtype in a manifest; a CheckpointError if it cannot be written."""
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{path} is a {tensor.layout} tensor of dtype {tensor.dtype}, which the file format "
            f"does not support. Save a dense tensor of another dtype."
        )
    if tensor.is_meta:
        raise CheckpointError(
            f"{path} is on the meta device and has no values. Give the model values first."
        )
    return name


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor as a contiguous tensor in host memory, copied only if necessary."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable; the tensor lives as long as the result."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    memory: Any = (ctypes.c_char * size).from_address(tensor.data_ptr())
    memory.tensor = tensor  # or a copy that a caller does not keep would be freed
    return memoryview(memory).cast("B")


def digest(tensor: Tensor) -> str:
    """XXH3 of a tensor's values in host memory, with its dtype and shape; strides do not matter."""
    kind = f"{tensor.dtype} {list(tensor.shape)} "
    return kind + xxhash.xxh3_128_hexdigest(memory_of(contiguous(tensor)))
