"""Quantised weights: choosing layers, converting them, and their tensors by name."""

from fxtrain.precision.bnb_layers import BNB4, BNB8
from fxtrain.precision.library import Library
from fxtrain.precision.plain_tensors import (
    allocate,
    is_quantized,
    quantized_facts,
    quantized_layers,
    quantized_tensors,
    stored_tensors,
)
from fxtrain.precision.quantizing import (
    Quantized,
    converted_to_fp32,
    library_of,
    planned_layers,
    put_layers,
    quantize_layers,
)
from fxtrain.precision.torchao_layers import TORCHAO

__all__ = [
    "BNB4",
    "BNB8",
    "Library",
    "Quantized",
    "TORCHAO",
    "allocate",
    "converted_to_fp32",
    "is_quantized",
    "library_of",
    "planned_layers",
    "put_layers",
    "quantize_layers",
    "quantized_facts",
    "quantized_layers",
    "quantized_tensors",
    "stored_tensors",
]
