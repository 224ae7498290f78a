"""Training loops: a step, an update, a whole run, metrics, running means, and when to stop."""

from fxtrain.loop.batch_size import find_batch_size, predict_batch_size
from fxtrain.loop.early_stopping import EarlyStopping
from fxtrain.loop.evaluating import evaluate
from fxtrain.loop.fitting import fit
from fxtrain.loop.learning_rates import RateCurve, find_lr
from fxtrain.loop.means import Mean
from fxtrain.loop.noise_scale import NoiseScale
from fxtrain.loop.releasing import Released, release
from fxtrain.loop.stepping import StepFns, step, update
from fxtrain.loop.weight_averages import EMA, ema

__all__ = [
    "EMA",
    "EarlyStopping",
    "Mean",
    "NoiseScale",
    "RateCurve",
    "Released",
    "StepFns",
    "ema",
    "evaluate",
    "find_batch_size",
    "find_lr",
    "fit",
    "predict_batch_size",
    "release",
    "step",
    "update",
]
