"""`fxtrain profile`: where the time of a step went, from the file that `fx.profile` writes."""

import attrs
import click

from fxtrain.cli.exit_codes import Exit
from fxtrain.cli.output import as_json, print_json, print_renderable

__all__ = ["PROFILE"]


@click.command("profile")
@as_json
@click.argument("path")
def PROFILE(path: str, json_: bool) -> int:  # noqa: FBT001
    """Split the time of a step by rank, from the folder PATH of a profile."""
    from fxtrain.profiling import summary

    found = summary(path)
    if json_:
        print_json({"slowest": found.slowest, **attrs.asdict(found)})
    else:
        print_renderable(found)
    return Exit.WELL
