"""Collect the state of models, random generators and the user as named tensors and JSON."""

import math
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain import ops
from fxtrain.checkpoint.json_values import encode
from fxtrain.errors import CheckpointError
from fxtrain.ops.devices import device_random_state, set_device_random_state
from fxtrain.ops.whole_tensors import identity
from fxtrain.state import (
    DistContext,
    FlatShard,
    Key,
    ModelState,
    Plan,
    Position,
    Wrapped,
    fingerprint,
    unstructure,
)
from fxtrain.state.keys import (
    EXTRA,
    RANDOM,
    VALUES,
    WEIGHTS,
    decode_key,
    encode_key,
)
from fxtrain.state.wrapped import check_open

_MODEL = "model"  # the name of a single model
_PYTHON, _GAUSS = Key(RANDOM, "python"), Key(RANDOM, "python.gauss")
_NUMPY, _NUMPY_GAUSS = Key(RANDOM, "numpy"), Key(RANDOM, "numpy.gauss")
_TORCH, _DEVICE = Key(RANDOM, "torch"), Key(RANDOM, "device")
# Entries of a model's values that have names in the state dict of its module, which manifests
# have with the kind of weights.
_NAMED_VALUES = ("module", "base")


@attrs.frozen(kw_only=True, eq=False)
class Snapshot:
    """What this rank has to save.

    Attributes:
        fields: Of the manifest.
        tensors: Live tensors by their names in the manifest, each memory once.
        own: Tensors that belong only to this rank.
        varying: Names of shared tensors whose values may differ between ranks.
        users: Names of tensors in the user's state, of which the first rank's are saved.
    """

    fields: dict[str, Any]
    tensors: Mapping[str, Tensor | FlatShard]
    own: Mapping[str, Tensor] = attrs.Factory(dict)
    varying: frozenset[str] = frozenset()
    users: frozenset[str] = frozenset()


def by_name(model: Any) -> dict[str, Wrapped]:
    """Return a wrapped model, or several by name, as a dict; raises for anything else."""
    models = dict(model) if isinstance(model, Mapping) else {_MODEL: model}
    for name, wrapped in models.items():
        if not isinstance(wrapped, Wrapped):
            raise CheckpointError(
                f"A checkpoint contains wrapped models; found {type(wrapped).__name__}. Pass "
                f"fx.wrap(net, ctx, plan), or a dict of wrapped models."
            )
        check_open(wrapped, f"save or restore of {name!r}", CheckpointError)
        if not isinstance(name, str) or not name or not name.isprintable() or not _readable(name):
            raise CheckpointError(f"{name!r} is not a valid model name: use letters and dots.")
    if not models:
        raise CheckpointError("No model to save or restore: the dict is empty. Pass a model.")
    return models


def _readable(name: str) -> bool:
    """Whether a manifest tells the tensors of a model of this name from all others."""
    return decode_key(encode_key(name, Key(WEIGHTS)))[0] == name


def snapshot(
    ctx: DistContext,
    models: Mapping[str, Wrapped],
    position: Position,
    extra: Any,
    metric: float | None,
) -> Snapshot:
    """Collect the state, without copying a tensor; raises for a value that cannot be saved."""
    tensors: dict[str, Tensor | FlatShard] = {}
    own = _encoded("", random_state(ctx))
    facts: dict[str, Any] = {}
    varying: set[str] = set()
    for name, model in models.items():
        state = model.strategy.state(model)
        facts[name] = _add_model(tensors, name, model.plan, state)
        # Those of optimizers are numbers and texts.
        facts[name]["settings"] = encode(model.status.settings, f"{name}: settings", {})
        own |= _encoded(name, state.own)
        varying |= {encode_key(name, key) for key in state.varies_by_rank}
    users: dict[str, Tensor] = {}
    encoded = encode(extra, EXTRA, users)
    tensors |= users
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        key = id(tensor) if isinstance(tensor, FlatShard) else identity(tensor)
        if first.setdefault(key, name) != name:
            aliases[name] = first[key]
    stored = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    fields = {"models": facts, "extra": encoded, "position": position}
    return Snapshot(
        fields={**fields, "metric": metric, "aliases": aliases},
        tensors=stored,
        own=own,
        varying=frozenset(varying & stored.keys()),
        users=frozenset(users),
    )


def converted(state: ModelState, aliases: Mapping[Key, Key], position: Position) -> Snapshot:
    """A state that was read from a checkpoint of another library, as that of a single model.

    Args:
        aliases: Further keys of tensors, each with the one in the state.
    """
    tensors: dict[str, Any] = {}
    fields = {"models": {_MODEL: _add_model(tensors, _MODEL, Plan(), state)}, "extra": None}
    fields["aliases"] = {
        encode_key(_MODEL, key): encode_key(_MODEL, stored) for key, stored in aliases.items()
    }
    return Snapshot(fields={**fields, "position": position, "metric": None}, tensors=tensors)


def _add_model(tensors: dict[str, Any], name: str, plan: Plan, state: ModelState) -> dict[str, Any]:
    """What a manifest says of a model; its tensors are added to those by name."""
    tensors |= _encoded(name, state.tensors)
    values = encode(_values_by_key(state.values), encode_key(name, Key(VALUES)), tensors)
    return {"plan": unstructure(plan), "fingerprint": fingerprint(plan), "values": values}


def _encoded(model: str, tensors: Mapping[Key, Any]) -> dict[str, Any]:
    return {encode_key(model, key): tensor for key, tensor in tensors.items()}


def _values_by_key(values: Any) -> Any:
    """A model's values, with the text of keys where a `ModelState` has names of weights."""
    return _renamed_values(values, lambda name: str(Key(WEIGHTS, name)))


def values_by_name(values: Any) -> Any:
    """A model's values as its `ModelState` had them, from those of a manifest."""
    return _renamed_values(values, lambda text: Key.read(text).name)


def _renamed_values(values: Any, rename: Callable[[str], str]) -> Any:
    if not isinstance(values, Mapping):  # of a strategy that has others
        return values
    renamed = {
        entry: {rename(name): value for name, value in values[entry].items()}
        for entry in _NAMED_VALUES
        if entry in values
    }
    return {**values, **renamed}


def random_state(ctx: DistContext) -> dict[Key, Tensor]:
    """The state of Python's, NumPy's (if imported), torch's and the device's generators."""
    _, words, gauss = random.getstate()
    states = {
        _PYTHON: torch.tensor(words, dtype=torch.int64, device="cpu"),
        _GAUSS: torch.tensor(
            [math.nan if gauss is None else gauss], dtype=torch.float64, device="cpu"
        ),
        _TORCH: torch.get_rng_state(),
    }
    if numpy := sys.modules.get("numpy"):
        _, key, index, has_gauss, cached = numpy.random.get_state(legacy=True)
        states[_NUMPY] = torch.tensor(
            [*key.tolist(), index, has_gauss], dtype=torch.int64, device="cpu"
        )
        states[_NUMPY_GAUSS] = torch.tensor([cached], dtype=torch.float64, device="cpu")
    device = device_random_state(ctx)
    if device is not None:
        states[_DEVICE] = device
    return states


def set_random_state(
    ctx: DistContext, own: Callable[[Key, int], Tensor | None], ranks: int, fallback: int
) -> None:
    """Restore the generators of this rank; a rank that the saved run did not have is re-seeded.

    Args:
        own: (key, rank) → the tensor that a rank saved.
        ranks: Number of ranks that saved.
        fallback: Seed from which additional ranks derive their own.
    """
    if ctx.rank >= ranks:
        ops.seed(fallback, ctx, per_rank=True)
        return
    words, gauss = own(_PYTHON, ctx.rank), own(_GAUSS, ctx.rank)
    if words is not None and gauss is not None:
        spare = gauss.item()
        random.setstate((3, tuple(words.tolist()), None if math.isnan(spare) else spare))
    state = own(_TORCH, ctx.rank)
    if state is not None:
        torch.set_rng_state(state)
    key, cached = own(_NUMPY, ctx.rank), own(_NUMPY_GAUSS, ctx.rank)
    if key is not None and cached is not None and (numpy := sys.modules.get("numpy")):
        *words, index, has_gauss = key.tolist()
        if len(words) != 624 or not 0 <= index <= 624:  # NumPy would read out of bounds
            raise CheckpointError("The saved state of NumPy's random generator is malformed.")
        state_words = numpy.array(words, dtype=numpy.uint32)
        numpy.random.set_state(("MT19937", state_words, index, has_gauss, float(cached[0])))
    device = own(_DEVICE, ctx.rank)
    if device is not None:
        set_device_random_state(ctx, device)
