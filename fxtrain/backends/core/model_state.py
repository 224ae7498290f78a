"""The state of a model on torch's own machinery: read, restored by name, and held in memory."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxtrain import _extensions
from fxtrain.backends.core.initial_values import copy_shard
from fxtrain.backends.core.open_windows import load_window, window_state
from fxtrain.backends.core.optimizer_state import (
    load_optimizers,
    more_state,
    optimizer_state,
    parameter_names,
    values_as_bytes,
)
from fxtrain.backends.core.optimizers import local_optimizer
from fxtrain.backends.core.weights import HALF
from fxtrain.errors import CheckpointError
from fxtrain.ops import tensor_bytes
from fxtrain.ops.optimizer_settings import flattened
from fxtrain.ops.whole_tensors import full_values, local_values, plain_name, without_compile
from fxtrain.state import TE, DistContext, FlatShard, Key, ModelState, StateReader, Wrapped
from fxtrain.state.keys import OPTIMIZER, SCALES, WEIGHTS

_SENDS_BUFFERS = "unfinished"


def state_of(model: Wrapped, *, omit: Collection[str] = ()) -> ModelState:
    """Parameters, buffers, optimizers, schedulers, loss scale, and an open window's gradients.

    Args:
        omit: Names in the module's state dict that are stored elsewhere.
    """
    tensors, extra = _module_state(model.module, omit)
    frozen = _take_frozen(model, tensors)
    optimizers: list[Any] = []
    grads, own, window = window_state(model)
    scales = _scales(model)
    tensors |= scales
    for index, optimizer in enumerate(model.optimizers):
        held, values = optimizer_state(optimizer, index, parameter_names(model.module))
        tensors.update(held)
        optimizers.append(values | more_state(optimizer))
        if local_optimizer(optimizer) is not optimizer:
            own[Key.of(OPTIMIZER, index, "state")] = values_as_bytes(values["state"], index)
    tensors |= grads
    values: dict[str, Any] = {
        "module": extra,
        "optimizers": optimizers,
        "schedulers": [scheduler.state_dict() for scheduler in flattened(model.scheduler or ())],
        "scaler": None if model.scaler is None else model.scaler.state_dict(),
        # DDP sends buffers before a forward if the backward before it was not ended by fxtrain.
        "sends_buffers": getattr(model.engine, _SENDS_BUFFERS, None),
        **frozen,
        **window,
    }
    buffers = {Key(WEIGHTS, plain_name(name)) for name, _ in model.module.named_buffers()}
    varying = buffers & tensors.keys()
    varying |= scales.keys()
    return ModelState(
        tensors=tensors,
        own=own,
        values=values,
        varies_by_rank=frozenset(varying),
    )


def _scales(model: Wrapped, *, create: bool = False) -> dict[Key, Tensor]:
    """The scales and histories of layers that compute with those of earlier steps."""
    recipe = model.plan.precision.recipe
    if not isinstance(recipe, TE):
        return {}
    return _extensions.scaling_state(model.module, recipe, create=create)


def load_state(model: Wrapped, saved: StateReader, *, omit: Collection[str] = ()) -> None:
    """Restore a saved state into a model, in place.

    At another world size, the parameters of independent replicas become their mean, also when
    restored into a plan without `local`.

    Args:
        omit: As for `state_of`.

    Raises:
        CheckpointError: the state is of another model.
    """
    tensors, _ = _module_state(model.module, omit)
    _check_formats(_quantized_facts(model.module), saved.values.get("quantized", {}))
    _check_base(tensors, saved.values.get("base", {}))
    _check_names(tensors, saved)
    trained = {Key(WEIGHTS, plain_name(name)) for name, _ in model.module.named_parameters()}
    same = saved.ranks == saved.loading_ranks
    for key, tensor in tensors.items():
        saved.fill(key, tensor)
        if key in trained and (mean := _extensions.weighted_mean(saved, key)) is not None:
            copy_shard(mean, tensor.detach())
        elif same and (drifted := saved.own(key, saved.rank)) is not None:
            local_values(tensor).copy_(drifted)
    load_extra(model.module, saved.values["module"])
    if any(key.kind == SCALES for key in saved.shapes):
        for key, tensor in _scales(model, create=True).items():
            if key in saved.shapes:
                saved.fill(key, tensor)
    if model.optimizers:
        load_optimizers(model, saved, tensors.values())
    sends_buffers = saved.values.get("sends_buffers")
    if sends_buffers is not None and hasattr(model.engine, _SENDS_BUFFERS):
        setattr(model.engine, _SENDS_BUFFERS, bool(sends_buffers))
    load_window(model, saved)


def _module_state(
    module: nn.Module, omit: Collection[str]
) -> tuple[dict[Key, Tensor], dict[str, Any]]:
    tensors: dict[Key, Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in _extensions.stored_tensors(module).items():
        if (name := plain_name(name)) in omit:
            continue
        if isinstance(value, Tensor):
            tensors[Key(WEIGHTS, name)] = value
        else:
            extra[name] = value
    return tensors, extra


def _quantized_facts(module: nn.Module) -> dict[str, Any]:
    return {plain_name(name): facts for name, facts in _extensions.quantized_facts(module).items()}


def _take_frozen(model: Wrapped, tensors: dict[Key, Tensor]) -> dict[str, Any]:
    """Facts of quantized weights, and digests of frozen ones, which leave `tensors`.

    Neither is there for a plan that asks for none, so that its checkpoints stay as they were.
    """
    facts = _quantized_facts(model.module)
    values: dict[str, Any] = {"quantized": facts} if facts else {}
    if model.plan.frozen == "digests":
        named = model.module.named_parameters(remove_duplicate=False)
        names = {plain_name(name) for name, parameter in named if not parameter.requires_grad}
        names |= {*map(plain_name, _extensions.quantized_tensors(model.module))}
        base = [key for key in tensors if key.name in names]
        values["base"] = {
            key.name: tensor_bytes.digest(full_values(tensors.pop(key))) for key in base
        }
    return values


def _check_base(tensors: dict[Key, Tensor], base: Mapping[str, str]) -> None:
    """Compare frozen tensors with their digests, and take them out of those to fill."""
    here = {name: tensors.pop(Key(WEIGHTS, name), None) for name in base}
    problems = [
        name
        for name, tensor in here.items()
        if tensor is None or tensor_bytes.digest(full_values(tensor)) != base[name]
    ]
    if problems:
        raise CheckpointError(
            f"The checkpoint holds digests of a frozen base model (Plan.frozen), and "
            f"{len(problems)} of {len(base)} tensors of this model differ from them, such as "
            f"{problems[0]}. Load the base model that it was trained on before wrapping.",
            code="FX603",
        )


def _check_formats(here: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Quantized weights of two formats may have tensors of the same shapes."""
    for name in sorted(here.keys() | theirs.keys()):
        if here.get(name) != theirs.get(name):
            formats = [each.get(name, {}).get("format", "not quantized") for each in (theirs, here)]
            raise CheckpointError(
                f"{name} is {formats[0]} in the checkpoint, and {formats[1]} in the model, or has "
                f"other settings. Wrap it with the Plan(quantize=...) that it was saved with.",
                code="FX603",
            )


def _check_names(tensors: Mapping[Key, Tensor], saved: StateReader) -> None:
    stored = {key for key in saved.shapes if key.kind == WEIGHTS}
    problems = [
        f"  {key.name} is {'only' if key in stored else 'not'} in the checkpoint"
        for key in tensors.keys() ^ stored
    ]
    for key in tensors.keys() & stored:
        shape, dtype = saved.shapes[key]
        tensor = tensors[key]
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            problems.append(
                f"  {key.name} is {dtype} {list(shape)} in the checkpoint, but "
                f"{tensor.dtype} {list(tensor.shape)} in the model"
            )
    if problems:
        shown = sorted(problems)[:40]
        more = [f"  and {len(problems) - 40} more"] if len(problems) > 40 else []
        if any(saved.shapes[key][1] in HALF for key in tensors.keys() & stored):
            more.append(
                "Parameters that were saved in half precision need "
                "Plan(precision=fx.Precision(..., params='keep'))."
            )
        raise CheckpointError(
            "\n".join(["The checkpoint is of a different model:", *shown, *more]), code="FX603"
        )


def load_extra(module: nn.Module, extra: Mapping[str, Any]) -> None:
    """Restore what submodules keep beside tensors (`set_extra_state`)."""
    for name, value in extra.items():
        path = name.rpartition("_extra_state")[0].rstrip(".")
        without_compile(module.get_submodule(path)).set_extra_state(value)


def local_part_of(tensor: Any) -> Tensor:
    """This rank's values of a tensor, a DTensor or a `FlatShard`, sharing memory."""
    return tensor.values.detach() if isinstance(tensor, FlatShard) else local_values(tensor)


def shape_and_dtype(tensor: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a whole tensor."""
    dtype = tensor.values.dtype if isinstance(tensor, FlatShard) else tensor.dtype
    return tuple(tensor.shape), dtype


def memory_reader(
    ctx: DistContext,
    shapes: Mapping[Key, tuple[tuple[int, ...], torch.dtype]],
    parts: Mapping[Key, Tensor],
    own: Mapping[Key, Tensor],
    values: Any,
) -> StateReader:
    """A reader for `Strategy.load_state` of a state that the same ranks hold in memory."""

    def fill(key: Key, tensor: Any) -> None:
        with torch.no_grad():
            local_part_of(tensor).copy_(parts[key])

    return StateReader(
        shapes=shapes,
        fill=fill,
        values=values,
        # A rank reads only its own tensors where the same ranks load.
        own=lambda key, rank: own.get(key),
        ranks=ctx.world_size,
        rank=ctx.rank,
        loading_ranks=ctx.world_size,
    )
