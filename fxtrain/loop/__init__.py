"""Training loops: one step, and when to stop."""

from fxtrain.loop.early_stopping import EarlyStopping
from fxtrain.loop.stepping import StepFns, step

__all__ = ["EarlyStopping", "StepFns", "step"]
