"""Merges plain data, and lists the paths of its leaves."""

from collections.abc import Iterator, Mapping
from typing import Any

from fxtrain._record import closest

__all__ = ["leaves", "merge", "near", "put"]


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two tables; where both have a value, `above` wins.

    Nested tables are merged key by key, unless their kinds differ: the options of one strategy do
    not apply to another.

    Example:
        >>> from fxtrain.launch.config import merge
        >>> merge({"a": {"x": 1}, "b": 2}, {"a": {"y": 3}})
        {'a': {'x': 1, 'y': 3}, 'b': 2}
    """
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping) and _of_one(under, value):
            merged[key] = merge(under, value)
        else:
            merged[key] = value
    return merged


def _of_one(below: Mapping[str, Any], above: Mapping[str, Any]) -> bool:
    return above.get("kind", below.get("kind")) == below.get("kind")


def put(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Data with a value at a dotted path.

    Example:
        >>> from fxtrain.launch.config import put
        >>> put({"a": {"b": 1}}, "a.c", 2)
        {'a': {'b': 1, 'c': 2}}
    """
    head, _, rest = path.partition(".")
    if not rest:
        return {**data, head: value}
    under = data.get(head)
    return {**data, head: put(dict(under) if isinstance(under, Mapping) else {}, rest, value)}


def leaves(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not a table, with its dotted path; an empty table is a value."""
    if not isinstance(data, Mapping) or (prefix and not data):
        yield prefix, data
        return
    for key, value in data.items():
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))


def near(name: Any, known: tuple[str, ...] | list[str]) -> str:
    """A question about a similar name, or nothing."""
    close = closest(name, known).strip()
    return f" (d{close[1:]})" if close else ""
