"""The command line: arguments to records to calls."""

from fxtrain.cli._launch import LAUNCH, spec_of
from fxtrain.cli._main import COMMANDS, main

__all__ = ["COMMANDS", "LAUNCH", "main", "spec_of"]
