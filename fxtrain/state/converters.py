"""Records as plain data and back, strictly, without guesses or losses; and their differences."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_args, get_origin

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from fxtrain._other_names import hint, value_hint
from fxtrain._record import canonical, check_field, closest, few, members, shown
from fxtrain.errors import FxError, PlanError
from fxtrain.state.parsing import near
from fxtrain.state.registry import BUILT_IN, installed_configs, kind_of

T = TypeVar("T")
_Hook = Callable[[Any, Any], Any]
_WRONG = (FxError, ValueError, cattrs.BaseValidationError)


def unstructure(record: object) -> dict[str, Any]:
    """A record as dicts, lists, strings, numbers and None; other values are unchanged.

    Raises:
        PlanError: it is not a record.

    Example:
        >>> import fxtrain as fx
        >>> from fxtrain.state import unstructure
        >>> unstructure(fx.Position(epoch=2))["epoch"]
        2
    """
    if isinstance(record, type) or not attrs.has(type(record)):
        raise PlanError(f"unstructure takes a record, such as an fx.Plan; found {shown(record)}.")
    return converter_for().unstructure(record)


def structure(data: object, cls: type[T], configs: tuple[type, ...] | None = None) -> T:
    """A record from plain data.

    Args:
        data: Output of `unstructure`, or a part of it: missing fields take their defaults.
        cls: The type of the record.
        configs: Strategy configs beside fxtrain's own; by default those of installed packages.

    Raises:
        PlanError: one line per problem, each with its path: unknown keys with the closest
            known one, values of a wrong type, unknown choices.

    Example:
        >>> import fxtrain as fx
        >>> from fxtrain.state import structure
        >>> structure({"strategy": {"kind": "single"}, "accumulate": 2}, fx.Plan).accumulate
        2
        >>> structure({"even": "padd", "seed": "7"}, fx.Plan)
        Traceback (most recent call last):
        fxtrain.errors.PlanError: plan.even: found 'padd'; choose one of ... Did you mean 'pad'?
        plan.seed: found '7'; choose a whole number. [FX200]
    """
    converter = converter_for(installed_configs() if configs is None else configs)
    try:
        return converter.structure(data, cls)  # pyright: ignore[reportReturnType]
    except _WRONG as error:
        problems = cattrs.transform_error(error, cls.__name__.lower(), _describe)
    raise PlanError("\n".join(few(_lines(problems))))


def fingerprint(record: object) -> str:
    """A digest of all values of a record: equal for equal records, on every machine.

    Raises:
        PlanError: it is not a record, or contains a value that files do not support.

    Example:
        >>> import fxtrain as fx
        >>> fx.fingerprint(fx.Plan()) == fx.fingerprint(fx.Plan(accumulate=1))
        True
    """
    text = json.dumps(plain(record), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(f"{type(record).__name__}{text}".encode(), digest_size=16).hexdigest()


@functools.cache  # building one generates code; a converter is never changed afterwards
def converter_for(configs: tuple[type, ...] = ()) -> cattrs.Converter:
    """A strict converter that knows fxtrain's strategies and these configs, by their `kind`."""
    known: dict[str, type] = {}
    for config in (*BUILT_IN, *configs):
        kind = kind_of(config)
        if kind is None or known.setdefault(kind, config) is not config:
            raise PlanError(
                f"{config.__name__} cannot be distinguished from other strategy configs: it needs "
                f"a field `kind` whose default is a unique string; found {shown(kind)}."
            )
    converter = cattrs.Converter(
        forbid_extra_keys=True, use_alias=True, unstruct_collection_overrides={tuple: list}
    )
    converter.register_structure_hook_factory(
        attrs.has, lambda cls: _record_hook(cls, converter, known)
    )
    converter.register_unstructure_hook_factory(
        attrs.has, lambda cls: make_dict_unstructure_fn(cls, converter, kind=override(omit=False))
    )
    return converter


def plain(record: Any) -> dict[str, Any]:
    """Like `unstructure`, but a PlanError for values that files do not support."""
    data = unstructure(record)
    try:
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"{type(record).__name__} cannot be written ({shown(str(error))}): files support true, "
            f"false, finite numbers, text, None, tuples and records of these."
        ) from None
    return data


def _record_hook(cls: type, converter: cattrs.Converter, known: Mapping[str, type]) -> _Hook:
    fields = [field for field in attrs.fields(attrs.resolve_types(cls)) if field.init]
    overrides: dict[str, Any] = {
        field.name: override(struct_hook=_field_hook(field, converter, known)) for field in fields
    }
    build = make_dict_structure_fn(cls, converter, **overrides)
    tag, names = kind_of(cls), ", ".join(field.alias for field in fields)

    def structure_record(data: Any, _: Any) -> Any:
        if not isinstance(data, Mapping):
            raise ValueError(f"found {shown(data)}; choose a table of {names}.")
        if tag is not None and data.get("kind") == tag:
            data = {key: value for key, value in data.items() if key != "kind"}
        return build(data, cls)

    return structure_record


def _describe(error: BaseException, _: Any) -> str:
    """The problems of one place, a line each."""
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        return "\n".join(_unknown_key(key, error.cl) for key in sorted(error.extra_fields, key=str))
    return "is missing." if isinstance(error, KeyError) else str(error)


def _unknown_key(key: Any, cls: type) -> str:
    known = [field.alias for field in attrs.fields(cls) if field.init]
    if other := hint(key, at="file"):
        return f"unknown key {shown(key)}.{other}"
    return f"unknown key {shown(key)}{near(key, known)}; {cls.__name__} has {', '.join(known)}."


def _lines(problems: list[str]) -> Iterator[str]:
    """One line for each problem, after its path, which cattrs writes at the end."""
    for problem in problems:
        text, _, path = problem.rpartition(" @ ")
        yield from (f"{path}: {line}" for line in text.split("\n"))


def _field_hook(
    field: "attrs.Attribute[Any]", converter: cattrs.Converter, known: Mapping[str, type]
) -> _Hook:
    if field.metadata.get("union") == "strategies":
        return lambda data, _: _tagged(data, converter, known)
    kind: Any = field.type
    convert: Any = field.converter or canonical(kind)
    inner = [member for member in members(kind) if attrs.has(member)]
    rows = next((member for member in members(kind) if _holds_records(member)), None)
    several: Any = Mapping if get_origin(rows) is Mapping else (list, tuple)

    def build(data: Any, _: Any) -> Any:
        if len(inner) > 1 and isinstance(data, Mapping):
            return _tagged(data, converter, {str(kind_of(member)): member for member in inner})
        if inner and isinstance(data, Mapping):
            return converter.structure(data, inner[0])
        if rows is not None and isinstance(data, several):
            return converter.structure(data, rows)
        value = data if convert is None else convert(data)
        try:
            check_field(field, value)
        except ValueError as problem:
            found = shown(data) if field.repr else "a value"
            raise ValueError(f"found {found}; {problem}") from None
        return value

    return build


def _holds_records(kind: Any) -> bool:
    """Whether a type is that of a tuple of records, or of records by name."""
    return get_origin(kind) in (tuple, Mapping) and any(map(attrs.has, get_args(kind)))


def _tagged(data: Any, converter: cattrs.Converter, known: Mapping[str, type]) -> Any:
    """A record whose type is chosen by `kind`, in a table or, with all defaults, in its place."""
    kinds = ", ".join(map(repr, sorted(known)))
    if isinstance(data, Mapping) and "kind" not in data:
        raise ValueError(f"`kind` is missing in this table; choose one of {kinds}.")
    kind = data["kind"] if isinstance(data, Mapping) else data
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(
            f"found {shown(kind)}; choose one of {kinds}, or a table with a `kind`."
            f"{value_hint('strategy', kind) or closest(kind, known)}"
        )
    return converter.structure(data if isinstance(data, Mapping) else {}, known[kind])


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
    if _of_one_kind(left, right) or (_rows_of_records(left) and _rows_of_records(right)):
        before, after = _parts(left), _parts(right)
        for key in {**before, **after}:
            yield from _changes((path + key).lstrip("."), before.get(key), after.get(key))
    elif type(left) is not type(right) or left != right:
        yield Change(path, left, right)


def _rows_of_records(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(attrs.has(type(row)) for row in value)


def _parts(value: Any) -> dict[str, Any]:
    """The fields of a record; the records of a tuple by name, or else by number."""
    if not isinstance(value, tuple):
        return {f".{f.name}": getattr(value, f.name) for f in attrs.fields(type(value)) if f.eq}
    names = [getattr(row, "name", number) for number, row in enumerate(value)]
    names = names if len(set(names)) == len(names) else range(len(names))
    return {f"[{name}]": row for name, row in zip(names, value, strict=True)}
