"""What a model on torch's own machinery needs to go on: taken out by name, and put back."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxtrain._errors import CheckpointError
from fxtrain.backends._local_state import goes_on, load_round, round_state, weighted_mean
from fxtrain.backends._optim import part_of
from fxtrain.backends._start import keep_part
from fxtrain.state import ModelState, Saved, Wrapped

__all__ = ["each_of", "load_extra", "load_state", "of_all", "state_of"]

_SCALE = 0  # place in the tally
_SENDS_BUFFERS = "require_forward_param_sync"


def state_of(model: Wrapped) -> ModelState:
    """Parameters, buffers, optimizers, schedulers, loss scale, and an open window's gradients."""
    tensors, extra = _module_state(model.module)
    optimizers: list[Any] = []
    trained = _trained(model)
    steady = {name for name, tensor in tensors.items() if id(tensor) in trained}
    own = {"tally": model.tally, "counts": model.counts}
    for index, optimizer in enumerate(model.optimizers):
        held, values = _optimizer_state(optimizer, f"optimizer.{index}", _names(model.module))
        tensors.update(held)
        optimizers.append(values)
        steady |= held.keys() if _has_hooks(optimizer) else set()
        if model.round is not None or part_of(optimizer) is not optimizer:
            own[f"optimizer.{index}.state"] = _as_bytes(values["state"], f"optimizer.{index}")
    for name, parameter in model.module.named_parameters():
        if parameter.grad is not None:
            # A spread gradient is reduced already; a plain one is this rank's part of a mean.
            place = tensors if isinstance(parameter.grad, DTensor) else own
            place[f"grad.{name}"] = parameter.grad
    values: dict[str, Any] = {
        "module": extra,
        "optimizers": optimizers,
        "schedulers": [one.state_dict() for one in each_of(model.scheduler)],
        "scaler": None if model.scaler is None else model.scaler.state_dict(),
        # torch's DDP sends buffers before a forward if the one before it ended a window.
        "sends_buffers": getattr(model.engine, _SENDS_BUFFERS, None),
    }
    drifting = {f"module.{name}" for name, _ in model.module.named_buffers()} & tensors.keys()
    if model.round is not None:
        drifting, steady = set(tensors), set()  # the end of a round changes parameters too
        values["copy"] = len(model.round.peers)  # its ranks
        shared, mine = round_state(model.round)
        tensors |= shared
        own |= mine
    return ModelState(
        tensors=tensors,
        own=own,
        values=values,
        drifting=frozenset(drifting),
        steady=frozenset(steady),
    )


def _trained(model: Wrapped) -> set[int]:
    """Parameters that nothing but an optimizer's step changes, by id."""
    trained = {
        id(parameter)
        for optimizer in model.optimizers
        if _has_hooks(optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    # These are scaled in forward.
    kinds = (nn.Embedding, nn.EmbeddingBag)
    parts = [part for part in model.module.modules() if isinstance(part, kinds)]
    return trained - {id(part.weight) for part in parts if part.max_norm is not None}


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its steps can be waited for: torch puts hooks around them in its constructor."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def load_state(model: Wrapped, saved: Saved) -> None:
    """Put a saved state into a model, in place.

    At another number of ranks the gradients of an open window become the mean over the ranks
    that saved, which is what they stand for. So do parameters of copies that trained alone, there
    and where all updates are made together.

    Raises:
        CheckpointError: it is the state of another model.
    """
    tensors, _ = _module_state(model.module)
    _check_names(tensors, saved)
    trained = {f"module.{name}" for name, _ in model.module.named_parameters()}
    mine, same = goes_on(model.round, saved), saved.ranks == saved.here
    for name, tensor in tensors.items():
        saved.fill(name, tensor)
        if name in trained and not mine:
            mean = weighted_mean(saved, name)
            if mean is not None:
                keep_part(mean, tensor.detach())
        elif same and (drifted := saved.own(name, saved.rank)) is not None:
            _held(tensor.detach()).copy_(drifted)
    load_extra(model.module, saved.values["module"])
    if model.optimizers:
        _load_optimizers(model, saved)
    if model.round is not None:
        load_round(model.round, saved)
    _load_window(model, saved)


def _module_state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        (tensors if isinstance(value, Tensor) else extra)[f"module.{name}"] = value
    return tensors, extra


def _check_names(tensors: Mapping[str, Tensor], saved: Saved) -> None:
    there = {name for name in saved.shapes if name.startswith("module.")}
    problems = [f"  {name[7:]} is not in the checkpoint" for name in tensors.keys() - there]
    problems += [f"  {name[7:]} is in the checkpoint only" for name in there - tensors.keys()]
    for name in tensors.keys() & there:
        shape, dtype = saved.shapes[name]
        tensor = tensors[name]
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            problems.append(
                f"  {name[7:]} is {dtype} {list(shape)} in the checkpoint, and "
                f"{tensor.dtype} {list(tensor.shape)} in the model"
            )
    if problems:
        shown = sorted(problems)[:40]
        more = [f"  and {len(problems) - 40} more"] if len(problems) > 40 else []
        raise CheckpointError("\n".join(["The checkpoint is of another model:", *shown, *more]))


def load_extra(module: nn.Module, extra: Mapping[str, Any]) -> None:
    """Give submodules what they keep beside tensors."""
    for name, value in extra.items():
        path = name.removeprefix("module.").rpartition("_extra_state")[0].rstrip(".")
        module.get_submodule(path).set_extra_state(value)


def _held(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _names(module: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _optimizer_state(
    optimizer: torch.optim.Optimizer, prefix: str, names: Mapping[int, str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's tensors by the parameter they belong to, and everything else."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for group, named in _groups(optimizer, names):
        rest = {key: value for key, value in group.items() if key != "params"}
        groups.append({**rest, "params": [name for name, _ in named]})
        for name, parameter in named:
            state = part_of(optimizer).state.get(parameter)
            if state is None:
                continue
            held = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            tensors.update({f"{prefix}.{name}.{key}": value for key, value in held.items()})
            plain = {key: value for key, value in state.items() if key not in held}
            values[name] = {"keys": list(state), "plain": plain}
    return tensors, {"kind": type(part_of(optimizer)).__name__, "groups": groups, "state": values}


def _groups(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[dict[str, Any], list[tuple[str, Tensor]]]]:
    """Each group with its parameters by name; by place, where they are not the module's."""
    for i, group in enumerate(optimizer.param_groups):
        yield group, [(names.get(id(p), f"{i}.{j}"), p) for j, p in enumerate(group["params"])]


def _load_optimizers(model: Wrapped, saved: Saved) -> None:
    found = saved.values["optimizers"]
    if len(found) != len(model.optimizers):
        raise CheckpointError(
            f"The model has {len(model.optimizers)} optimizers, and was saved with {len(found)}. "
            f"Wrap it with the same, or with none to run it only."
        )
    names = _names(model.module)
    taken = {_memory(tensor) for tensor in _module_state(model.module)[0].values()}
    for index, (optimizer, values) in enumerate(zip(model.optimizers, found, strict=True)):
        prefix = f"optimizer.{index}"
        mine = goes_on(model.round, saved)
        states = _states(values["state"], prefix, saved, mine=mine)
        whole = {**values, "state": states}
        _load_optimizer(optimizer, whole, prefix, names, saved, taken, mine=mine)
    schedulers, states = each_of(model.scheduler), saved.values["schedulers"]
    if len(schedulers) != len(states):
        raise CheckpointError(
            f"The model has {len(schedulers)} schedulers, and was saved with {len(states)}."
        )
    for scheduler, state in zip(schedulers, states, strict=True):
        scheduler.load_state_dict(state)
    if model.scaler is not None and saved.values["scaler"] is not None:
        model.scaler.load_state_dict(saved.values["scaler"])


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    values: Mapping[str, Any],
    prefix: str,
    names: Mapping[int, str],
    saved: Saved,
    taken: set[int],
    *,
    mine: bool,
) -> None:
    """Fill an optimizer directly: torch's own loading would cast states to the parameters'."""
    part = part_of(optimizer)
    held = {id(parameter) for group in part.param_groups for parameter in group["params"]}
    groups = list(_groups(optimizer, names))
    own = [[name for name, _ in named] for _, named in groups]
    theirs = [group["params"] for group in values["groups"]]
    kind = type(part).__name__
    same = values["kind"] in (kind, "")  # files of other libraries do not say
    if not same or own != theirs:
        detail = f": {_first_difference(own, theirs)}" if same else ""
        raise CheckpointError(
            f"{prefix} is a {kind} here and was saved as a {values['kind']}, or holds other "
            f"parameters or groups{detail}. Build it as it was built then."
        )
    for (group, named), options in zip(groups, values["groups"], strict=True):
        for key, value in options.items():
            if key != "params":
                group[key] = _like(value, group.get(key))
        fast = bool(group.get("capturable")) or bool(group.get("fused"))
        for name, parameter in named:
            state = values["state"].get(name)
            if state is None or id(parameter) not in held:
                part.state.pop(parameter, None)
                continue
            old = part.state.get(parameter, {})
            read = _reader(parameter, old, saved, taken, fast=fast, mine=mine)
            part.state[parameter] = {
                key: state["plain"][key] if key in state["plain"] else read(f"{prefix}.{name}", key)
                for key in state["keys"]
            }


def _states(
    states: Mapping[str, Any], prefix: str, saved: Saved, *, mine: bool
) -> Mapping[str, Any]:
    """What an optimizer keeps of which parameter: rank 0's, where ranks do not differ in that.

    Args:
        mine: Copies of the model trained alone, and do so again.
    """
    name = f"{prefix}.state"
    if mine and (found := saved.own(name, saved.rank)) is not None:
        return _from_bytes(found)
    every = dict(states)
    for one in of_all(saved, name):
        every = {**_from_bytes(one), **every}
    return every


def _as_bytes(states: Mapping[str, Any], prefix: str) -> Tensor:
    try:
        text = json.dumps(states)
    except TypeError as error:
        raise CheckpointError(
            f"{prefix} keeps something of a parameter that is neither a tensor nor a plain value, "
            f"which cannot be saved where ranks have different states: {error}."
        ) from error
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _from_bytes(raw: Tensor) -> dict[str, Any]:
    return json.loads(bytes(raw.tolist()))


def _reader(
    parameter: Tensor,
    old: Mapping[str, Any],
    saved: Saved,
    taken: set[int],
    *,
    fast: bool,
    mine: bool,
) -> Callable[[str, str], Tensor]:
    """How a state of a parameter is made: spread like it, if it has its shape.

    A state that is there already is filled, which spares new memory; not one in memory that is
    `taken`, which grows.
    """

    def read(prefix: str, key: str) -> Tensor:
        name = f"{prefix}.{key}"
        shape, dtype = saved.shapes[name]
        there = old.get(key)
        if shape == tuple(parameter.shape) and _reusable(there, parameter, dtype, taken):
            made = there
        elif shape == tuple(parameter.shape):
            made = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:
            # torch counts steps on the host, unless a kernel reads them.
            on_host = key == "step" and not fast
            made = torch.empty(shape, dtype=dtype, device="cpu" if on_host else parameter.device)
        saved.fill(name, made)
        if mine and (drifted := saved.own(name, saved.rank)) is not None:
            _held(made).copy_(drifted)
        return made

    return read


def _reusable(state: Any, parameter: Tensor, dtype: torch.dtype, taken: set[int]) -> bool:
    """Whether a state lies where the parameter lies, in memory that is nobody else's."""
    if not isinstance(state, Tensor) or _layout(state) != _layout(parameter):
        return False
    memory = _memory(state)
    if state.dtype != dtype or memory in taken:
        return False
    taken.add(memory)
    return True


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    spread = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    return (tensor.shape, tensor.device, *spread)


def _memory(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def _like(value: Any, old: Any) -> Any:
    """A saved hyperparameter where the old one was: a tensor stays the tensor it is."""
    if isinstance(old, Tensor):
        return old.copy_(torch.as_tensor(value))
    return value


def _first_difference(own: list[list[str]], theirs: list[list[str]]) -> str:
    if len(own) != len(theirs):
        return f"{len(own)} groups here, {len(theirs)} there"
    for i, (here, there) in enumerate(zip(own, theirs, strict=True)):
        for a, b in zip(here, there, strict=False):
            if a != b:
                return f"group {i} has {a} here where it had {b}"
        if len(here) != len(there):
            return f"group {i} has {len(here)} parameters here, {len(there)} there"
    return ""


def _load_window(model: Wrapped, saved: Saved) -> None:
    """Gradients and account of an accumulation window that was open."""
    sends_buffers = saved.values.get("sends_buffers")
    if sends_buffers is not None and hasattr(model.engine, _SENDS_BUFFERS):
        setattr(model.engine, _SENDS_BUFFERS, bool(sends_buffers))
    tallies = of_all(saved, "tally")
    if not tallies:  # from another library, which saves no open window
        return
    # Weighted losses are divided by the ranks at the end of the window; others already were.
    factor = saved.ranks / saved.here if tallies[0][_SCALE] != 0 else 1.0
    for name, parameter in model.module.named_parameters():
        if f"grad.{name}" in saved.shapes:
            parameter.grad = torch.empty_like(parameter, requires_grad=False)
            saved.fill(f"grad.{name}", parameter.grad)
        elif saved.ranks == saved.here:
            _set_grad(parameter, saved.own(f"grad.{name}", saved.rank))
        else:
            parts = of_all(saved, f"grad.{name}")
            mean = sum(parts[1:], parts[0]) * (factor / saved.ranks) if parts else None
            _set_grad(parameter, mean)
    if saved.ranks == saved.here:
        tally, counts = tallies[saved.rank], of_all(saved, "counts")[saved.rank]
    else:
        # Every rank counts the same rows; weights add up over the ranks, so one takes them all.
        tally, counts = tallies[0].clone(), of_all(saved, "counts")[0]
        tally[1:] = torch.stack(tallies)[:, 1:].sum(0) if saved.rank == 0 else 0
    model.tally.copy_(tally)
    model.counts.copy_(counts)


def of_all(saved: Saved, name: str) -> list[Tensor]:
    """A tensor of its own of every rank that saved one."""
    found = [saved.own(name, rank) for rank in range(saved.ranks)]
    return [one for one in found if one is not None]


def _set_grad(parameter: nn.Parameter, value: Tensor | None) -> None:
    if value is None:
        parameter.grad = None
    elif parameter.grad is not None:
        parameter.grad.copy_(value)
    else:
        parameter.grad = value.to(parameter.device)


def each_of(made: Any) -> list[Any]:
    """The schedulers in what the factory returned, in order."""
    if made is None:
        return []
    if isinstance(made, Mapping):
        return list(made.values())
    return list(made) if isinstance(made, list | tuple) else [made]
