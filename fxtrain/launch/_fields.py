"""Records of launches: fields that check themselves, and reading them from words.

`fxtrain.state` has records that do the same for plans, but it loads torch, for which
`fxtrain launch` need not wait before it has looked at its arguments.
"""

import math
import types
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin

import attrs

from fxtrain._errors import LaunchError

__all__ = ["at_least", "each", "launch_record", "name_values", "nearest", "options_from"]

T = TypeVar("T")
_NAMES = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}
_WORDS = {"true": True, "yes": True, "false": False, "no": False}


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(attrs.field,))
def launch_record(cls: type[T]) -> type[T]:
    """A frozen keyword-only attrs class whose fields are checked at construction.

    Checked are bool, int, float (an int becomes one), str, Literal, tuples of str or int (any
    sequence but a string becomes one), and unions with None; Any is not checked.
    """
    return attrs.frozen(kw_only=True, field_transformer=_checked)(cls)


def at_least(least: float) -> Callable[[Any, Any, Any], None]:
    """A validator for numbers; None passes."""

    def check(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if value is not None and not value >= least:
            raise LaunchError(
                f"{type(instance).__name__}({attribute.name}={value!r}): choose {least} or more."
            )

    return check


def each(fits: Callable[[str], object], *, expected: str) -> Callable[[Any, Any, Any], None]:
    """A validator for each of several strings, or for one that is not empty."""

    def check(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        for one in (value,) if isinstance(value, str) else value:
            if one and not fits(one):
                raise LaunchError(
                    f"{type(instance).__name__}({attribute.name}): found {one!r}, "
                    f"where {expected} was expected."
                )

    return check


def nearest(name: str, known: tuple[str, ...]) -> str:
    """A sentence that guesses what was meant, or nothing."""
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def name_values(pairs: tuple[str, ...]) -> dict[str, str]:
    """Variables of the form NAME=VALUE, by name."""
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def options_from(kind: type | None, given: Mapping[str, Any], *, launcher: str) -> Any:
    """Turn words of a command line, or values of a file, into a launcher's own options.

    Args:
        kind: The record, or None for a launcher that has no options.
        given: By name; a text is read as the option's type.
        launcher: Its name, for messages.

    Raises:
        LaunchError: an option that the launcher does not have, or a value that does not fit.
    """
    types_of = {} if kind is None else {field.name: field.type for field in attrs.fields(kind)}
    for name in given:
        if name not in types_of:
            raise LaunchError(
                f"The launcher {launcher} has no option {name!r}."
                f"{nearest(name, tuple(types_of))} It has: {', '.join(types_of) or 'none'}."
            )
    read = {
        name: _read(value, types_of[name], said=f"{launcher}: {name}={value!r}")
        if isinstance(value, str)
        else value
        for name, value in given.items()
    }
    return None if kind is None else kind(**read)


def _read(text: str, annotation: Any, *, said: str) -> Any:
    kind = _members(annotation)[0]
    if kind is bool:
        if text.lower() not in _WORDS:
            raise LaunchError(f"{said}: choose true or false.")
        return _WORDS[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise LaunchError(f"{said}: choose {_NAMES[kind]}.") from None
    return (text,) if get_origin(kind) is tuple else text


def _checked(cls: type, fields: list["attrs.Attribute[Any]"]) -> list["attrs.Attribute[Any]"]:
    return [_with_check(cls.__name__, field) for field in fields]


def _with_check(owner: str, field: "attrs.Attribute[Any]") -> "attrs.Attribute[Any]":
    kinds = _members(field.type)
    also = field.validator
    converter = field.converter
    if converter is None and any(get_origin(kind) is tuple for kind in kinds):
        converter = _to_tuple
    elif converter is None and float in kinds:
        converter = _to_float

    def validate(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if not any(_fits(value, kind) for kind in kinds):
            wanted = " or ".join(_word(kind) for kind in kinds)
            close = nearest(value, get_args(kinds[0])) if isinstance(value, str) else ""
            raise LaunchError(f"{owner}({attribute.name}={value!r}): choose {wanted}.{close}")
        if also is not None:
            also(instance, attribute, value)

    return field.evolve(converter=converter, validator=validate)


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if kind is float:
        return type(value) is float and math.isfinite(value)
    if get_origin(kind) is Literal:
        return type(value) is str and value in get_args(kind)
    if get_origin(kind) is tuple:
        return type(value) is tuple and all(type(one) is get_args(kind)[0] for one in value)
    return type(value) is kind


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return f"several of {_NAMES[get_args(kind)[0]]}"
    return "None" if kind is type(None) else _NAMES.get(kind, str(kind))


def _to_float(value: Any) -> Any:
    return float(value) if type(value) is int else value


def _to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
