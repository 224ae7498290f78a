"""From arguments to a command and an exit code."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from fxtrain import __version__
from fxtrain._errors import FxError
from fxtrain.cli._command import Command
from fxtrain.cli._launch import LAUNCH

__all__ = ["COMMANDS", "main"]

COMMANDS: tuple[Command, ...] = (LAUNCH,)

# What argparse uses for a line that it cannot read.
_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; those of the process by default.

    Returns:
        The exit code: that of the command; 2 for arguments that make no sense.

    Example:
        >>> from fxtrain.cli import main
        >>> main(["launch", "--ranks", "0", "train.py"])
        2
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help(sys.stderr)
        return _USAGE
    try:
        return options.command.run(options)
    except FxError as error:
        sys.stderr.write(f"fxtrain {options.command.name}: {type(error).__name__}: {error}\n")
        return _USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxtrain",
        description="Run PyTorch training scripts on any number of ranks.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=_versions())
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        one = commands.add_parser(
            command.name, help=command.help, description=command.help, allow_abbrev=False
        )
        command.arguments(one)
        one.set_defaults(command=command)
    return parser


def _versions() -> str:
    python = ".".join(map(str, sys.version_info[:3]))
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return f"fxtrain {__version__} (torch {torch}, Python {python})"
