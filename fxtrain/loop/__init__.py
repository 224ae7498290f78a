"""Training loops: a step, an update, a whole run, metrics, running means, and when to stop."""

from typing import TYPE_CHECKING

from fxtrain import _extensions
from fxtrain.loop.evaluating import Mean, evaluate
from fxtrain.loop.fitting import fit
from fxtrain.loop.stepping import StepFns, step, update

if TYPE_CHECKING:
    from fxtrain._extensions import EMA, EarlyStopping, ema, release

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
__getattr__ = _extensions.offers(__name__, __all__)
__dir__ = __all__.copy  # for completion
