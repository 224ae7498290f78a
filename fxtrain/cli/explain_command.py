"""`fxtrain explain`: what the code at the end of an error means."""

import textwrap
from pathlib import Path
from typing import NamedTuple

import click

from fxtrain import errors
from fxtrain._other_names import closest
from fxtrain.cli.output import as_json, print_text, report
from fxtrain.cli.tables import print_table

_PAGE = Path(__file__).with_name("error_codes.md")
_WIDTH = 80


class ErrorCode(NamedTuple):
    """A section of `error_codes.md`.

    Attributes:
        code: FX and three digits.
        error: Class of the errors.
        title: What happened, in a few words; empty for the code of a class, which its errors have
            where no other code fits.
        see: Page of the documentation, with an anchor where only a section is about it; or empty.
        cause: Why such an error is raised.
        cure: What to do.
    """

    code: str
    error: str
    title: str
    see: str
    cause: str
    cure: str


def read_codes() -> list[ErrorCode]:
    """Every code of errors, from the page that explains them."""
    _, *sections = _PAGE.read_text(encoding="utf-8").split("\n## ")
    return [_read_section(section) for section in sections]


def _read_section(section: str) -> ErrorCode:
    heading, *paragraphs = section.strip().split("\n\n")
    name, _, title = heading.partition(": ")
    code, error = name.split()
    texts = dict(paragraph.replace("\n", " ").split(": ", 1) for paragraph in paragraphs)
    return ErrorCode(code, error, title, texts.get("See", ""), texts["Cause"], texts["Cure"])


@click.command("explain")
@click.argument("code", required=False)
@as_json
def EXPLAIN(code: str | None) -> None:
    """Explain the code at the end of an error: its cause and its cure.

    CODE is a code such as FX602, or a class such as CheckpointError. Without it, all codes are
    listed. The page of errors in the documentation has the same text.
    """
    codes = read_codes() if code is None else _codes_of(code)
    # For the code of a class, the first sentence of its docstring says what happened.
    codes = [each._replace(title=each.title or _about(each.error)) for each in codes]
    report([each._asdict() for each in codes], lambda: _print(codes, listed=code is None))


def _print(codes: list[ErrorCode], *, listed: bool) -> None:
    if listed:
        print_table(("Code", "Error", "What happened"), [each[:3] for each in codes])
        return
    first, *finer = codes
    print_text(_text(first))
    if finer:
        print_text(f"\nMore precise codes of {first.error}:\n")
        print_table(("Code", "What happened"), [(each.code, each.title) for each in finer])


def _codes_of(word: str) -> list[ErrorCode]:
    """The code that a word is; for a class or its code, those of its errors after it."""
    codes = read_codes()
    wanted = word.strip("[]., ").upper()
    for each in codes:
        if wanted in (each.code, each.code[2:]) or (
            not each.title and wanted == each.error.upper()
        ):
            of_class = [other for other in codes if other.error == each.error and other.title]
            return [each] if each.title else [each, *of_class]
    near = closest(word, [*(each.code for each in codes), *(each.error for each in codes)])
    raise click.BadParameter(
        f"{word}: no such code or class of errors.{near} `fxtrain explain` without a code lists "
        f"all.",
        param_hint="'CODE'",
    )


def _about(error: str) -> str:
    return getattr(errors, error).__doc__.partition("\n")[0].rstrip(".")


def _text(code: ErrorCode) -> str:
    parts = (("Cause", code.cause), ("Cure", code.cure))
    texts = [textwrap.fill(f"{name}: {text}", _WIDTH) for name, text in parts]
    if code.see:
        texts.append(f"See: {code.see} in the documentation")
    return "\n\n".join([f"{code.code} {code.error}: {code.title}", *texts])
