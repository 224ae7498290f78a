"""Records of launches: fields that check themselves, and reading them from words.

`fxtrain.state` has records that do the same for plans, but it loads torch, for which
`fxtrain launch` need not wait before it has looked at its arguments.
"""

import sys
import types
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin

import attrs

from fxtrain._errors import LaunchError

__all__ = [
    "LONGEST_S",
    "at_least",
    "check_seconds",
    "each",
    "launch_record",
    "name_values",
    "nearest",
    "options_from",
    "shortened",
    "shown_value",
]

T = TypeVar("T")
LONGEST_S = 1e6  # of timeouts: systems count milliseconds in 31 bits
_LARGEST = 2**31  # what the system takes for numbers of processes, ports and seconds
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
                    f"{type(instance).__name__}({attribute.name}): found {shown_value(one)}, "
                    f"where {expected} was expected."
                )

    return check


def check_seconds(value: Any, *, said: str) -> None:
    """Refuse what is not a time to wait; None passes.

    Raises:
        LaunchError: it is not a number above 0, or more than a system can wait.
    """
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= LONGEST_S:
        raise LaunchError(
            f"{said}={shown_value(value)}): a timeout is a number of seconds > 0, at most "
            f"{LONGEST_S:.0f}. Use None for no limit, where that is allowed."
        )


def shown_value(value: Any) -> str:
    """A value as a message shows it, whatever it is.

    Example:
        >>> from fxtrain.launch.fields import shown_value
        >>> shown_value("a"), shown_value(10**5000)
        ("'a'", 'a number of more than 4300 digits')
    """
    try:
        return shortened(repr(value))
    except ValueError:  # Python writes no longer ones
        return f"a number of more than {sys.get_int_max_str_digits()} digits"


def shortened(text: str, most: int = 100) -> str:
    """A text as a message shows it: without its middle where it is long.

    Example:
        >>> from fxtrain.launch.fields import shortened
        >>> shortened("1234567890", 6)
        '123...890'
    """
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2) :]}"


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
        except (ValueError, OverflowError):
            raise LaunchError(f"{shortened(said)}: choose {_NAMES[kind]}.") from None
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
            raise LaunchError(
                f"{owner}({attribute.name}={shown_value(value)}): choose {wanted}.{close}"
            )
        if also is not None:
            also(instance, attribute, value)

    return field.evolve(converter=converter, validator=validate)


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if kind is float:
        return type(value) is float and abs(value) <= _LARGEST
    if kind is int:
        return type(value) is int and abs(value) < _LARGEST
    if get_origin(kind) is Literal:
        return type(value) is str and value in get_args(kind)
    if get_origin(kind) is tuple:
        return type(value) is tuple and all(_fits(one, get_args(kind)[0]) for one in value)
    return type(value) is kind


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return f"several of {_NAMES[get_args(kind)[0]]}"
    return "None" if kind is type(None) else _NAMES.get(kind, str(kind))


def _to_float(value: Any) -> Any:
    return float(value) if type(value) is int and abs(value) < _LARGEST else value


def _to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
