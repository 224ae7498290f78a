"""Finds what code changed in a module (classes, hooks, attributes), to undo or to hide it.

The module is compared before and after, so this works for any strategy. Values of parameters and
buffers are left alone.

    record_module(module) ── wrap ──► .changes() ──► .undo()  reverts the changes for good
                                                └──► .hide()  reverts them until the function that
                                                              it returns restores everything
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import nn

_VALUES = ("_parameters", "_buffers", "_modules")
_ABSENT = object()


@attrs.frozen(kw_only=True, eq=False)
class _Part:
    """One submodule: its class, its own attributes, and the keys of its hooks by kind.

    In a `ModuleRecord` these are all of them, before the changes. In `ModuleChanges`, the class and
    the changed attributes as they were, and the keys of the added hooks.
    """

    part: nn.Module
    kind: type
    own: Mapping[str, Any]
    hooks: Mapping[str, frozenset[Any]]


@attrs.frozen(kw_only=True, eq=False)
class ModuleChanges:
    """What changed in a module between `record_module` and `ModuleRecord.changes`."""

    module: nn.Module
    parts: tuple[_Part, ...]

    def undo(self) -> None:
        """Revert these changes, and no later ones."""
        for part in self.parts:
            own = vars(part.part)
            part.part.__class__ = part.kind
            for name, value in part.own.items():
                if value is _ABSENT:
                    own.pop(name, None)
                else:
                    own[name] = value
            for name, keys in part.hooks.items():
                for key in keys:
                    own[name].pop(key, None)

    def hide(self) -> Callable[[], None]:
        """Revert these changes for a while.

        Returns:
            A function that restores the module as it was when this was called, including
            parameters, buffers, modes and attributes that were changed in the meantime.
        """
        now = [(part, type(part), dict(vars(part))) for part in self.module.modules()]
        for part, _, own in now:
            # Copies, so that changes in the meantime only affect the copies.
            vars(part).update({name: dict(own[name]) for name in _VALUES})
            vars(part).update({name: OrderedDict(hooks) for name, hooks in _hooks(part).items()})
        self.undo()

        def restore() -> None:
            for part, kind, own in now:
                part.__class__ = kind
                vars(part).clear()
                vars(part).update(own)

        return restore


@attrs.frozen(kw_only=True, eq=False)
class ModuleRecord:
    """A module before it is changed."""

    module: nn.Module
    parts: tuple[_Part, ...]

    def changes(self) -> ModuleChanges:
        """What has changed since."""
        changes = tuple(change for part in self.parts if (change := _change(part)) is not None)
        return ModuleChanges(module=self.module, parts=changes)


def record_module(module: nn.Module) -> ModuleRecord:
    """Record how a module is before it is changed."""
    return ModuleRecord(module=module, parts=tuple(map(_part, module.modules())))


def _part(part: nn.Module) -> _Part:
    hooks = _hooks(part)
    kept = {*_VALUES, "training", *hooks}  # "training" is the user's to change
    own = {name: value for name, value in vars(part).items() if name not in kept}
    keys = {name: frozenset(entries) for name, entries in hooks.items()}
    return _Part(part=part, kind=type(part), own=own, hooks=keys)


def _change(before: _Part) -> _Part | None:
    after = _part(before.part)
    own = {
        name: before.own.get(name, _ABSENT)
        for name in before.own.keys() | after.own.keys()
        if before.own.get(name, _ABSENT) is not after.own.get(name, _ABSENT)
    }
    hooks = {
        name: added
        for name, entries in after.hooks.items()
        if (added := entries - before.hooks.get(name, frozenset()))
    }
    if after.kind is before.kind and not own and not hooks:
        return None
    return attrs.evolve(before, own=own, hooks=hooks)


def _hooks(part: nn.Module) -> dict[str, dict[Any, Any]]:
    """Hooks by kind, which are compared by their keys."""
    return {
        name: value
        for name, value in vars(part).items()
        if "hooks" in name and isinstance(value, dict)
    }
