"""Output of commands: tables and lines for people, JSON for programs; exit codes."""

import enum
import json
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType

from fxtrain._reading import path_problem
from fxtrain.errors import escape_unprintable

F = TypeVar("F", bound=Callable[..., Any])
COUNT = click.IntRange(min=1)
NOT_NEGATIVE = click.IntRange(min=0)
POSITIVE = click.FloatRange(min=0, min_open=True)
# Width of a table in a file or a pipe, which have none.
_PAGE = 120
_JSON = "fxtrain.json"  # whether --json was passed, in click's context


class Words(click.ParamType):
    """Texts, or values of another type, separated by commas."""

    name = "words"

    def __init__(self, kind: click.ParamType = click.STRING) -> None:
        self._kind = kind

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[Any]:
        words = (word.strip() for word in value.split(","))
        return [self._kind.convert(word, param, ctx) for word in words if word]


class FilePath(click.Path):
    """Path of a file, which need not exist; text that is no path is a usage error."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        if value and (problem := path_problem(value)):
            self.fail(f"{problem}.", param, ctx)
        return super().convert(value, param, ctx)


class _Pair(click.ParamType):
    """NAME=VALUE."""

    name = "pair"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        name, equals, text = value.partition("=")
        if not equals:
            self.fail(f"{value!r} is not of the form NAME=VALUE.", param, ctx)
        return name, text


PAIR = _Pair()


def as_json(command: F) -> F:
    """The option --json, which `report` looks at."""

    def note(ctx: click.Context, _: click.Parameter, asked: bool) -> None:  # noqa: FBT001
        ctx.meta[_JSON] = asked

    text = "print JSON on standard output"
    return click.option(
        "--json", is_flag=True, expose_value=False, is_eager=True, callback=note, help=text
    )(command)


def option(
    flags: str, help: str, kind: Any = None, metavar: str | None = None, **more: Any
) -> Callable[[F], F]:
    """An option of a command: flags between spaces, its help, the type and name of its value.

    A default is part of the help.
    """
    more.setdefault("show_default", bool(more.get("default")))
    return click.option(*flags.split(), help=help, type=kind, metavar=metavar, **more)


def json_asked() -> bool:
    """Whether --json was passed to the command."""
    return click.get_current_context().meta[_JSON]


def report(data: Any, shown: str | RenderableType | Callable[[], None]) -> None:
    """Print what a command found: after --json plain data, otherwise what a person reads.

    That is text, what rich lays out, or a function that prints it.
    """
    if json_asked():
        click.echo(json.dumps(data, indent=2))
    elif callable(shown):
        shown()
    elif isinstance(shown, str):
        print_text(shown)
    else:
        print_renderable(shown)


def print_renderable(table: RenderableType) -> None:
    """Print what rich lays out, in color on a terminal only."""
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else _PAGE
    console = Console(file=sys.stdout, width=width, highlight=False)
    with console.capture() as printed:
        console.print(table)
    # Without trailing blanks, which would be copied along.
    click.echo("\n".join(line.rstrip() for line in printed.get().splitlines()))


def print_text(text: str) -> None:
    """Print lines on standard output; control characters are escaped."""
    click.echo(escape_unprintable(text))


def warn(text: str) -> None:
    """Print a line on standard error, separate from JSON."""
    click.echo(escape_unprintable(text), err=True)


class Exit(enum.IntEnum):
    """The exit code of `fxtrain`.

    `fxtrain launch` exits with the code of the rank that failed first, and with 128 + n when
    signal n ended that rank or the launcher.

    Attributes:
        WELL: The command succeeded.
        FOUND: The command completed, and what it checked has problems: a rank failed, a test did
            not pass, a file contains errors.
        WRONG: Arguments, settings or files are invalid or cannot be read or written, or a package
            is missing.
        INTERRUPTED: Ctrl-C, or the user aborted a question.
    """

    WELL = 0
    FOUND = 1
    WRONG = 2
    INTERRUPTED = 130
