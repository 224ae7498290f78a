"""Quantised weights: choosing layers, converting them, and their tensors by name."""

from fxtrain.precision.plain_tensors import (
    is_quantized,
    quantized_layers,
    quantized_tensors,
    stored_tensors,
)
from fxtrain.precision.quantizing import Quantized, planned_layers, quantize_layers

__all__ = [
    "Quantized",
    "is_quantized",
    "planned_layers",
    "quantize_layers",
    "quantized_layers",
    "quantized_tensors",
    "stored_tensors",
]
