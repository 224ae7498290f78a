"""The tensors of a split model: where they are, full values, checkpoints and gradients.

Gradients are summed over stages that share a parameter, and averaged over replicas.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch import distributed as dist

from fxtrain import ops
from fxtrain.backends.core import model_state, step_functions
from fxtrain.backends.core.open_windows import full_gradient
from fxtrain.backends.core.step_functions import average_grads, local_grads
from fxtrain.backends.core.weights import from_first_rank, in_loaded_dtypes
from fxtrain.backends.pipeline.partition import Partition
from fxtrain.errors import CheckpointError
from fxtrain.ops.whole_tensors import plain_name, weight_of
from fxtrain.state import DistContext, Key, ModelState, StateReader, TensorIndex, Weight, Wrapped
from fxtrain.state.keys import GRADIENTS, WEIGHTS
from fxtrain.state.mesh import axis_groups


@attrs.frozen(eq=False)
class TensorSlot:
    """Where a parameter or buffer is registered in a module.

    Attributes:
        name: In the model.
        path: Of the module that owns it.
        key: Its name there.
        held: That module's own parameters or buffers; the entry is None if only other ranks hold
            the tensor.
        like: A fake tensor like the full one; one for all names of a tied parameter.
        stored: Whether the module's state dict contains it.
    """

    name: str
    path: str
    key: str
    held: dict[str, Any]
    like: Tensor
    stored: bool


def tensor_slots(module: nn.Module) -> tuple[TensorSlot, ...]:
    """Every entry of a whole module: those in its state dict first, in its order."""
    stored = {name: place for place, name in enumerate(module.state_dict(keep_vars=True))}
    likes: dict[int, Tensor] = {}
    places: list[TensorSlot] = []
    for path, part in module.named_modules(remove_duplicate=False):
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    name = f"{path}.{key}" if path else key
                    like = likes.setdefault(id(tensor), _like(tensor))
                    places.append(TensorSlot(name, path, key, tensors, like, name in stored))
    return tuple(sorted(places, key=lambda place: stored.get(place.name, len(stored))))


def full_tensor_of(
    place: TensorSlot, partition: Partition, axis: DistContext, device: torch.device
) -> Tensor:
    """The full value of an entry, on every rank of the pipeline.

    Effects:
        Gathers it if it is sharded; the first rank that holds it sends it to the pipeline if some
        rank does not hold it.
    """
    holders = partition.holders(place.name)
    everywhere = len(holders) == axis.world_size
    # Every rank that holds a part joins the gather, also those to which the full value is sent.
    tensor = place.held[place.key]
    own = None if tensor is None else weight_of(tensor).gather().to(device)
    if own is not None and (everywhere or axis.rank == holders[0]):
        whole = own if everywhere else own.contiguous()
    else:
        whole = torch.empty(place.like.shape, dtype=place.like.dtype, device=device)
    if not everywhere:
        dist.broadcast(whole, axis.comm.ranks[holders[0]], group=axis.comm.group)
    return whole


def pipeline_weights(model: Wrapped) -> dict[str, Weight]:
    """The tensors of the module by name, the same names on every rank.

    Effects:
        No traffic.
    """
    engine = model.engine
    shells = [
        dict(stage.shell.named_buffers(remove_duplicate=False)) for stage in engine.stages.values()
    ]
    weights: dict[str, Weight] = {}
    for place in engine.places:
        here = place.held[place.key] is not None
        gather = functools.partial(
            full_tensor_of, place, engine.partition, engine.axis, model.ctx.device
        )
        weight = Weight(
            like=place.held[place.key] if here else place.like,
            shape=tuple(place.like.shape),
            dtype=place.like.dtype,
            key=id(place.like),
            here=here,
            gather=gather,
            fill=functools.partial(_fill, place, [shell.get(place.name) for shell in shells]),
            stored=place.stored,
        )
        is_parameter = isinstance(place.like, nn.Parameter)
        weight = weight if is_parameter else from_first_rank(weight, model.ctx.axis("data"))
        weights[plain_name(place.name)] = weight
    return in_loaded_dtypes(weights, model)


def _fill(
    place: TensorSlot,
    of_stages: Sequence[Tensor | None],
    read: Callable[[TensorIndex | None], Tensor],
) -> None:
    """Fill what this rank holds, and its stages' copies of the buffers of others."""
    tensors = {id(tensor): tensor for tensor in (place.held[place.key], *of_stages)}
    for tensor in tensors.values():
        if tensor is not None:
            weight_of(tensor).fill(read)


def _like(tensor: Tensor) -> Tensor:
    tensor_like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor_like, requires_grad=tensor.requires_grad)
    return tensor_like


def pipeline_state(model: Wrapped) -> ModelState:
    """Tensors of this rank's stages, and values as one process would save them.

    Effects:
        One exchange of objects between the ranks of the pipeline; in an open window, one
        all-reduce for each parameter that stages share.

    Raises:
        CheckpointError: the optimizers of stages differ.
    """
    state = model_state.state_of(model)
    engine = model.engine
    if model.window.micro:
        state = attrs.evolve(state, tensors={**state.tensors, **_shared_gradients(model, state)})
    values = ops.gather_objects(state.values, engine.axis)
    return attrs.evolve(state, values=_merged(values, [*map(plain_name, engine.partition.stages)]))


def _shared_gradients(model: Wrapped, state: ModelState) -> dict[Key, Tensor]:
    """The sums over stages of the gradients of parameters that they share."""
    # Stages add them up when their window closes; a checkpoint inside of it is of one process.
    parameters = dict(model.module.named_parameters(remove_duplicate=False))
    sums: dict[Key, Tensor] = {}
    for group, names in model.engine.shared_groups:
        for name in [name for name in names if parameters[name].requires_grad]:
            saved = Key(GRADIENTS, plain_name(name))
            sums[saved] = full_gradient(state.tensors.get(saved), parameters[name]).clone()
            dist.all_reduce(sums[saved], group=group)
    return sums


def load_state(model: Wrapped, saved: StateReader) -> None:
    """Restore this rank's stages from a saved state of any strategy.

    Raises:
        CheckpointError: the state is of another model.
    """
    engine = model.engine
    model_state.load_state(model, _own_part(saved, engine.partition, engine.axis.rank))
    own = {id(buffer) for buffer in model.module.buffers()}
    for stage in engine.stages.values():
        for name, buffer in stage.shell.named_buffers():
            # Copies of other stages' buffers, for what depends on no parameter.
            key = Key(WEIGHTS, plain_name(name))
            if id(buffer) not in own and key in saved.shapes:
                saved.fill(key, buffer)


def _own_part(saved: StateReader, partition: Partition, rank: int) -> StateReader:
    holders = {plain_name(name): partition.holders(name) for name in partition.stages}
    others = {name for name, ranks in holders.items() if rank not in ranks}
    tensors = {Key(WEIGHTS, name) for name in others}
    # Of a gradient that stages share, and sum when their window closes, one gets the sum so far.
    tensors |= {Key(GRADIENTS, name) for name, ranks in holders.items() if ranks[0] != rank}
    optimizers = [
        {
            **each,
            "groups": [
                {**group, "params": [name for name in group["params"] if name not in others]}
                for group in each["groups"]
            ],
        }
        for each in saved.values["optimizers"]
    ]
    extra = {
        name: value
        for name, value in saved.values["module"].items()
        if not _is_on_other_ranks(name, holders, others)
    }
    return attrs.evolve(
        saved,
        shapes={key: shape for key, shape in saved.shapes.items() if key not in tensors},
        values={**saved.values, "optimizers": optimizers, "module": extra},
    )


def _is_on_other_ranks(name: str, tensors: Iterable[str], others: set[str]) -> bool:
    """Whether every tensor of the owner of some extra state is on other ranks."""
    path = name.rpartition("_extra_state")[0]
    names = [tensor for tensor in tensors if tensor.startswith(path)]
    return bool(names) and all(tensor in others for tensor in names)


def _merged(states_of_ranks: Sequence[Mapping[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """The values of all stages, as one process would have them."""
    first = states_of_ranks[0]
    place = {name: index for index, name in enumerate(order)}
    optimizers = []
    for of_stages in zip(*(state["optimizers"] for state in states_of_ranks), strict=True):
        kinds = [f"{state['kind']} with {len(state['groups'])} groups" for state in of_stages]
        if len({*kinds}) > 1:
            raise CheckpointError(
                f"The stages of the pipeline have different optimizers: {', '.join(kinds)}. Use "
                f"the same groups on every rank; a group may be empty."
            )
        groups = []
        for alike in zip(*(state["groups"] for state in of_stages), strict=True):
            names = {name for group in alike for name in group["params"]}
            groups.append({**alike[0], "params": sorted(names, key=lambda n: place.get(n, -1))})
        states = {name: value for state in of_stages for name, value in state["state"].items()}
        optimizers.append({**of_stages[0], "groups": groups, "state": states})
    extra = {
        name: value
        for state in reversed(states_of_ranks)
        for name, value in state["module"].items()
    }
    return {**first, "optimizers": optimizers, "module": extra}


def open_shared_groups(
    names: Iterable[str], partition: Partition, ctx: DistContext
) -> tuple[tuple[tuple[Any, tuple[str, ...]], ...], list[Any]]:
    """The groups of ranks that hold the same parameters.

    Args:
        names: Of the parameters, in an order that all ranks share.

    Returns:
        (group, names) of this rank, and the groups that were opened for it.

    Effects:
        Every rank opens all groups that the context lacks.
    """
    axis = ctx.axis("pipeline")
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        if len(partition.holders(name)) > 1:
            by_ranks.setdefault(partition.holders(name), []).append(name)
    sums: list[tuple[Any, tuple[str, ...]]] = []
    opened: list[Any] = []
    for ranks, shared in sorted(by_ranks.items()):
        group = axis.comm.group
        if len(ranks) < axis.world_size:
            lines = axis_groups(ctx.mesh, ("pipeline",))
            group, _ = dist.new_subgroups_by_enumeration(
                [[line[rank] for rank in ranks] for line in lines],
                timeout=timedelta(seconds=ctx.comm.timeout_s),
            )
            if axis.rank in ranks:
                opened.append(group)
        if axis.rank in ranks:
            sums.append((group, tuple(shared)))
    return tuple(sums), opened


def reduce_grads(model: Wrapped) -> None:
    """Reduce the gradients of a closing window.

    Effects:
        One all-reduce per dtype for parameters shared by the same ranks, and one over the data
        axis for parameters that are not sharded along it. A parameter that several stages share and
        none uses gets a zero gradient.
    """
    named = dict(model.module.named_parameters(remove_duplicate=False))
    for group, names in model.engine.shared_groups:
        grads: list[Tensor] = []
        for name in names:
            parameter = named[name]
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # Ranks that differ in the pipeline axis alone hold the same part of it.
            grads += local_grads([parameter])
        step_functions.once_per_dtype(functools.partial(dist.all_reduce, group=group), grads)
    data = model.ctx.axis("data")
    if data.world_size > 1:
        average_grads(local_grads(p for p in model.module.parameters() if not _is_sharded(p)), data)


def _is_sharded(parameter: Any) -> bool:
    """Whether torch's FSDP manages it, and so averages its gradients itself."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and not {"replicate", "shard"}.isdisjoint(mesh.mesh_dim_names)


def clip_norm(model: Wrapped, max_norm: float, **options: Any) -> Tensor:
    """Clip by the norm over all stages, each parameter counted once."""
    engine = model.engine
    copies = frozenset(
        id(parameter)
        for name, parameter in model.module.named_parameters()
        if engine.partition.holders(name)[0] != engine.axis.rank
    )
    return step_functions.clip_norm(model, max_norm, copies, **options)
