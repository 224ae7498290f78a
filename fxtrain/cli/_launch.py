"""`fxtrain launch`: a script or module on several ranks of this machine."""

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import attrs
import click
from click.shell_completion import CompletionItem

from fxtrain.launch import LaunchSpec, check_target, describe, run

__all__ = ["LAUNCH", "spec_of"]


def _files(ctx: click.Context, parameter: click.Parameter, start: str) -> list[CompletionItem]:
    return [CompletionItem(start, type="file")]


@click.command(
    "launch",
    options_metavar="[--ranks N] [--restarts N]",
    # All that follows the program is its own, whatever it looks like.
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--ranks",
    "-n",
    type=int,
    metavar="N",
    help="processes to start; one per accelerator by default, or one without any",
)
@click.option(
    "--restarts",
    type=int,
    default=0,
    metavar="N",
    help="times to start all ranks again after one has failed (default: 0)",
)
@click.option("-m", "module", is_flag=True, help="what follows is a module, not a script")
@click.argument(
    "program",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="(SCRIPT | -m MODULE) [ARGS ...]",
    shell_complete=_files,
)
def LAUNCH(**options: Any) -> int:
    """Run a script or module on several ranks of this machine."""
    spec = spec_of(options)
    if options["ranks"] is None:
        accelerators = importlib.import_module("torch").accelerator.device_count()
        spec = attrs.evolve(spec, ranks=max(1, accelerators))
    ending = run(spec)
    if ending.code:
        sys.stderr.write(f"fxtrain launch: {describe(ending)}\n")
    return ending.code


def spec_of(options: Mapping[str, Any]) -> LaunchSpec:
    """The spec that parsed arguments describe.

    Raises:
        LaunchError: a number is out of range, or the program is not there.
    """
    target, *args = options["program"]
    spec = LaunchSpec(
        target=target,
        args=tuple(args),
        ranks=1 if options["ranks"] is None else options["ranks"],
        module=options["module"],
        restarts=options["restarts"],
    )
    check_target(spec)  # before torch is loaded to count accelerators
    return spec
