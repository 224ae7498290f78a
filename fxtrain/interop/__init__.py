"""Checkpoints and configs of other libraries."""

from fxtrain.backends.deepspeed import deepspeed_config
from fxtrain.interop.accelerate_checkpoints import AcceleratorState, read_accelerate
from fxtrain.interop.accelerate_config import Converted, Note, convert_accelerate
from fxtrain.interop.converting import import_checkpoint
from fxtrain.interop.dcp_checkpoints import DcpState, read_dcp
from fxtrain.interop.deepspeed_checkpoints import DeepSpeedState, read_deepspeed
from fxtrain.interop.megatron_checkpoints import MegatronState, read_megatron, write_megatron

__all__ = [
    "AcceleratorState",
    "Converted",
    "DcpState",
    "DeepSpeedState",
    "MegatronState",
    "Note",
    "convert_accelerate",
    "deepspeed_config",
    "import_checkpoint",
    "read_accelerate",
    "read_dcp",
    "read_deepspeed",
    "read_megatron",
    "write_megatron",
]
