"""Model files: safetensors readers and writers, sources, export and loading."""

from fxtrain.models.exporting import export
from fxtrain.models.loading import Loaded, load_model

__all__ = ["Loaded", "export", "load_model"]
