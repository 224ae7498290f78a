"""Records that validate their fields: a wrong value is an error that names the valid ones."""

import functools
import math
import re
import reprlib
import types
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin

import attrs

from fxtrain._display import Displayed
from fxtrain._other_names import closest, field_hint, value_hint
from fxtrain.errors import FxError, PlanError

T = TypeVar("T")
# Metadata of a field that names classes, modules or tensors of the user's model, or its files.
OF_MODEL = types.MappingProxyType({"of_model": True})
_Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]
_INT64 = range(-(1 << 63), 1 << 63)
_MAX_SHOWN = 200  # characters of a value
_MAX_LINES = 20  # lines of a message: an unrelated file may have any number of problems
_MAX_LINE_LENGTH = 1000  # characters
# Half a surrogate pair, which no word of a command line can contain.
_HALF_PAIRS = re.compile("[\ud800-\udc7f\udd00-\udfff]")
_EXACT_FLOATS = range(-(1 << 53), (1 << 53) + 1)  # integers that a float represents exactly


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(attrs.field,))
def record(cls: type[T], *, error: type[FxError] = PlanError) -> type[T]:
    """A frozen keyword-only attrs class whose annotations are checked at construction.

    Checked types are bool, int (of 64 bits), float (finite; an int is converted), str, Literal,
    tuples of one type (a list is converted), other records, and unions of these with None. Any
    and protocols are not checked. A field's validator is called with values of the right type that
    are not None, without the instance; it raises a ValueError that says what to choose. Fields
    that depend on each other are checked in `__attrs_post_init__`. `choose` in the metadata of a
    field replaces the description of its type in messages. A field that is not in the `repr` may
    be a secret, so its value is never in a message. Messages name the class, or its `OWNER`.
    """
    owner = cls.__dict__.get("OWNER", cls.__name__)

    def validate(_: Any, field: "attrs.Attribute[Any]", value: Any) -> None:
        try:
            check_field(field, value)
        except ValueError as problem:
            text = shown(value) if field.repr else "..."
            raise error(f"{owner}({field.name}={text}): {problem}") from None

    def checked(_: type, fields: list["attrs.Attribute[Any]"]) -> list["attrs.Attribute[Any]"]:
        return [
            field.evolve(
                converter=field.converter or canonical(field.type),
                validator=validate,
                metadata={**field.metadata, "validator": field.validator},
            )
            for field in fields
        ]

    frozen: Any = attrs.frozen(kw_only=True, field_transformer=checked, repr=False)(cls)
    for name in ("__repr__", "__rich_repr__", "_repr_html_"):
        if name not in cls.__dict__:
            setattr(frozen, name, getattr(Displayed, name))
    frozen.__init__ = _with_hints(frozen)
    return frozen


def _with_hints(cls: Any) -> Callable[..., None]:
    """The constructor of a record, whose error of an unknown argument says what to use instead."""
    init = cls.__init__
    known = [field.alias for field in attrs.fields(cls) if field.init]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in known:
                hint = field_hint(cls.__name__, name, known) or closest(name, known)
                raise TypeError(
                    f"{cls.__name__}() got an unexpected keyword argument {name!r}.{hint}"
                )
        init(self, *args, **values)

    return checked


def check_field(field: "attrs.Attribute[Any]", value: Any) -> None:
    """Refuse a value that does not fit a field, with a ValueError that says what to choose instead.

    Needs no instance, so it also checks files.
    """
    if not _fits(field.type, value):
        literals = [member for member in members(field.type) if get_origin(member) is Literal]
        choices = [str(choice) for member in literals for choice in get_args(member)]
        hint = value_hint(field.name, value) or closest(value, choices)
        raise ValueError(f"choose {field.metadata.get('choose') or type_words(field.type)}.{hint}")
    own: _Validator | None = field.metadata.get("validator")
    if own is not None and value is not None:
        own(None, field, value)


def at_least(low: float, most: float = math.inf) -> _Validator:
    """A validator for numbers in a closed range."""
    words = f"of at least {low}" if most == math.inf else f"from {low} to {most}"
    return _number(lambda value: low <= value <= most, words)


def above(low: float) -> _Validator:
    """A validator for numbers above this one."""
    return _number(lambda value: value > low, f"above {low}")


def between(low: float, high: float) -> _Validator:
    """A validator for numbers in an open range."""
    return _number(lambda value: low < value < high, f"above {low} and below {high}")


def at_least_and_below(low: float, high: float) -> _Validator:
    """A validator for numbers in a half-open range."""
    return _number(lambda value: low <= value < high, f"of at least {low} and below {high}")


def _number(is_valid: Callable[[float], bool], words: str) -> _Validator:
    def validate(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if not is_valid(value):
            raise ValueError(f"choose a number {words}.")

    return validate


def members(kind: Any) -> tuple[Any, ...]:
    """The types of a union; any other type as the only one."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def canonical(kind: Any) -> Callable[[Any], Any] | None:
    """A converter that makes equal values of an annotation identical; None if not needed.

    For a float an int is converted, for a tuple a list; other values are unchanged.
    """
    kinds = members(kind)
    is_float = float in kinds and int not in kinds
    needed = is_float or any(get_origin(member) is tuple for member in kinds)
    return functools.partial(_canonical_value, kind) if needed else None


def _canonical_value(kind: Any, value: Any) -> Any:
    kinds = members(kind)
    items = next((get_args(member) for member in kinds if get_origin(member) is tuple), None)
    if items is not None and isinstance(value, list | tuple):
        items = _items(items, len(value))
        same_length = len(items) == len(value)
        return tuple(map(_canonical_value, items, value)) if same_length else tuple(value)
    if float not in kinds or int in kinds:
        return value
    if type(value) is int and value in _EXACT_FLOATS:
        return float(value)
    return value + 0.0 if type(value) is float else value  # turns -0.0 into 0.0, its equal


def _items(kinds: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    """The types of the items of a tuple of this length, from its annotation."""
    return kinds[:1] * length if kinds[1:] == (...,) else kinds


def shown(value: object) -> str:
    """A value for a message, truncated: values in a file may be large, or contain themselves."""
    text = _SHORT.repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def few(lines: Iterable[str]) -> list[str]:
    """Problems for one message: each once and truncated, and the number of further ones."""
    problems = list(dict.fromkeys(lines))
    more = (
        [f"and {len(problems) - _MAX_LINES} more problems."] if len(problems) > _MAX_LINES else []
    )
    cut = [
        line if len(line) <= _MAX_LINE_LENGTH else f"{line[:_MAX_LINE_LENGTH]}..."
        for line in problems[:_MAX_LINES]
    ]
    return cut + more


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write numbers of several thousand digits.
        return str(x) if x in _INT64 else f"<a number of {x.bit_length()} bits, more than 64>"


_SHORT = _Short()


def _fits(kind: Any, value: Any) -> bool:
    """Whether a value is exactly of an annotated type, finite, and of 64 bits if it is an int."""
    if kind is None or kind is Any or getattr(kind, "_is_protocol", False):
        return True
    kinds, origin = members(kind), get_origin(kind)
    if len(kinds) > 1:
        return any(_fits(member, value) for member in kinds)
    if origin is Literal:
        return any(type(value) is type(member) and value == member for member in get_args(kind))
    if origin is tuple:
        items = _items(get_args(kind), len(value)) if type(value) is tuple else None
        return items is not None and len(items) == len(value) and all(map(_fits, items, value))
    if kind is int:
        return type(value) is int and value in _INT64
    if kind is float:
        return type(value) is float and math.isfinite(value)
    if kind is str:
        return type(value) is str and not _HALF_PAIRS.search(value)
    return type(value) is kind if kind in _WORDS else isinstance(value, origin or kind)


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a string",
    type(None): "None",
}


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        choices = [repr(choice) for choice in get_args(kind)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if get_origin(kind) is tuple:
        words = [type_words(item) for item in get_args(kind) if item is not ...]
        return f"a list or tuple, {'each ' if ... in get_args(kind) else ''}{', '.join(words)}"
    if kind in _WORDS:
        return _WORDS[kind]
    name = getattr(kind, "__name__", str(kind))
    own = getattr(kind, "__module__", "").startswith("fxtrain.")
    return f"an fx.{name}(...)" if own else f"a {name}"


def type_words(kind: Any) -> str:
    """A description of the values of an annotation."""
    return " or ".join(map(_type_name, members(kind)))
