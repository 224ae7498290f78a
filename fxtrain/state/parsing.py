"""Parses JSON, TOML and YAML into plain data: one strict reader of each for every file."""

import json
import math
import tomllib
from collections.abc import Callable
from typing import Any, Literal, NoReturn

from fxtrain._errors import PlanError
from fxtrain._record import shown
from fxtrain.state.yaml_reader import parse_yaml

__all__ = ["Format", "parse_json", "parse_text", "unique_keys"]

Format = Literal["json", "toml", "yaml"]
_MAX_REASON_LENGTH = 500  # characters of a parser's message


def parse_text(text: str, format: Format) -> Any:
    """Plain data from the text of a settings file.

    Raises:
        PlanError: the text is invalid in that format.
        MissingPackageError: YAML needs pyyaml (the extra `files`).

    Example:
        >>> from fxtrain.state import parse_text
        >>> parse_text("ranks: 2", "yaml")
        {'ranks': 2}
    """
    if format not in _FORMATS:
        raise PlanError(f"format={format!r}: choose one of {', '.join(_FORMATS)}.", code="FX201")
    try:
        return _FORMATS[format](text)
    except RecursionError:
        raise PlanError(
            f"Invalid {format.upper()}: it is nested too deeply.", code="FX201"
        ) from None
    except ValueError as error:
        raise PlanError(
            f"Invalid {format.upper()}: {str(error)[:_MAX_REASON_LENGTH]}", code="FX201"
        ) from None


def parse_json(text: str | bytes) -> Any:
    """Plain data from JSON that every parser reads alike.

    Each key appears once in its table, numbers are finite, and text can be encoded as UTF-8.

    Raises:
        ValueError: it is not, or it is nested too deeply.

    Example:
        >>> from fxtrain.state import parse_json
        >>> parse_json('{"a": 1e999}')
        Traceback (most recent call last):
        ValueError: 1e999 is not a finite number.
    """
    text = text if isinstance(text, str) else text.decode()
    try:
        data = json.loads(
            text, object_pairs_hook=unique_keys, parse_float=_finite, parse_constant=_no_number
        )
        if "\\ud" in text or "\\uD" in text:  # may be half a surrogate pair
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return data


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for `json.loads(object_pairs_hook=...)`; each key once.

    Raises:
        ValueError: a key appears twice.
    """
    table = dict(pairs)
    if len(table) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {shown(twice)} appears twice in one table.")
    return table


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word[:80]} is not a finite number.")
    return value


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number.")


_FORMATS: dict[str, Callable[[str], Any]] = {
    "json": parse_json,
    "toml": tomllib.loads,
    "yaml": parse_yaml,
}
