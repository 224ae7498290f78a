"""Training loops: one step."""

from fxtrain.loop._step import StepFns, step

__all__ = ["StepFns", "step"]
