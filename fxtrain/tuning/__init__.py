"""What to try before a run: batch sizes, learning rates, and how much rows still add."""

from fxtrain.tuning.batch_size import NoiseScale, find_batch_size, predict_batch_size
from fxtrain.tuning.learning_rates import RateCurve, find_lr

__all__ = ["NoiseScale", "RateCurve", "find_batch_size", "find_lr", "predict_batch_size"]
