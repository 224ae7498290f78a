"""Checkpoints and configs of other libraries."""

from fxtrain.backends.deepspeed import deepspeed_config
from fxtrain.interop.accelerate_config import convert_accelerate
from fxtrain.interop.converting import import_checkpoint, read_checkpoint
from fxtrain.interop.imported import Imported
from fxtrain.interop.megatron_checkpoints import write_megatron

__all__ = [
    "Imported",
    "convert_accelerate",
    "deepspeed_config",
    "import_checkpoint",
    "read_checkpoint",
    "write_megatron",
]
__dir__ = __all__.copy  # for completion
