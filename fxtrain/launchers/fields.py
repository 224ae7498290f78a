"""Validators shared by launch records, and parsing options from words."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, dataclass_transform, get_origin

import attrs

from fxtrain._other_names import hint
from fxtrain._record import at_least, check_of, closest, members, record, shown
from fxtrain.errors import LaunchError

T = TypeVar("T")
LONGEST_S = 1_000_000  # maximum timeout: systems count milliseconds in 31 bits
_LARGEST = 2**31 - 1  # maximum of processes, ports and seconds
_SAID = {"true": True, "yes": True, "false": False, "no": False}


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(attrs.field,))
def launch_record(cls: type[T]) -> type[T]:
    """A record, like those of plans, whose invalid values are a LaunchError."""
    return record(cls, error=LaunchError)


def count(least: float) -> Callable[[Any, Any, Any], None]:
    """A validator for numbers from this minimum up to the system's maximum."""
    return at_least(least, _LARGEST)


def each(fits: Callable[[str], object], *, expected: str) -> Callable[[Any, Any, Any], None]:
    """A validator for each of several strings, or for one non-empty string."""

    def check(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        for text in (value,) if isinstance(value, str) else value:
            if text and not fits(text):
                raise ValueError(f"expected {expected}, found {shown(text)}.")

    return check


def check_seconds(value: Any, *, said: str) -> None:
    """Refuse an invalid timeout; None passes.

    Raises:
        LaunchError: it is not a number above 0, or more than a system can wait.
    """
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= LONGEST_S:
        raise LaunchError(
            f"{said}={shown(value)}): a timeout is a number of seconds > 0, at most "
            f"{LONGEST_S}. Use None for no limit, where that is allowed."
        )


def name_values(pairs: tuple[str, ...]) -> dict[str, str]:
    """Variables of the form NAME=VALUE, by name."""
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def options_from(kind: type | None, options: Mapping[str, Any], *, launcher: str) -> Any:
    """Convert words of a command line, or values of a file, into a launcher's own options.

    Args:
        kind: The record, or None for a launcher without options.
        options: By name; a string is parsed as the option's type.
        launcher: Its name, for messages.

    Raises:
        LaunchError: the launcher has no such option, or a value is invalid.
    """
    types_of = {} if kind is None else {field.name: field.type for field in attrs.fields(kind)}
    for name in options:
        if name not in types_of:
            raise LaunchError(
                f"The launcher {launcher} has no option {name!r}."
                f"{hint(name, at='command') or closest(name, types_of)} "
                f"It has: {', '.join(types_of) or 'none'}."
            )
    read = {
        name: _read(value, types_of[name], said=f"{launcher}: {name}={shown(value)}")
        if isinstance(value, str)
        else value
        for name, value in options.items()
    }
    return None if kind is None else kind(**read)


def _read(text: str, annotation: Any, *, said: str) -> Any:
    kind = members(annotation)[0]
    if kind not in (bool, int, float):
        return (text,) if get_origin(kind) is tuple else text
    try:
        return _SAID[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError, OverflowError):
        raise LaunchError(f"{said}: choose {check_of(kind, '').wanted}.") from None
