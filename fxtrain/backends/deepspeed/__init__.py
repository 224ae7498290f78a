"""ZeRO by DeepSpeed."""

from fxtrain.backends.deepspeed.config import deepspeed_config
from fxtrain.backends.deepspeed.setup import zero_init

__all__ = ["deepspeed_config", "zero_init"]
