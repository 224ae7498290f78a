"""Taking back what torch's in-place wrappers do to a module: classes, hooks, attributes."""

from collections.abc import Callable
from typing import Any

import attrs
from torch import nn

__all__ = ["record_changes"]


@attrs.frozen(kw_only=True, eq=False)
class _ModuleSnapshot:
    part: nn.Module
    kind: type
    attributes: frozenset[str]
    hooks: dict[str, frozenset[Any]]


def record_changes(module: nn.Module) -> Callable[[], Callable[[], None]]:
    """Note how a module is now.

    Returns:
        A function to call once the module is changed, which gives a function that takes back
        what changed between the two calls, and nothing later.
    """
    before = [_snapshot(part) for part in module.modules()]

    def changed() -> Callable[[], None]:
        added = [(one, *_added(one)) for one in before]

        def restore() -> None:
            for one, attributes, hooks in added:
                one.part.__class__ = one.kind
                for name in attributes:
                    one.part.__dict__.pop(name, None)
                for kind, keys in hooks.items():
                    for key in keys:
                        one.part.__dict__[kind].pop(key, None)

        return restore

    return changed


def _snapshot(part: nn.Module) -> _ModuleSnapshot:
    return _ModuleSnapshot(
        part=part,
        kind=type(part),
        attributes=frozenset(vars(part)),
        hooks={name: frozenset(hooks) for name, hooks in _hooks(part).items()},
    )


def _hooks(part: nn.Module) -> dict[str, dict[Any, Any]]:
    return {
        name: value
        for name, value in vars(part).items()
        if "hooks" in name and isinstance(value, dict)
    }


def _added(one: _ModuleSnapshot) -> tuple[frozenset[str], dict[str, frozenset[Any]]]:
    attributes = frozenset(vars(one.part)) - one.attributes
    hooks = {
        name: frozenset(now) - one.hooks.get(name, frozenset())
        for name, now in _hooks(one.part).items()
        if name not in attributes
    }
    return attributes, hooks
