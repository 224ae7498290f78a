"""Records whose fields check themselves: a wrong value is a PlanError that says what fits."""

import math
import types
from collections.abc import Callable
from typing import Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin

import attrs

from fxtrain._errors import PlanError

__all__ = ["record"]

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(attrs.field,))
def record(cls: type[T]) -> type[T]:
    """A frozen keyword-only attrs class whose annotations are checked at construction.

    Checked are bool, int, float (an int becomes one), str, Literal, tuples of one type (a
    list becomes one), other records, and unions with None; Any is not checked.
    """
    return attrs.frozen(kw_only=True, field_transformer=_checked)(cls)


def _checked(cls: type, fields: list["attrs.Attribute[Any]"]) -> list["attrs.Attribute[Any]"]:
    return [_with_check(cls.__name__, field) for field in fields]


def _with_check(owner: str, field: "attrs.Attribute[Any]") -> "attrs.Attribute[Any]":
    kinds = _members(field.type)
    converter = field.converter
    if converter is None and float in kinds:
        converter = _to_float
    elif converter is None and any(get_origin(kind) is tuple for kind in kinds):
        converter = _to_tuple
    fits, wanted = _test(kinds), _words(kinds)
    also = field.validator

    def validate(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if not fits(value):
            raise PlanError(f"{owner}({attribute.name}={value!r}): choose {wanted}.")
        if also is not None:
            try:
                also(instance, attribute, value)
            except (ValueError, TypeError) as error:
                if isinstance(error, PlanError):
                    raise
                reason = str(error.args[0]) if error.args else str(error)
                raise PlanError(f"{owner}({attribute.name}={value!r}): {reason}.") from None

    return field.evolve(converter=converter, validator=validate)


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _test(kinds: tuple[Any, ...]) -> Callable[[Any], bool]:
    tests = [_one(kind) for kind in kinds]
    return tests[0] if len(tests) == 1 else lambda value: any(test(value) for test in tests)


def _one(kind: Any) -> Callable[[Any], bool]:
    if kind is Any or kind is None:
        return lambda value: True
    if kind is type(None):
        return lambda value: value is None
    if kind is float:
        return lambda value: type(value) is float and math.isfinite(value)
    if kind in (bool, int, str):
        return lambda value: type(value) is kind
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return lambda value: type(value) is str and value in choices
    if get_origin(kind) is tuple:
        inner = _one(get_args(kind)[0])
        return lambda value: type(value) is tuple and all(inner(one) for one in value)
    return lambda value: isinstance(value, kind)


def _words(kinds: tuple[Any, ...]) -> str:
    return " or ".join(_word(kind) for kind in kinds)


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return f"a tuple of {get_args(kind)[0].__name__}"
    if kind is type(None):
        return "None"
    if kind is float:
        return "a finite number"
    names = {bool: "True or False", int: "a whole number", str: "a string"}
    return names.get(kind, f"an fx.{getattr(kind, '__name__', kind)}(...)")


def _to_float(value: Any) -> Any:
    return float(value) if type(value) is int else value


def _to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
