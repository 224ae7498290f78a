"""How records and sizes print: one line by default, more in rich terminals and notebooks."""

import contextlib
import html
import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from fxtrain.errors import PlanError

_MAX_ENTRIES = 6
_MAX_DEPTH = 3
_MAX_TUPLE = 12  # of a field
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is 1.

    Example:
        >>> from fxtrain._display import counted
        >>> counted(1, "rank"), counted(2, "rank"), counted(3, "batch")
        ('1 rank', '2 ranks', '3 batches')
    """
    ending = "es" if noun.endswith(("ch", "ss", "x")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"


class Displayed:
    """An attrs class that shows the fields that are not at their defaults, without tensors.

    It does so in its `repr`, unless it has one of its own, and below that in rich terminals and in
    notebooks.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={text}" for name, text in _changed_fields(self))
        return f"{type(self).__name__}({fields})"

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        if type(self).__repr__ is not Displayed.__repr__:
            yield "", _Words(repr(self))
        for name, text in _changed_fields(self):
            yield name, _Words(text)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align: left'>{html.escape(name)}</th>"
            f"<td style='text-align: left'>{html.escape(text)}</td></tr>"
            for name, text in _changed_fields(self)
        )
        return f"<table><caption>{html.escape(repr(self))}</caption>{rows}</table>"


class _Words(str):
    """A string that is shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _changed_fields(record: Any) -> Iterator[tuple[str, str]]:
    """Name and text of the fields that are not at their defaults."""
    for field in attrs.fields(type(record)):
        value: Any = getattr(record, field.name)
        default: Any = field.default
        if hasattr(default, "takes_self"):  # an attrs.Factory
            default = default.factory(record) if default.takes_self else default.factory()
        if not (field.repr and field.init) or (type(value) is type(default) and value == default):
            continue
        if callable(field.repr):
            text = str(field.repr(value))
        elif type(value) is tuple and len(value) > _MAX_TUPLE:
            text = f"({', '.join(map(repr, value[:3]))}, ... {len(value) - 3} more)"
        elif attrs.has(type(value)) or isinstance(value, str | tuple):
            text = repr(value)
        else:
            text = brief(value)
        yield field.alias, text


def brief(value: object, depth: int = 0) -> str:
    """A value in a few words: dtypes and shapes in place of the contents of tensors.

    Example:
        >>> import torch
        >>> from fxtrain._display import brief
        >>> brief({"x": torch.zeros(8, 3), "name": "a", "more": [1, torch.tensor(True)]})
        "{x: float32[8, 3], name: 'a', more: [1, bool[]]}"
    """
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        kind, shape = str(getattr(value, "dtype")), getattr(value, "shape")  # noqa: B009
        return f"{kind.removeprefix('torch.')}[{', '.join(map(str, shape))}]"
    if isinstance(value, Mapping) or type(value) in (list, tuple):
        return _container(value, depth)
    if value is None or isinstance(value, bool | int | float | str):
        return reprlib.repr(value)
    if type(value).__module__ == "torch":  # a device or a dtype
        return str(value)
    return getattr(type(value), "__name__", "object")


def number(value: object) -> str:
    """A number, or a tensor of one element, which is read; anything else as `brief` has it.

    A tensor without values, on the meta device or in a dry run, is described.

    Example:
        >>> import torch
        >>> from fxtrain._display import number
        >>> number(torch.tensor(0.25)), number(3), number(torch.zeros(2))
        ('0.25', '3', 'float32[2]')
    """
    if getattr(value, "shape", None) == () and type(value).__module__ in ("torch", "numpy"):
        with contextlib.suppress(RuntimeError):  # no values, or a device that has failed
            value = getattr(value, "item")()  # noqa: B009
    return f"{value:.4g}" if isinstance(value, float) else brief(value)


def _container(value: Any, depth: int) -> str:
    left, right = (
        ("{", "}") if isinstance(value, Mapping) else "[]" if type(value) is list else "()"
    )
    if depth == _MAX_DEPTH and value:
        return f"{left}...{right}"
    pairs = value.items() if isinstance(value, Mapping) else ((None, entry) for entry in value)
    shown = []
    for (key, entry), _ in zip(pairs, range(_MAX_ENTRIES), strict=False):
        shown.append(f"{'' if key is None else f'{key}: '}{brief(entry, depth + 1)}")
    more = len(value) - len(shown)
    return f"{left}{', '.join([*shown, *([f'{more} more'] if more else [])])}{right}"


def read_bytes(size: Any, asked: str = "device_memory") -> int | None:
    """Parse a number or text such as "80GB", "24GiB" or "1.5e10"; None stays None.

    Args:
        size: The size.
        asked: What the size is for, in messages.

    Raises:
        PlanError: the size is malformed.

    Example:
        >>> read_bytes("80GB"), read_bytes("24 GiB")
        (80000000000, 25769803776)
    """
    if size is None or (type(size) is int and size > 0):
        return size
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][0-9]+)?)\s*([KMGT]I?)?B?\s*", str(size), re.I)
    try:
        bytes_ = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    except (ValueError, OverflowError):  # 1.2.3, 1e999
        bytes_ = 0
    if bytes_ < 1 or type(size) is bool:
        raise PlanError(
            f'{asked}={size!r}: pass a number of bytes, or text such as "80GB" or "24GiB".'
        )
    return bytes_


def show_bytes(size: int) -> str:
    """Format a size with three or four digits, in decimal units.

    Example:
        >>> show_bytes(12), show_bytes(4_000_000), show_bytes(26_953_000_000)
        ('12 B', '4.00 MB', '27.0 GB')
    """
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            value = size / unit
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {name}"
    return f"{size} B"
