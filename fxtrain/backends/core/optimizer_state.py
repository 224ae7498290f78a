"""The state of optimizers by the names of parameters: read and restored."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxtrain import _extensions
from fxtrain._record import few
from fxtrain._tree import map_leaves
from fxtrain.backends.core.initial_values import copy_shard
from fxtrain.backends.core.optimizers import local_optimizer, optimizer_class, place_of_states
from fxtrain.errors import CheckpointError
from fxtrain.ops.optimizer_settings import flattened, with_option
from fxtrain.ops.whole_tensors import local_values, plain_name
from fxtrain.state import Key, StateReader, Wrapped
from fxtrain.state.keys import OPTIMIZER

_OF_TORCH = ("state", "param_groups")


def optimizer_state(
    optimizer: torch.optim.Optimizer, index: int, names: Mapping[int, str]
) -> tuple[dict[Key, Tensor], dict[str, Any]]:
    """The tensors of a model's optimizer of some number, and everything else."""
    tensors: dict[Key, Tensor] = {}
    values: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for group, named in _groups(optimizer, names):
        rest = {key: value for key, value in group.items() if key != "params"}
        groups.append({**rest, "params": [name for name, _ in named]})
        for name, parameter in named:
            state = local_optimizer(optimizer).state.get(parameter)
            if state is None:
                continue
            held, values[name] = _split(state)
            for path, value in held.items():
                tensors[Key.of(OPTIMIZER, index, name, *path)] = value
    return tensors, {
        "kind": optimizer_class(optimizer),
        "groups": groups,
        "state": values,
    }


def more_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer keeps for no parameter: states under other keys, and its own entries."""
    part = local_optimizer(optimizer)
    keyed = {key: value for key, value in part.state.items() if not isinstance(key, Tensor)}
    own = {key: value for key, value in part.state_dict().items() if key not in _OF_TORCH}
    return {**({"keyed": keyed} if keyed else {}), **({"own": own} if own else {})}


def _load_more(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
    """Restore what `more_state` returned."""
    part = local_optimizer(optimizer)
    for key in [key for key in part.state if not isinstance(key, Tensor)]:
        del part.state[key]
    if not values.keys() & {"keyed", "own"}:
        return
    # A stage of a pipeline may have no parameter.
    devices = [p.device for group in part.param_groups for p in group["params"][:1]]
    place = torch.empty(0, device=devices[0] if devices else "cpu")
    if own := values.get("own"):
        kept, groups = dict(part.state), part.param_groups
        state = {key: value for key, value in part.state_dict().items() if key in _OF_TORCH}
        part.load_state_dict({**state, **({"state": {}} if state else {}), **_placed(own, place)})
        part.state.update(kept)
        part.param_groups = groups
    part.state.update(_placed(values.get("keyed", {}), place))


def _placed(value: Any, parameter: Tensor) -> Any:
    """A value whose tensors are beside a parameter, and sharded as it is if they have its shape."""

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
            return leaf
        if not isinstance(parameter, DTensor) or leaf.shape != parameter.shape:
            return leaf.to(parameter.device)
        shard = torch.empty_like(parameter, dtype=leaf.dtype, requires_grad=False)
        copy_shard(leaf, shard)
        return shard

    return map_leaves(place, value) if isinstance(value, list | tuple | dict) else value


def _split(state: Mapping[str, Any]) -> tuple[dict[tuple[str, ...], Tensor], dict[str, Any]]:
    """The tensors of one parameter's state, packed ones by two names, and everything else."""
    tensors: dict[tuple[str, ...], Tensor] = {}
    plain: dict[str, Any] = {}
    packed: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            plain[key] = value
        elif type(value) is Tensor or not _extensions.is_packed(value):
            tensors[(key,)] = value
        else:
            inside, packed[key] = _extensions.pack_value(value)
            tensors |= {(key, name): each for name, each in inside.items()}
    values: dict[str, Any] = {"keys": list(state), "plain": plain}
    if packed:
        values["packed"] = packed
    return tensors, values


def load_optimizers(model: Wrapped, saved: StateReader, kept: Iterable[Tensor]) -> None:
    """Restore a model's optimizers, schedulers and loss scale.

    Args:
        kept: Tensors with which no optimizer state may share memory.
    """
    states = saved.values["optimizers"]
    if len(states) != len(model.optimizers):
        raise CheckpointError(
            f"The model has {len(model.optimizers)} optimizers, and the checkpoint {len(states)}. "
            f"Wrap the model with the same optimizers, or with none to only run it.",
            code="FX603",
        )
    names = parameter_names(model.module)
    taken = {_data_pointer(tensor) for tensor in kept}
    for index, (optimizer, values) in enumerate(zip(model.optimizers, states, strict=True)):
        whole = {**values, "state": _states(values["state"], index, saved)}
        _load_optimizer(optimizer, whole, index, names, saved, taken)
    load_schedulers(model, saved)
    if model.scaler is not None and saved.values["scaler"] is not None:
        model.scaler.load_state_dict(saved.values["scaler"])


def load_schedulers(model: Wrapped, saved: StateReader) -> None:
    """Restore a model's schedulers."""
    schedulers, states = flattened(model.scheduler or ()), saved.values["schedulers"]
    if len(schedulers) != len(states):
        raise CheckpointError(
            f"The model has {len(schedulers)} schedulers, and the checkpoint {len(states)}. Wrap "
            f"the model with the same schedulers.",
            code="FX603",
        )
    for scheduler, state in zip(schedulers, states, strict=True):
        scheduler.load_state_dict(state)
    model.status.scheduled_update = None


def values_as_bytes(states: Mapping[str, Any], index: int) -> Tensor:
    for name, state in states.items():
        for key, value in state["plain"].items():
            try:
                json.dumps(value)
            except TypeError as error:
                raise CheckpointError(
                    f"{Key.of(OPTIMIZER, index, name, key)}: {error}. Where ranks have optimizer "
                    f"states of their own, a state is a tensor, or consists of numbers and strings."
                ) from None
    return torch.frombuffer(bytearray(json.dumps(states).encode()), dtype=torch.uint8)


def parameter_names(module: nn.Module) -> dict[int, str]:
    """The names of parameters in checkpoints, by their ids."""
    return {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}


def own_tensor_of_ranks(saved: StateReader, key: Key) -> list[Tensor]:
    """Each rank's own copy of a tensor, where ranks differ."""
    tensors = [saved.own(key, rank) for rank in range(saved.ranks)]
    return [tensor for tensor in tensors if tensor is not None]


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    values: Mapping[str, Any],
    index: int,
    names: Mapping[int, str],
    saved: StateReader,
    taken: set[int],
) -> None:
    """Restore an optimizer directly: torch's loading would cast states to the parameters' dtype."""
    part = local_optimizer(optimizer)
    parameters = {id(parameter) for group in part.param_groups for parameter in group["params"]}
    groups = list(_groups(optimizer, names))
    own = [[name for name, _ in named] for _, named in groups]
    theirs = [group["params"] for group in values["groups"]]
    kind = optimizer_class(optimizer)
    # Checkpoints of other libraries do not name the kind.
    if values["kind"] not in (kind, "") or own != theirs:
        was = (
            f"{Key.of(OPTIMIZER, index)} is {kind} here, and was saved as {values['kind'] or 'one'}"
        )
        lines = [] if own == theirs else _differences(own, theirs)
        raise CheckpointError(
            "\n".join(
                [
                    f"{was}{' with other parameters:' if lines else '.'}",
                    *lines,
                    "Build it as it was when the checkpoint was saved.",
                ]
            ),
            code="FX603",
        )
    _load_more(optimizer, values)
    for (group, named), options in zip(groups, values["groups"], strict=True):
        for key, value in options.items():
            if key != "params":
                group[key] = with_option(value, group.get(key))
        fast = bool(group.get("capturable")) or bool(group.get("fused"))
        for name, parameter in named:
            state = values["state"].get(name)
            if state is None or id(parameter) not in parameters:
                part.state.pop(parameter, None)
                continue
            old = part.state.get(parameter, {})
            place = place_of_states(optimizer, parameter)
            read = _reader(place, old, saved, taken, fast=fast)
            part.state[parameter] = {
                key: _read_value(state, key, partial(read, index, name), parameter, place)
                for key in state["keys"]
            }


def _read_value(
    state: Mapping[str, Any],
    key: str,
    read: Callable[..., Tensor],
    parameter: Tensor,
    place: Tensor,
) -> Any:
    """One entry of a parameter's state, as it was saved."""
    if key in state["plain"]:
        return _placed(state["plain"][key], place)
    packed = state.get("packed", {})
    if key not in packed:
        return read(key)
    return _extensions.unpack_value(packed[key], partial(read, key), parameter)


def _differences(own: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]]) -> list[str]:
    """How the parameters of an optimizer differ from those of the saved one."""
    here, there = (
        {name: index for index, group in enumerate(groups) for name in group}
        for groups in (own, theirs)
    )
    lines = few(
        f"  {name} is not in the saved one"
        if name not in there
        else f"  {name} is only in the saved one"
        if name not in here
        else f"  {name} is in group {here[name]}, and was in group {there[name]}"
        for name in {**here, **there}
        if here.get(name) != there.get(name)
    )
    return lines or ["  The groups have the same parameters, in another order."]


def _states(states: Mapping[str, Any], index: int, saved: StateReader) -> Mapping[str, Any]:
    """Which state an optimizer keeps for which parameter, on all ranks together."""
    every = dict(states)
    for each in own_tensor_of_ranks(saved, Key.of(OPTIMIZER, index, "state")):
        every = {**values_from_bytes(each), **every}
    return every


def values_from_bytes(raw: Tensor) -> dict[str, Any]:
    """What `values_as_bytes` was given."""
    return json.loads(bytes(raw.tolist()))


def _reader(
    parameter: Tensor,
    old: Mapping[str, Any],
    saved: StateReader,
    taken: set[int],
    *,
    fast: bool,
) -> Callable[..., Tensor]:
    """How to create a parameter's state: sharded like the parameter, if it has its shape.

    An existing state is filled in place, which saves memory, unless its memory is already
    `taken`; `taken` is extended.
    """

    def read(index: int, name: str, *path: str) -> Tensor:
        key = Key.of(OPTIMIZER, index, name, *path)
        shape, dtype = saved.shapes[key]
        current: Any = old.get(path[0]) if len(path) == 1 else None
        if shape == tuple(parameter.shape) and _reusable(current, parameter, dtype, taken):
            tensor = current
        elif shape == tuple(parameter.shape):
            tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:
            # torch counts steps on the host, unless a kernel reads the count.
            on_host = path == ("step",) and not fast
            tensor = torch.empty(shape, dtype=dtype, device="cpu" if on_host else parameter.device)
        saved.fill(key, tensor)
        return tensor

    return read


def _reusable(state: Any, parameter: Tensor, dtype: torch.dtype, taken: set[int]) -> bool:
    """Whether a state is laid out as its parameter is, in memory of its own."""
    if not isinstance(state, Tensor) or _layout(state) != _layout(parameter):
        return False
    memory = _data_pointer(state)
    if state.dtype != dtype or not memory or memory in taken:
        return False
    taken.add(memory)
    return True


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    spread = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    return (tensor.shape, tensor.device, *spread)


def _data_pointer(tensor: Tensor) -> int:
    """The address of its storage; 0 for tensors without one, such as on XLA devices."""
    local = local_values(tensor)
    return local.untyped_storage().data_ptr() if local.data_ptr() else 0


def _groups(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[dict[str, Any], list[tuple[str, Tensor]]]]:
    """Each group with its parameters by name; by index if they are not the module's."""
    for i, group in enumerate(optimizer.param_groups):
        yield group, [(names.get(id(p), f"{i}.{j}"), p) for j, p in enumerate(group["params"])]
