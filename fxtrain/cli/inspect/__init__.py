"""Looking at machines, models and set-ups before anything long is started."""

from fxtrain.cli.inspect._env import collect
from fxtrain.cli.inspect._facts import clock_problems, fact_problems
from fxtrain.cli.inspect._memory import Estimate, Training, estimate, inference, training
from fxtrain.cli.inspect._secrets import hidden, hidden_words, shown
from fxtrain.cli.inspect._tpu_command import setup_command
from fxtrain.cli.inspect._weights import KvCache, Weight, Weights, read_weights

__all__ = [
    "Estimate",
    "KvCache",
    "Training",
    "Weight",
    "Weights",
    "clock_problems",
    "collect",
    "estimate",
    "fact_problems",
    "hidden",
    "hidden_words",
    "inference",
    "read_weights",
    "setup_command",
    "shown",
    "training",
]
