"""Quantised weights, and linear layers that compute in float8."""

from fxtrain.precision.bnb_layers import BNB4, BNB8
from fxtrain.precision.library import Library, is_sharded
from fxtrain.precision.plain_tensors import (
    allocate,
    has_no_memory,
    is_quantized,
    live_tensors,
    quantized_facts,
    quantized_layers,
    quantized_tensors,
    quantized_weight,
    stored_tensors,
    stream_later,
)
from fxtrain.precision.quantizing import (
    companions,
    converted_to_fp32,
    difference,
    gradient_problem,
    hold_as_parameters,
    library_of,
    packed_layer,
    planned_layers,
    put_layers,
    quantize_layers,
    quantize_on_meta,
    sharding_problem,
)
from fxtrain.precision.recipe_layers import (
    convert_layers,
    gather_in_float8,
    recipe_targets,
)
from fxtrain.precision.torchao_layers import TORCHAO, torchao_config
from fxtrain.precision.transformer_engine import engine_region, scaling_state

__all__ = [
    "BNB4",
    "BNB8",
    "Library",
    "TORCHAO",
    "allocate",
    "companions",
    "convert_layers",
    "converted_to_fp32",
    "difference",
    "engine_region",
    "gather_in_float8",
    "gradient_problem",
    "has_no_memory",
    "hold_as_parameters",
    "is_quantized",
    "is_sharded",
    "library_of",
    "live_tensors",
    "packed_layer",
    "planned_layers",
    "put_layers",
    "quantize_layers",
    "quantize_on_meta",
    "quantized_facts",
    "quantized_layers",
    "quantized_tensors",
    "quantized_weight",
    "recipe_targets",
    "scaling_state",
    "sharding_problem",
    "stored_tensors",
    "stream_later",
    "torchao_config",
]
