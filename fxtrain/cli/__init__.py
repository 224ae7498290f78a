"""The command line: parses arguments into records and calls the library."""

from fxtrain.cli.app import COMMANDS, main
from fxtrain.cli.output import Exit

__all__ = ["COMMANDS", "Exit", "main"]
