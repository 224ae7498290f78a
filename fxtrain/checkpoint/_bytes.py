"""Tensors as bytes: their names in files, and their memory as a buffer without a copy."""

import ctypes

import torch
from torch import Tensor

from fxtrain._errors import CheckpointError

__all__ = ["DTYPES", "STORED", "contiguous", "dtype_name", "memory_of"]

# What safetensors calls them; a dtype that it has no word for is stored as bytes or pairs.
STORED = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "F32",
    "complex128": "F64",
}
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in STORED}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(tensor: Tensor, path: str) -> str:
    """The name of a tensor's dtype in a manifest.

    Raises:
        CheckpointError: tensors of this kind cannot be written.
    """
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{path} is a {tensor.layout} tensor of dtype {tensor.dtype}, for which the file "
            f"format has no word. Save a dense tensor of another dtype."
        )
    if tensor.is_meta:
        raise CheckpointError(
            f"{path} is on the meta device and has no values. Give the model values first."
        )
    return name


def contiguous(tensor: Tensor) -> Tensor:
    """The values of a tensor in order in host memory; itself where they are."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor; writable, and valid as long as the tensor lives."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
