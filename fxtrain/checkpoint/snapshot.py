"""Collect the state of models, random generators and the user as named tensors and JSON."""

import math
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fxtrain import ops
from fxtrain.checkpoint.json_values import encode
from fxtrain.errors import CheckpointError
from fxtrain.ops.devices import device_random_state, set_device_random_state
from fxtrain.ops.whole_tensors import identity
from fxtrain.state import DistContext, FlatShard, Plan, Position, Wrapped, fingerprint, unstructure
from fxtrain.state.wrapped import check_open

MODEL = "model"  # the name of a single model
_PYTHON, _GAUSS = "random.python", "random.python.gauss"
_NUMPY, _NUMPY_GAUSS = "random.numpy", "random.numpy.gauss"
_TORCH, _DEVICE = "random.torch", "random.device"


# What this rank has: fields of the manifest; live tensors by name, each memory once; tensors that
# belong only to this rank; and the names of shared tensors whose values may differ between ranks.
Snapshot = tuple[dict[str, Any], dict[str, Tensor | FlatShard], dict[str, Tensor], frozenset[str]]


def by_name(model: Any) -> dict[str, Wrapped]:
    """Return a wrapped model, or several by name, as a dict; raises for anything else."""
    models = dict(model) if isinstance(model, Mapping) else {MODEL: model}
    for name, wrapped in models.items():
        if not isinstance(wrapped, Wrapped):
            raise CheckpointError(
                f"A checkpoint contains wrapped models; found {type(wrapped).__name__}. Pass "
                f"fx.wrap(net, ctx, plan), or a dict of wrapped models."
            )
        check_open(wrapped, f"save or restore of {name!r}", CheckpointError)
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
    """Collect the state, without copying a tensor; raises for a value that cannot be saved."""
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
        facts[name] = model_facts(model.plan, values)
        facts[name]["settings"] = encode(model.status.settings, f"{name}/settings", inside)
    users: dict[str, Tensor] = {}
    encoded = encode(extra, "extra", users)
    tensors.update(users)
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        key = id(tensor) if isinstance(tensor, FlatShard) else identity(tensor)
        if first.setdefault(key, name) != name:
            aliases[name] = first[key]
    stored = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    fields = {"models": facts, "extra": encoded, "position": position}
    fields |= {"metric": metric, "aliases": aliases}
    return fields, stored, own, frozenset(varying & stored.keys())


def model_facts(plan: Plan, values: Any) -> dict[str, Any]:
    """What a checkpoint says of a model beside its tensors; its values as `encode` wrote them."""
    return {"plan": unstructure(plan), "fingerprint": fingerprint(plan), "values": values}


def random_state(ctx: DistContext) -> dict[str, Tensor]:
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
    ctx: DistContext, own: Callable[[str, int], Tensor | None], ranks: int, fallback: int
) -> None:
    """Restore the generators of this rank; a rank that the saved run did not have is re-seeded.

    Args:
        own: (name, rank) → the tensor that a rank saved.
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
