"""Tables and pictures that commands show."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from fxtrain._drawing import make_table
from fxtrain._optional import optional
from fxtrain._reading import write_file
from fxtrain.cli.output import option, print_renderable
from fxtrain.errors import PlanError

F = TypeVar("F", bound=Callable[..., Any])
PICTURES = (".svg", ".png", ".pdf")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, in color in a terminal only."""
    print_renderable(make_table(columns, rows))


def picture_option(flag: str, help: str) -> Callable[[F], F]:
    """An option for a picture, which is refused before anything runs if it cannot be drawn."""

    def check(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
        if path is not None:
            if Path(path).suffix not in PICTURES:
                kinds = ", ".join(PICTURES)
                raise PlanError(f"{flag} {path}: the name of a picture ends in {kinds}.")
            optional("matplotlib", extra="plots", needed_by=flag)
        return path

    return option(flag, f"{help}: {', '.join(PICTURES)}", metavar="FILE", callback=check)


def save_picture(figure: Any, path: str | Path) -> None:
    """Write a figure of matplotlib in the format of its suffix, completely or not at all."""
    data = io.BytesIO()
    figure.savefig(data, format=Path(path).suffix.removeprefix(".").lower())
    write_file(path, data.getvalue())
