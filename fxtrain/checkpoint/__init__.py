"""Checkpoints: written atomically, verified by digests, and free of pickle."""

from typing import TYPE_CHECKING

from fxtrain import _extensions
from fxtrain.checkpoint.background import Saving
from fxtrain.checkpoint.folders import before, best, latest
from fxtrain.checkpoint.restoring import Restored, restore
from fxtrain.checkpoint.saving import save
from fxtrain.checkpoint.verification import Verified, compare, verify

if TYPE_CHECKING:
    from fxtrain._extensions import merge, saved_weights

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
__getattr__ = _extensions.offers(__name__, __all__)
__dir__ = __all__.copy  # for completion
