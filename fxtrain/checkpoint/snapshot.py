"""The state of models and of the user, taken apart: tensors by name, and JSON."""

import json
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._errors import CheckpointError
from fxtrain.checkpoint.json_values import encode
from fxtrain.checkpoint.rng_state import random_state
from fxtrain.state import (
    DistContext,
    FlatShard,
    Position,
    Wrapped,
    check_open,
    dumps,
    fingerprint,
)

__all__ = ["MODEL", "Snapshot", "by_name", "snapshot"]

MODEL = "model"  # the name of a model that is saved alone


@attrs.frozen(kw_only=True, eq=False)
class Snapshot:
    """All that one checkpoint holds, as this rank has it.

    Attributes:
        tensors: Of all models and of the user, by name; live.
        aliases: Names of tensors that are another one.
        varies_by_rank: Names of tensors that may differ between ranks.
        own: Tensors of this rank alone.
        models: Per model its plan, fingerprint and values, as JSON.
        extra: The user's state, as JSON.
        position: Where the run stands.
        metric: What `keep_best` goes by.
        constant_between_steps: Names of tensors that nothing but an optimizer's step changes.
    """

    tensors: Mapping[str, Tensor | FlatShard]
    aliases: Mapping[str, str]
    varies_by_rank: frozenset[str]
    own: Mapping[str, Tensor]
    models: Mapping[str, Any]
    extra: Any
    position: Position
    metric: float | None
    constant_between_steps: frozenset[str] = frozenset()


def by_name(model: Any) -> dict[str, Wrapped]:
    """A wrapped model, or several by name, as a dict.

    Raises:
        CheckpointError: it is something else, or was unwrapped.
    """
    models = dict(model) if isinstance(model, Mapping) else {MODEL: model}
    for name, one in models.items():
        if not isinstance(one, Wrapped):
            raise CheckpointError(
                f"A checkpoint holds wrapped models; found {type(one).__name__}. Pass "
                f"fx.wrap(net, ctx, plan), or a dict of such by name."
            )
        check_open(one, f"save or restore of {name!r}", CheckpointError)
        if not isinstance(name, str) or not name or not name.isprintable() or "/" in name:
            raise CheckpointError(f"{name!r} is not a name for a model: use letters and dots.")
    if not models:
        raise CheckpointError("There is no model to save or restore: the dict is empty.")
    return models


def snapshot(
    ctx: DistContext,
    models: Mapping[str, Wrapped],
    position: Position,
    extra: Any,
    metric: float | None,
) -> Snapshot:
    """Take everything apart, without copying a tensor.

    Raises:
        CheckpointError: a value cannot be saved; its name is in the message.
    """
    tensors: dict[str, Tensor | FlatShard] = {}
    own = random_state(ctx)
    facts: dict[str, Any] = {}
    drifting: set[str] = set()
    steady: set[str] = set()
    for name, model in models.items():
        state = model.strategy.state(model)
        inside: dict[str, Tensor] = {}
        values = encode(state.values, f"{name}/values", inside)
        tensors.update({f"{name}/{key}": tensor for key, tensor in state.tensors.items()})
        tensors.update(inside)
        own.update({f"{name}/{key}": tensor for key, tensor in state.own.items()})
        drifting |= {f"{name}/{key}" for key in state.varies_by_rank}
        steady |= {f"{name}/{key}" for key in state.constant_between_steps}
        facts[name] = {
            "plan": json.loads(dumps(model.plan)),
            "fingerprint": fingerprint(model.plan),
            "values": values,
        }
    users: dict[str, Tensor] = {}
    encoded = encode(extra, "extra", users)
    tensors.update(users)
    kept, aliases = _shared(tensors)
    return Snapshot(
        tensors=kept,
        aliases=aliases,
        varies_by_rank=frozenset(drifting & kept.keys()),
        own=own,
        models=facts,
        extra=encoded,
        position=position,
        metric=metric,
        constant_between_steps=frozenset(aliases.get(key, key) for key in steady),
    )


def _shared(
    tensors: Mapping[str, Tensor | FlatShard],
) -> tuple[dict[str, Tensor | FlatShard], dict[str, str]]:
    """Tensors once each, and the further names of those that have several."""
    first: dict[Any, str] = {}
    kept: dict[str, Tensor | FlatShard] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        key = _memory(tensor)
        if key in first:
            aliases[name] = first[key]
        else:
            kept[name] = tensor
            first[key] = name
    return kept, aliases


def _memory(tensor: Tensor | FlatShard) -> Any:
    """What two names of one tensor have in common."""
    if isinstance(tensor, FlatShard):
        return id(tensor)
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.numel():
        return id(tensor)
    # XLA's tensors do not say where they lie.
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.data_ptr():
        return id(tensor)
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
