"""`fxtrain launch`: a script or module on several ranks of this machine."""

import argparse
import importlib
import sys

import attrs

from fxtrain.cli._command import Command
from fxtrain.launch import LaunchSpec, check_target, describe, run

__all__ = ["LAUNCH", "spec_of"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "fxtrain launch [--ranks N] [--restarts N] (SCRIPT | -m MODULE) [ARGS ...]"
    parser.add_argument(
        "--ranks",
        "-n",
        type=int,
        metavar="N",
        help="processes to start; one per accelerator by default, or one without any",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="times to start all ranks again after one has failed (default: 0)",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="what follows is a module, not a script"
    )
    # One argument takes all that follows; two of them would lose a `--` of the program's.
    parser.add_argument(
        "program",
        nargs=argparse.PARSER,
        metavar="SCRIPT",
        help="the program, and then its own arguments",
    )


def spec_of(options: argparse.Namespace) -> LaunchSpec:
    """The spec that parsed arguments describe.

    Raises:
        LaunchError: a number is out of range, or the program is not there.
    """
    target, *args = options.program
    spec = LaunchSpec(
        target=target,
        args=args,
        ranks=1 if options.ranks is None else options.ranks,
        module=options.module,
        restarts=options.restarts,
    )
    check_target(spec)  # before torch is loaded to count accelerators
    return spec


def _run(options: argparse.Namespace) -> int:
    spec = spec_of(options)
    if options.ranks is None:
        accelerators = importlib.import_module("torch").accelerator.device_count()
        spec = attrs.evolve(spec, ranks=max(1, accelerators))
    ending = run(spec)
    if ending.code:
        sys.stderr.write(f"fxtrain launch: {describe(ending)}\n")
    return ending.code


LAUNCH = Command(
    name="launch",
    help="run a script or module on several ranks of this machine",
    arguments=_arguments,
    run=_run,
)
