"""Checkpoints: written atomically, verified by digests, and free of pickle."""

from fxtrain.checkpoint.background import Saving
from fxtrain.checkpoint.folders import before, best, latest
from fxtrain.checkpoint.merging import merge, saved_weights
from fxtrain.checkpoint.restoring import Restored, restore
from fxtrain.checkpoint.saving import save
from fxtrain.checkpoint.verification import Verified, compare, verify

__all__ = [
    "Restored",
    "Saving",
    "Verified",
    "before",
    "best",
    "compare",
    "latest",
    "merge",
    "restore",
    "save",
    "saved_weights",
    "verify",
]
__dir__ = __all__.copy  # for completion
