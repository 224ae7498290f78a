"""Looking at machines, models and set-ups before anything long is started."""

from fxtrain.cli.inspect._env import collect
from fxtrain.cli.inspect._secrets import hidden

__all__ = ["collect", "hidden"]
