"""Looking at machines, models and set-ups before anything long is started."""

from fxtrain.cli.inspect.environment import collect
from fxtrain.cli.inspect.facts import clock_problems, fact_problems
from fxtrain.cli.inspect.secrets import hidden, hidden_words, shown
from fxtrain.cli.inspect.tpu_command import setup_command
from fxtrain.models.memory_estimates import Estimate, Training, estimate, inference, training
from fxtrain.models.weight_list import KvCache, Weight, Weights, read_weights

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
