"""Checkpoints: whole or absent, checked to the last byte, and free of pickle."""

from fxtrain.checkpoint._background import Saving
from fxtrain.checkpoint._names import latest
from fxtrain.checkpoint._restore import Restored, restore
from fxtrain.checkpoint._save import save
from fxtrain.checkpoint._verify import Verified, verify

__all__ = ["Restored", "Saving", "Verified", "latest", "restore", "save", "verify"]
