"""The command line: arguments to records to calls."""

from fxtrain.cli._commands import COMMANDS
from fxtrain.cli._exit import Exit
from fxtrain.cli._main import main

__all__ = ["COMMANDS", "Exit", "main"]
