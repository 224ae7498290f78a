"""Checkpoints: whole or absent, checked to the last byte, and free of pickle.

Beside them, models in the files that other libraries read.
"""

from fxtrain.checkpoint._background import Saving
from fxtrain.checkpoint._compare import Difference, compare, count_leaves
from fxtrain.checkpoint._export import export
from fxtrain.checkpoint._import import import_checkpoint
from fxtrain.checkpoint._import_accelerate import AcceleratorState, read_accelerate
from fxtrain.checkpoint._import_dcp import DcpState, read_dcp
from fxtrain.checkpoint._import_deepspeed import DeepSpeedState, read_deepspeed
from fxtrain.checkpoint._load_model import Loaded, load_model
from fxtrain.checkpoint._merge import merge
from fxtrain.checkpoint._names import before, latest
from fxtrain.checkpoint._restore import Restored, restore
from fxtrain.checkpoint._save import save
from fxtrain.checkpoint._verify import Verified, verify

__all__ = [
    "AcceleratorState",
    "DcpState",
    "DeepSpeedState",
    "Difference",
    "Loaded",
    "Restored",
    "Saving",
    "Verified",
    "before",
    "compare",
    "count_leaves",
    "export",
    "import_checkpoint",
    "latest",
    "load_model",
    "merge",
    "read_accelerate",
    "read_dcp",
    "read_deepspeed",
    "restore",
    "save",
    "verify",
]
