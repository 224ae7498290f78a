"""Finds what code changed in a module (classes, hooks, attributes), to undo or to hide it.

The module is compared before and after, so this works for any strategy. Values of parameters and
buffers are left alone.

    changes_since = record_module(module) ── wrap ──► changes_since() ──► .undo(), .hide()
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import nn

_VALUES = ("_parameters", "_buffers", "_modules")
_ABSENT = object()


@attrs.frozen(kw_only=True, eq=False)
class ModuleChanges:
    """What changed in a module since it was recorded.

    Attributes:
        module: The module.
        parts: Of each submodule its class and its changed attributes as they were, and the keys of
            the hooks that were added, by kind.
    """

    module: nn.Module
    parts: tuple[tuple[nn.Module, type, Mapping[str, Any], Mapping[str, Any]], ...]

    def undo(self) -> None:
        """Revert these changes, and no later ones."""
        for part, kind, attributes, hooks in self.parts:
            own = vars(part)
            part.__class__ = kind
            for name, value in attributes.items():
                if value is _ABSENT:
                    own.pop(name, None)
                else:
                    own[name] = value
            for name, keys in hooks.items():
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


def record_module(module: nn.Module, *, added: bool = False) -> Callable[[], ModuleChanges]:
    """Record how a module is before it is changed; returns a function that finds the changes.

    Args:
        added: Only attributes that are new count, and not those that were set to something else.
    """
    before = [(part, type(part), *_attributes_and_hooks(part)) for part in module.modules()]

    def changes_since() -> ModuleChanges:
        parts: list[Any] = []
        for part, kind, attributes, hooks in before:
            new_attributes, new_hooks = _attributes_and_hooks(part)
            changed = {
                name: attributes.get(name, _ABSENT)
                for name in attributes.keys() | new_attributes.keys()
                if attributes.get(name, _ABSENT) is not new_attributes.get(name, _ABSENT)
                and not (added and name in attributes)
            }
            more = {name: keys - hooks.get(name, set()) for name, keys in new_hooks.items()}
            if type(part) is not kind or changed or any(more.values()):
                parts.append((part, kind, changed, more))
        return ModuleChanges(module=module, parts=tuple(parts))

    return changes_since


def _attributes_and_hooks(part: nn.Module) -> tuple[dict[str, Any], dict[str, set[Any]]]:
    """A submodule's own attributes, and the keys of its hooks by kind."""
    hooks = _hooks(part)
    kept = {*_VALUES, "training", *hooks}  # "training" is the user's to change
    own = {name: value for name, value in vars(part).items() if name not in kept}
    return own, {name: set(entries) for name, entries in hooks.items()}


def _hooks(part: nn.Module) -> dict[str, dict[Any, Any]]:
    """Hooks by kind, which are compared by their keys."""
    return {
        name: value
        for name, value in vars(part).items()
        if "hooks" in name and isinstance(value, dict)
    }
