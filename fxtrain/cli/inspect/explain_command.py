"""`fxtrain explain`: what the code at the end of an error means."""

import re
import textwrap

import click

from fxtrain import _errors
from fxtrain._error_codes import ERROR_CODES, ErrorCode
from fxtrain._other_names import closest
from fxtrain.cli.output import as_json, print_json, print_table, say

__all__ = ["EXPLAIN"]

_WIDTH = 80


@click.command("explain")
@click.argument("code", required=False)
@as_json
def EXPLAIN(code: str | None, json_: bool) -> None:  # noqa: FBT001
    """Explain the code at the end of an error: its cause and its cure.

    CODE is a code such as FX602, or a class such as CheckpointError. Without it, all codes are
    listed. The page of errors in the documentation has the same text.
    """
    found = ERROR_CODES if code is None else _codes_of(code)
    if json_:
        print_json([_as_dict(one) for one in found])
    elif code is None:
        print_table(("Code", "Error", "What happened"), [_row(one) for one in found])
    else:
        first, *finer = found
        say(_section(first))
        if finer:
            say(f"\nMore precise codes of {first.error}:\n")
            print_table(("Code", "What happened"), [(one.code, one.title) for one in finer])


def _codes_of(word: str) -> list[ErrorCode]:
    """The code that a word is; for a class or its code, those of its errors after it."""
    wanted = word.strip("[]., ").upper()
    for one in ERROR_CODES:
        if one.title and wanted in (one.code, one.code[2:]):
            return [one]
        if not one.title and wanted in (one.code, one.code[2:], one.error.upper()):
            return [one, *(two for two in ERROR_CODES if two.error == one.error and two.title)]
    raise click.BadParameter(
        f"{word}: no such code or class of errors.{_nearest(word)} `fxtrain explain` without a "
        f"code lists all.",
        param_hint="'CODE'",
    )


def _nearest(word: str) -> str:
    number = re.search(r"\d{1,9}", word)
    if number:
        near = min(ERROR_CODES, key=lambda one: abs(int(one.code[2:]) - int(number[0])))
        return f" The nearest is {near.code}: {_title(near)}."
    return closest(word, dict.fromkeys(one.error for one in ERROR_CODES))


def _title(one: ErrorCode) -> str:
    """What happened; for the code of a class, the first sentence of its docstring."""
    about: str = getattr(_errors, one.error).__doc__
    return one.title or about.partition("\n")[0].rstrip(".")


def _as_dict(one: ErrorCode) -> dict[str, str]:
    return {
        "code": one.code,
        "error": one.error,
        "title": _title(one),
        "see": one.see,
        "cause": one.cause,
        "cure": one.cure,
    }


def _row(one: ErrorCode) -> tuple[str, str, str]:
    return one.code, one.error, _title(one)


def _section(one: ErrorCode) -> str:
    parts = (("Cause", one.cause), ("Cure", one.cure))
    texts = [textwrap.fill(f"{name}: {text}", _WIDTH) for name, text in parts]
    if one.see:
        texts.append(f"See: {one.see} in the documentation")
    return "\n\n".join([f"{one.code} {one.error}: {_title(one)}", *texts])
