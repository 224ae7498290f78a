"""Training loops: a step, an update, and when to stop."""

from fxtrain.loop.early_stopping import EarlyStopping
from fxtrain.loop.stepping import StepFns, step
from fxtrain.loop.updating import update

__all__ = ["EarlyStopping", "StepFns", "step", "update"]
