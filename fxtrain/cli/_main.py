"""`fxtrain`: arguments to records to calls. Imports torch only once a command needs it."""

import argparse
import sys
from collections.abc import Sequence

from fxtrain import __version__
from fxtrain._errors import FxError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    A mistake of the user is one message and exit code 2; a rank that failed gives its own.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 2
    try:
        return options.run(options)
    except FxError as error:
        sys.stderr.write(f"fxtrain: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fxtrain", description="Run PyTorch training scripts.")
    parser.add_argument("--version", action="version", version=f"fxtrain {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    _add_launch(commands)
    return parser


def _add_launch(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    sub = commands.add_parser("launch", help="run a script on several ranks of this machine")
    sub.add_argument("--ranks", type=_positive, default=1, help="processes to start (default 1)")
    sub.add_argument(
        "--restarts", type=int, default=0, help="start all ranks anew so often after a failure"
    )
    sub.add_argument("-m", dest="is_module", action="store_true", help="the target is a module")
    sub.add_argument("target", help="script or module")
    sub.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    sub.set_defaults(run=_launch)


def _launch(options: argparse.Namespace) -> int:
    from fxtrain.launch import LaunchSpec, run_script

    spec = LaunchSpec(
        target=options.target,
        args=tuple(options.args),
        ranks=options.ranks,
        is_module=options.is_module,
        restarts=options.restarts,
    )
    return run_script(spec)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
