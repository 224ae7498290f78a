"""Training loops: a step, an update, a whole run, metrics, running means, and when to stop."""

from fxtrain.loop.early_stopping import EarlyStopping
from fxtrain.loop.evaluating import Mean, evaluate
from fxtrain.loop.fitting import fit
from fxtrain.loop.releasing import release
from fxtrain.loop.stepping import StepFns, step, update
from fxtrain.loop.weight_averages import EMA, ema

__all__ = [
    "EMA",
    "EarlyStopping",
    "Mean",
    "StepFns",
    "ema",
    "evaluate",
    "fit",
    "release",
    "step",
    "update",
]
