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
    if not _of_one_kind(left, right):
        raise PlanError(
            f"diff compares two records of one kind, such as two plans; found a "
            f"{type(left).__name__} and a {type(right).__name__}."
        )
    return tuple(_changes("", left, right))


def _of_one_kind(left: Any, right: Any) -> bool:
    """Whether two values are records of one type, or configs of one field."""
    if not (attrs.has(type(left)) and attrs.has(type(right))):
        return False
    return type(left) is type(right) or (hasattr(left, "kind") and hasattr(right, "kind"))


def _changes(path: str, left: Any, right: Any) -> Iterator[Change]:
    both_rows = isinstance(left, tuple) and isinstance(right, tuple)
    if _of_one_kind(left, right) or (both_rows and _keyed(left) and _keyed(right)):
        before, after = (_keyed(value) if both_rows else _fields(value) for value in (left, right))
        for key in {**before, **after}:
            yield from _changes((path + key).lstrip("."), before.get(key), after.get(key))
    elif type(left) is not type(right) or left != right:
        yield Change(path, left, right)


def _fields(record: Any) -> dict[str, Any]:
    fields = (field for field in attrs.fields(type(record)) if field.eq)
    return {f".{field.name}": getattr(record, field.name) for field in fields}


def _keyed(rows: tuple[Any, ...]) -> dict[str, Any]:
    """Records by name, or by number where they have no names of their own; empty for others."""
    if not all(attrs.has(type(row)) for row in rows):
        return {}
    names = [getattr(row, "name", None) for row in rows]
    named = all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    keys = names if named else range(len(rows))
    return {f"[{key}]": row for key, row in zip(keys, rows, strict=True)}
