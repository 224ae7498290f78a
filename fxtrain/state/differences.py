"""Compares two records field by field."""

from collections.abc import Iterator
from typing import Any

import attrs

from fxtrain.errors import PlanError


@attrs.frozen
class Change:
    """One field in which two records differ.

    Attributes:
        path: Path of the field, such as `strategy.hook.name` or `units[model.norm].device`.
        left: The value in the first record; None where it has no such field.
        right: The value in the second.
    """

    path: str
    left: object
    right: object


def diff(left: object, right: object) -> tuple[Change, ...]:
    """The fields in which two records differ, by path, in the order of the fields.

    Two strategies of different kind differ in `kind` and in the fields that only one has. Records
    in a tuple are compared by name, such as `units[model.norm].device`, or by number.

    Raises:
        PlanError: they are not records, or not of the same kind of record.

    Example:
        >>> import fxtrain as fx
        >>> fx.diff(fx.Plan(), fx.Plan(clip_norm=1.0))
        (Change(path='clip_norm', left=None, right=1.0),)
    """
    if not _comparable(left, right):
        raise PlanError(
            f"diff compares two records of one kind, such as two plans; found a "
            f"{type(left).__name__} and a {type(right).__name__}."
        )
    return tuple(_changes("", left, right))


def _changes(path: str, left: Any, right: Any) -> Iterator[Change]:
    if _rows(left) and _rows(right):
        before, after = _keyed(left), _keyed(right)
        for key in {**before, **after}:
            yield from _changes(f"{path}[{key}]", before.get(key), after.get(key))
        return
    if not _comparable(left, right):
        if type(left) is not type(right) or left != right:
            yield Change(path, left, right)
        return
    before, after = _fields(left), _fields(right)
    found = False
    for name in {**before, **after}:
        where = f"{path}.{name}" if path else name
        for change in _changes(where, before.get(name), after.get(name)):
            found = True
            yield change
    if not found and left != right:  # two types with equal fields
        yield Change(path, left, right)


def _rows(value: Any) -> bool:
    """Whether a value is a tuple of records."""
    return isinstance(value, tuple) and bool(value) and all(attrs.has(type(one)) for one in value)


def _keyed(rows: tuple[Any, ...]) -> dict[Any, Any]:
    """Records by name, or by number where they have no names of their own."""
    names = [getattr(row, "name", None) for row in rows]
    own = all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    return dict(zip(names if own else range(len(rows)), rows, strict=True))


def _comparable(left: Any, right: Any) -> bool:
    if not (attrs.has(type(left)) and attrs.has(type(right))):
        return False
    return type(left) is type(right) or (hasattr(left, "kind") and hasattr(right, "kind"))


def _fields(record: Any) -> dict[str, Any]:
    kind = type(record)
    return {field.name: getattr(record, field.name) for field in attrs.fields(kind) if field.eq}
