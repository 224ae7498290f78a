"""Records to plain data and back, strictly: nothing is guessed, nothing is dropped."""

import difflib
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn, override
from cattrs.v import transform_error

from fxtrain._errors import PlanError
from fxtrain.state._fsdp import FSDP
from fxtrain.state._plan import Plan
from fxtrain.state._precision import Precision, precision_of
from fxtrain.state._strategies import DDP, Single

__all__ = ["Change", "converter_for", "diff", "fingerprint", "structure", "unstructure"]

T = TypeVar("T")
BUILT_IN: tuple[type, ...] = (Single, DDP, FSDP)


@attrs.frozen
class Change:
    """One field in which two records differ.

    Attributes:
        path: Where, as `strategy.hook.name`.
        left: The value in the first record; None where it has no such field.
        right: The value in the second.
    """

    path: str
    left: Any
    right: Any


def unstructure(record: Any, configs: tuple[type, ...] = ()) -> dict[str, Any]:
    """A record as dicts, lists, strings, numbers and None.

    Example:
        >>> import fxtrain as fx
        >>> from fxtrain.state import unstructure
        >>> unstructure(fx.Position(epoch=2))["epoch"]
        2
    """
    return converter_for(configs).unstructure(record)


def structure(data: Any, cls: type[T], configs: tuple[type, ...] = ()) -> T:
    """A record from plain data.

    Args:
        data: What `unstructure` gave, or a part of it: missing fields take their defaults.
        cls: The record to make.
        configs: Strategy configs of third parties, beside fxtrain's own.

    Raises:
        PlanError: one line per problem, each with its path: unknown keys with the closest
            known one, values of a wrong type, choices that do not exist.

    Example:
        >>> import fxtrain as fx
        >>> from fxtrain.state import structure
        >>> structure({"strategy": {"kind": "single"}, "accumulate": 2}, fx.Plan).accumulate
        2
    """
    try:
        return converter_for(configs).structure(data, cls)
    except cattrs.BaseValidationError as error:
        lines = transform_error(error, path=cls.__name__.lower(), format_exception=_say)
        raise PlanError("\n".join(lines)) from None
    except (PlanError, ValueError, TypeError) as error:
        raise PlanError(f"{cls.__name__.lower()}: {error}") from None


def fingerprint(record: Any) -> str:
    """A digest of everything a record says: equal for equal records, on every machine.

    Example:
        >>> import fxtrain as fx
        >>> fx.fingerprint(fx.Plan()) == fx.fingerprint(fx.Plan(accumulate=1))
        True
    """
    text = json.dumps(_plain(record), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(f"{type(record).__name__}{text}".encode(), digest_size=16).hexdigest()


def diff(left: Any, right: Any) -> tuple[Change, ...]:
    """The fields in which two records differ, by path.

    Example:
        >>> import fxtrain as fx
        >>> fx.diff(fx.Plan(), fx.Plan(clip_norm=1.0))
        (Change(path='clip_norm', left=None, right=1.0),)
    """
    before, after = _leaves(_plain(left)), _leaves(_plain(right))
    paths = [*before, *(path for path in after if path not in before)]
    return tuple(
        Change(path, before.get(path), after.get(path))
        for path in paths
        if before.get(path, _ABSENT) != after.get(path, _ABSENT)
    )


@functools.cache  # building one generates code; a converter is never changed afterwards
def converter_for(configs: tuple[type, ...] = ()) -> cattrs.Converter:
    """A strict converter that knows fxtrain's strategies and these."""
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind in (bool, int, float, str):
        converter.register_structure_hook(kind, _exact(kind))
    converter.register_structure_hook_factory(_is_literal, _literal)
    converter.register_structure_hook_factory(_is_tuple, lambda kind: _tuple(kind, converter))
    known = {config.kind: config for config in map(_kinded, (*BUILT_IN, *configs))}
    for tag, config in known.items():
        converter.register_unstructure_hook(
            config.cls, lambda value, tag=tag: {"kind": tag, **_fields(value, converter)}
        )
    converter.register_structure_hook_factory(attrs.has, lambda cls: _record(cls, converter, known))
    return converter


_ABSENT = object()


@attrs.frozen
class _Kinded:
    kind: str
    cls: type


def _kinded(config: type) -> _Kinded:
    return _Kinded(str(attrs.fields_dict(config)["kind"].default), config)


def _plain(record: Any) -> Any:
    strategy = type(getattr(record, "strategy", None))
    own = strategy in BUILT_IN or not attrs.has(strategy)
    return unstructure(record, () if own else (strategy,))


def _fields(value: Any, converter: cattrs.Converter) -> dict[str, Any]:
    return {
        field.name: converter.unstructure(getattr(value, field.name))
        for field in attrs.fields(type(value))
        if field.init
    }


def _record(
    cls: type, converter: cattrs.Converter, known: Mapping[str, _Kinded]
) -> Callable[[Any, Any], Any]:
    special: dict[str, Any] = {}
    tags = {config.cls: tag for tag, config in known.items()}
    if cls is Plan:
        special["strategy"] = override(struct_hook=lambda data, _: _tagged(data, converter, known))
        special["precision"] = override(
            struct_hook=lambda data, _: (
                precision_of(data)
                if isinstance(data, str)
                else converter.structure(data, Precision)
            )
        )
    inner = make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True, **special)

    def build(data: Any, kind: Any) -> Any:
        if not isinstance(data, Mapping):
            raise ValueError(f"expected a table of {cls.__name__}'s fields, found {data!r}")
        return inner(_without_tag(data) if cls in tags else data, kind)

    def _without_tag(data: Mapping[str, Any]) -> dict[str, Any]:
        found = data.get("kind", tags[cls])
        if found != tags[cls]:
            raise ValueError(f"kind {found!r} is not that of {cls.__name__}, {tags[cls]!r}")
        return {key: value for key, value in data.items() if key != "kind"}

    return build


def _tagged(data: Any, converter: cattrs.Converter, known: Mapping[str, _Kinded]) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(f"expected a table with `kind`, found {data!r}")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in known:
        near = difflib.get_close_matches(str(kind), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"kind {kind!r} is not one of {', '.join(sorted(known))}.{hint}")
    return converter.structure(data, known[kind].cls)


def _exact(kind: type) -> Callable[[Any, Any], Any]:
    def check(value: Any, _: Any) -> Any:
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind or (kind is float and not math.isfinite(value)):
            raise ValueError(f"expected {_NAMES[kind]}, found {value!r}")
        return value

    return check


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def _is_literal(kind: Any) -> bool:
    return get_origin(kind) is Literal


def _literal(kind: Any) -> Callable[[Any, Any], Any]:
    choices = get_args(kind)

    def check(value: Any, _: Any) -> Any:
        if not isinstance(value, str) or value not in choices:
            near = difflib.get_close_matches(str(value), choices, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{value!r} is not one of {', '.join(choices)}{hint}")
        return value

    return check


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _tuple(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    inner = get_args(kind)[0]

    def build(value: Any, _: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError(f"expected a list, found {value!r}")
        return tuple(converter.structure(one, inner) for one in value)

    return build


def _say(error: BaseException, kind: type | None) -> str:
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        known = [field.name for field in attrs.fields(error.cl) if field.init]
        told: list[str] = []
        for name in sorted(map(str, error.extra_fields)):
            near = difflib.get_close_matches(name, known, n=1)
            told.append(f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
        return f"unknown key {', '.join(told)}; {error.cl.__name__} has {', '.join(known)}"
    return str(error)


def _leaves(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict):
        return {prefix: data}
    return {
        path: leaf
        for key, value in data.items()
        for path, leaf in _leaves(value, f"{prefix}.{key}" if prefix else str(key)).items()
    }
