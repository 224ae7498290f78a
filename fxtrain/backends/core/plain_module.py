"""Taking off a module what wrapping put on it, for a while: classes, hooks and attributes.

What wrapping changed is found by comparing the module before with the module after, so that it
holds for every strategy. Values of parameters and buffers are left alone.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
from torch import nn

__all__ = ["record_module"]

_HELD = ("_parameters", "_buffers", "_modules")
_ABSENT = object()


@attrs.frozen(eq=False)
class _ModuleRecord:
    """How one module is at a moment: its class, its own attributes, and its hooks by kind."""

    part: nn.Module
    kind: type
    own: Mapping[str, Any]
    hooks: Mapping[str, frozenset[Any]]


@attrs.frozen(eq=False)
class _ModuleChange:
    """What wrapping did to one module.

    Attributes:
        part: It.
        kind: Its class before.
        own: Attributes that changed, as they were; some were not there.
        hooks: Those that came, by kind.
    """

    part: nn.Module
    kind: type
    own: Mapping[str, Any]
    hooks: Mapping[str, frozenset[Any]]


def record_module(module: nn.Module) -> Callable[[], Callable[[], Callable[[], None]]]:
    """Remember how a module is before it is wrapped.

    Returns:
        A function to call once it is wrapped. It gives another, which takes off what wrapping
        put on; and that gives a last one, which puts everything back as it was then: also
        parameters, buffers, modes and attributes that were changed in the meantime.
    """
    before = [_record(part) for part in module.modules()]

    def wrapped() -> Callable[[], Callable[[], None]]:
        changes = [one for one in map(_changed, before) if one is not None]
        return functools.partial(_strip, module, changes)

    return wrapped


def _strip(module: nn.Module, changes: Iterable[_ModuleChange]) -> Callable[[], None]:
    now = [(part, type(part), dict(vars(part))) for part in module.modules()]
    for part, _, own in now:
        # Others, so that whatever is done to them is done to these alone.
        vars(part).update({name: dict(own[name]) for name in _HELD})
        vars(part).update({name: OrderedDict(hooks) for name, hooks in _hooks(part)})
    for one in changes:
        own = vars(one.part)
        one.part.__class__ = one.kind
        for name, value in one.own.items():
            if value is _ABSENT:
                own.pop(name, None)
            else:
                own[name] = value
        for name, keys in one.hooks.items():
            for key in keys:
                own[name].pop(key, None)

    def put_back() -> None:
        for part, kind, own in now:
            part.__class__ = kind
            vars(part).clear()
            vars(part).update(own)

    return put_back


def _record(part: nn.Module) -> _ModuleRecord:
    own = {name: value for name, value in vars(part).items() if not _is_kept(name, value)}
    hooks = {name: frozenset(found) for name, found in _hooks(part)}
    return _ModuleRecord(part, type(part), own, hooks)


def _changed(before: _ModuleRecord) -> _ModuleChange | None:
    after = _record(before.part)
    own = {
        name: before.own.get(name, _ABSENT)
        for name in before.own.keys() | after.own.keys()
        if before.own.get(name, _ABSENT) is not after.own.get(name, _ABSENT)
    }
    hooks = {
        name: added
        for name, found in after.hooks.items()
        if (added := found - before.hooks.get(name, frozenset()))
    }
    if after.kind is before.kind and not own and not hooks:
        return None
    return _ModuleChange(before.part, before.kind, own, hooks)


def _is_kept(name: str, value: Any) -> bool:
    """Whether an attribute is looked at in another way, or is the user's to change."""
    return name in _HELD or name == "training" or _is_hooks(name, value)


def _hooks(part: nn.Module) -> list[tuple[str, dict[Any, Any]]]:
    return [(name, value) for name, value in vars(part).items() if _is_hooks(name, value)]


def _is_hooks(name: str, value: Any) -> bool:
    return "hooks" in name and isinstance(value, dict)
