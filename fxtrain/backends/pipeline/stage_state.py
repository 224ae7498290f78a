"""The state of a model in a pipeline: each rank has its stages' part, under the same names."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor
from torch import distributed as dist

from fxtrain import ops
from fxtrain.backends.core import model_state
from fxtrain.backends.core.open_windows import full_gradient
from fxtrain.backends.pipeline.partition import Partition
from fxtrain.errors import CheckpointError
from fxtrain.state import ModelState, StateReader, Wrapped


def state_of(model: Wrapped) -> ModelState:
    """Tensors of this rank's stages, and values as one process would save them.

    Effects:
        One exchange of objects between the ranks of the pipeline; in an open window, one
        all-reduce for each parameter that stages share.

    Raises:
        CheckpointError: the optimizers of stages differ.
    """
    state = model_state.state_of(model)
    engine = model.engine
    if engine is model.module:
        return state
    if model.window.micro:
        state = attrs.evolve(state, tensors={**state.tensors, **_shared_gradients(model, state)})
    found = ops.gather_objects(state.values, engine.axis)
    return attrs.evolve(state, values=_merged(found, list(engine.partition.stages)))


def _shared_gradients(model: Wrapped, state: ModelState) -> dict[str, Tensor]:
    """The sums over stages of the gradients of parameters that they share."""
    parameters = dict(model.module.named_parameters(remove_duplicate=False))
    sums: dict[str, Tensor] = {}
    for group, names in model.engine.shared_groups:
        for name in [f"grad.{name}" for name in names if parameters[name].requires_grad]:
            sums[name] = full_gradient(state.tensors.get(name), parameters[name[5:]]).clone()
            dist.all_reduce(sums[name], group=group)
    return sums


def load_state(model: Wrapped, saved: StateReader) -> None:
    """Restore this rank's stages from a saved state of any strategy.

    Raises:
        CheckpointError: the state is of another model.
    """
    engine = model.engine
    if engine is model.module:
        model_state.load_state(model, saved)
        return
    model_state.load_state(model, _own_part(saved, engine.partition, engine.axis.rank))
    own = dict(model.module.named_buffers())
    for name, buffer in next(iter(engine.stages.values())).shell.named_buffers():
        # Buffers of other stages, with which a stage computes what depends on no parameter.
        if name not in own and f"module.{name}" in saved.shapes:
            saved.fill(f"module.{name}", buffer)


def _own_part(saved: StateReader, partition: Partition, rank: int) -> StateReader:
    others = {name for name in partition.stages if rank not in partition.holders(name)}
    tensors = {f"module.{name}" for name in others}
    # Of a gradient that stages share, and sum when their window closes, one gets the sum so far.
    tensors |= {f"grad.{name}" for name in partition.stages if partition.holders(name)[0] != rank}
    optimizers = [
        {
            **one,
            "groups": [
                {**group, "params": [name for name in group["params"] if name not in others]}
                for group in one["groups"]
            ],
        }
        for one in saved.values["optimizers"]
    ]
    extra = {
        name: value
        for name, value in saved.values["module"].items()
        if not _is_on_other_ranks(name, partition, others)
    }
    return attrs.evolve(
        saved,
        shapes={name: shape for name, shape in saved.shapes.items() if name not in tensors},
        values={**saved.values, "optimizers": optimizers, "module": extra},
    )


def _is_on_other_ranks(name: str, partition: Partition, others: set[str]) -> bool:
    """Whether every tensor of the owner of some extra state is on other ranks."""
    path = name.removeprefix("module.").rpartition("_extra_state")[0]
    held = [one for one in partition.stages if one.startswith(path)]
    return bool(held) and all(one in others for one in held)


def _merged(found: Sequence[Mapping[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """The values of all stages, as one process would have them."""
    first = found[0]
    place = {name: index for index, name in enumerate(order)}
    optimizers = []
    for columns in zip(*(one["optimizers"] for one in found), strict=True):
        if len({(one["kind"], len(one["groups"])) for one in columns}) > 1:
            kinds = [f"{one['kind']} with {len(one['groups'])} groups" for one in columns]
            raise CheckpointError(
                f"The stages of the pipeline have different optimizers: {', '.join(kinds)}. Use "
                f"the same groups on every rank; a group may be empty."
            )
        groups = []
        for alike in zip(*(one["groups"] for one in columns), strict=True):
            names = {name for group in alike for name in group["params"]}
            groups.append({**alike[0], "params": sorted(names, key=lambda n: place.get(n, -1))})
        states = {name: value for one in columns for name, value in one["state"].items()}
        optimizers.append({**columns[0], "groups": groups, "state": states})
    extra = {name: value for one in reversed(found) for name, value in one["module"].items()}
    return {**first, "optimizers": optimizers, "module": extra}
