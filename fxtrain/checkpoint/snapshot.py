"""Collect the state of models and of the user as named tensors and JSON."""

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
    fingerprint,
    unstructure,
)

MODEL = "model"  # the name of a single model


@attrs.frozen(kw_only=True, eq=False)
class Snapshot:
    """This rank's view of the contents of a checkpoint.

    Attributes:
        tensors: Live tensors of all models and of the user, by name.
        aliases: Names of tensors that share the memory of another.
        varies_by_rank: Names of tensors that may differ between ranks.
        own: Tensors that belong only to this rank.
        models: Per model, its plan, fingerprint and values as JSON.
        extra: The user's state as JSON.
        position: Position of the run.
        metric: The number that `keep_best` compares.
    """

    tensors: Mapping[str, Tensor | FlatShard]
    aliases: Mapping[str, str]
    varies_by_rank: frozenset[str]
    own: Mapping[str, Tensor]
    models: Mapping[str, Any]
    extra: Any
    position: Position
    metric: float | None


def by_name(model: Any) -> dict[str, Wrapped]:
    """Return a wrapped model, or several by name, as a dict.

    Raises:
        CheckpointError: a value is not a wrapped model, or was unwrapped.
    """
    models = dict(model) if isinstance(model, Mapping) else {MODEL: model}
    for name, one in models.items():
        if not isinstance(one, Wrapped):
            raise CheckpointError(
                f"A checkpoint contains wrapped models; found {type(one).__name__}. Pass "
                f"fx.wrap(net, ctx, plan), or a dict of wrapped models."
            )
        check_open(one, f"save or restore of {name!r}", CheckpointError)
        if not isinstance(name, str) or not name or not name.isprintable() or "/" in name:
            raise CheckpointError(f"{name!r} is not a valid model name: use letters and dots.")
    if not models:
        raise CheckpointError("No model to save or restore: the dict is empty. Pass a model.")
    return models


def snapshot(
    ctx: DistContext,
    models: Mapping[str, Wrapped],
    position: Position,
    extra: Any,
    metric: float | None,
) -> Snapshot:
    """Collect the state, without copying a tensor.

    Raises:
        CheckpointError: a value cannot be saved; the message names it.
    """
    tensors: dict[str, Tensor | FlatShard] = {}
    own = random_state(ctx)
    facts: dict[str, Any] = {}
    varying: set[str] = set()
    for name, model in models.items():
        state = model.strategy.state(model)
        inside: dict[str, Tensor] = {}
        values = encode(state.values, f"{name}/values", inside)
        tensors.update({f"{name}/{key}": tensor for key, tensor in state.tensors.items()})
        tensors.update(inside)
        own.update({f"{name}/{key}": tensor for key, tensor in state.own.items()})
        varying |= {f"{name}/{key}" for key in state.varies_by_rank}
        facts[name] = {
            "plan": unstructure(model.plan),
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
        varies_by_rank=frozenset(varying & kept.keys()),
        own=own,
        models=facts,
        extra=encoded,
        position=position,
        metric=metric,
    )


def _shared(
    tensors: Mapping[str, Tensor | FlatShard],
) -> tuple[dict[str, Tensor | FlatShard], dict[str, str]]:
    """Each tensor once, and the aliases of those with several names."""
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
    """A key that is equal for two names of the same tensor."""
    if isinstance(tensor, FlatShard):
        return id(tensor)
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.numel():
        return id(tensor)
    # XLA tensors have no data pointer.
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
