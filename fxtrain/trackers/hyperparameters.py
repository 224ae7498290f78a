"""Hyperparameters: the plan, the context and the user's settings as a flat table."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from fxtrain._version import __version__
from fxtrain.state import DistContext, Plan, fingerprint, unstructure

_DEEPEST = 20
_LONGEST = 1000  # characters of one value


def flat(values: Any, path: str = "") -> dict[str, Any]:
    """Nested settings as one table: names joined by dots, values None, bool, int, float or text.

    Lists and all other values become text, truncated to 1000 characters.

    Example:
        >>> flat({"model": {"width": 64, "blocks": (1, 2)}, "note": None})
        {'model.width': 64, 'model.blocks': '[1, 2]', 'note': None}
    """
    return dict(_flat(values, path, 0))


def about_plan(plan: Plan) -> dict[str, Any]:
    """A plan as nested plain data, with its fingerprint."""
    return {**unstructure(plan), "fingerprint": fingerprint(plan)}


def about_context(ctx: DistContext) -> dict[str, Any]:
    """Facts about where a run takes place."""
    return {
        "world_size": ctx.world_size,
        "num_nodes": ctx.num_nodes,
        "local_world_size": ctx.local_world_size,
        "device": ctx.device.type,
        "launcher": ctx.launcher,
        "mesh": ctx.mesh.sizes,
        "fxtrain": __version__,
        "torch": str(torch.__version__),
    }


def _flat(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if attrs.has(type(value)) and not isinstance(value, type):
        value = unstructure(value)
    if isinstance(value, Mapping) and (value or not path) and depth < _DEEPEST:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key), depth + 1)
    else:
        yield path, _plain(value)


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, tuple | list):
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            value = json.dumps(value, default=str)
    return str(value)[:_LONGEST]
