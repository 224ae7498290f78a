"""Model files: safetensors readers and writers, sources, export and loading."""

from fxtrain.models.exporting import export
from fxtrain.models.loading import Loaded, load_model
from fxtrain.models.tensor_sources import WeightSource

__all__ = ["Loaded", "WeightSource", "export", "load_model"]
