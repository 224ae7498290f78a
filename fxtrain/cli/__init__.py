"""The command line."""

from fxtrain.cli._main import main

__all__ = ["main"]
