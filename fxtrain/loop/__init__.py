"""Training loops: one step."""

from fxtrain.loop.stepping import StepFns, step

__all__ = ["StepFns", "step"]
