"""A model under DeepSpeed: tensors by name for a checkpoint, and full weights.

Each rank saves the flat shards that it holds, so a checkpoint resumes at another world size, at
another stage, or without DeepSpeed.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain.backends.core.model_state import load_extra, load_state, state_of
from fxtrain.backends.core.open_windows import counts_state, saved_windows
from fxtrain.backends.core.optimizer_state import load_schedulers, parameter_names
from fxtrain.backends.core.weights import from_first_rank, in_user_dtypes, torch_weights
from fxtrain.backends.deepspeed.config import ZERO, device, section
from fxtrain.backends.deepspeed.setup import import_deepspeed
from fxtrain.errors import CheckpointError, PlanError
from fxtrain.ops.optimizer_settings import flattened
from fxtrain.ops.whole_tensors import plain_name, weights_of
from fxtrain.state import FlatShard, Key, ModelState, StateReader, TensorIndex, Weight, Wrapped
from fxtrain.state.keys import OPTIMIZER, WEIGHTS


def engine_state(model: Wrapped) -> ModelState:
    """This rank's part of full-precision parameters and optimizer states, and buffers.

    Effects:
        Gathers frozen parameters that are on nvme or quantized; every rank must take part.

    Raises:
        CheckpointError: an accumulation window is open, or states are on nvme.
    """
    if model.engine is model.module:
        return state_of(model)
    _check_savable(model)
    masters = {each.parameter: each for each in _trained(model)}
    local = {
        id(parameter): _local(parameter, masters.get(parameter))
        for parameter in model.module.parameters()
    }
    tensors: dict[Key, Tensor | FlatShard] = {}
    extra: dict[str, Any] = {}
    for name, value in model.module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            tensors[Key(WEIGHTS, plain_name(name))] = local.get(id(value), value)
        else:
            extra[plain_name(name)] = value
    values: dict[str, Any] = {"module": extra, "optimizers": [], "schedulers": [], "scaler": None}
    values["settings"] = dict(model.strategy_state.values)  # for readers of the manifest
    if model.optimizers:
        states, facts = _optimizer_state(model)
        tensors.update(states)
        values["optimizers"] = [facts]
        values["schedulers"] = [
            scheduler.state_dict() for scheduler in flattened(model.scheduler or ())
        ]
        values["scaler"] = _scale_state(model.engine.optimizer)
    buffers = {Key(WEIGHTS, plain_name(name)) for name, _ in model.module.named_buffers()}
    return ModelState(
        tensors=tensors,
        own=counts_state(model.window),
        values=values,
        varies_by_rank=frozenset(buffers & tensors.keys()),
    )


def load_engine_state(model: Wrapped, saved: StateReader) -> None:
    """Restore a saved state into an engine, in place.

    Raises:
        CheckpointError: the state is of another model or optimizer, or of an open window.
    """
    if model.engine is model.module:
        load_state(model, saved)
        return
    _check_savable(model)
    windows = saved_windows(saved)
    if windows and windows[0].micro:
        raise CheckpointError(
            "The checkpoint was saved inside an accumulation window, whose gradients "
            "DeepSpeed cannot restore. Save after an update, where report.applied is true."
        )
    trained = list(_trained(model))
    _load_module(model, saved, {each.parameter: each for each in trained})
    if model.optimizers:
        _load_optimizer(model, saved, trained)
    model.window.sums.zero_()
    model.window.updates = windows[0].updates if windows else saved.updates


def _check_savable(model: Wrapped) -> None:
    if model.window.micro:
        raise CheckpointError(
            "DeepSpeed keeps the gradients of an open accumulation window in its engine, where "
            "they cannot be read. Save and restore after the next update (report.applied)."
        )
    if model.ctx.mesh.tensor > 1:
        raise CheckpointError(
            "Weights that AutoTP has split over ranks cannot be gathered here. Use "
            "model.engine.save_checkpoint(...), or save_16bit_model(...) for full weights."
        )
    if device(section(model.strategy_state.values, ZERO), "offload_optimizer") == "nvme":
        raise CheckpointError(
            "Optimizer states on nvme cannot be read back for a checkpoint. Use "
            "offload_optimizer='cpu', or model.engine.save_checkpoint(...)."
        )


@attrs.frozen(eq=False)
class _Trained:
    """A trained parameter, and where its optimizer keeps it."""

    name: str
    parameter: Any
    group: int
    master: Tensor
    full_shape: bool  # the master is this parameter's, not a rank's part of many


_Masters = Mapping[Tensor, _Trained]  # by parameter


def _trained(model: Wrapped) -> Iterator[_Trained]:
    """Every trained parameter, by the lists in which each stage keeps them."""
    if not model.optimizers:
        return
    optimizer = model.engine.optimizer
    names = parameter_names(model.module)
    lists: Sequence[Sequence[Tensor]]
    masters: Sequence[Sequence[Tensor]]
    full_shape = True
    if optimizer is model.engine.basic_optimizer:
        lists = masters = [group["params"] for group in optimizer.param_groups]
    elif hasattr(optimizer, "fp32_groups"):
        lists, masters = optimizer.fp16_groups, optimizer.fp32_groups
    else:
        lists, flats = _flats(optimizer)
        full_shape = False
        masters = [[flat] * len(some) for some, flat in zip(lists, flats, strict=True)]
    groups = getattr(optimizer, "sub_group_to_group_id", range(len(lists)))
    for index, (parameters, own) in enumerate(zip(lists, masters, strict=True)):
        for parameter, master in zip(parameters, own, strict=True):
            name = names[id(parameter)]
            yield _Trained(name, parameter, groups[index], master, full_shape)


def _flats(optimizer: Any) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Lists of parameters, and this rank's part of each list as one flat master."""
    for lists, flats in (
        ("bit16_groups", "single_partition_of_fp32_groups"),
        ("fp16_groups", "fp32_partitioned_groups_flat"),
        ("bf16_groups", "fp32_groups_flat_partition"),
    ):
        if hasattr(optimizer, flats):
            return getattr(optimizer, lists), getattr(optimizer, flats)
    raise CheckpointError(
        f"DeepSpeed's {type(optimizer).__name__} cannot be saved here. Use "
        f"model.engine.save_checkpoint(...)."
    )


def _optimizer_state(model: Wrapped) -> tuple[dict[Key, Tensor | FlatShard], dict[str, Any]]:
    """States by parameter, and everything else, in the form of torch's strategies."""
    (optimizer,) = model.optimizers
    _link_states(model.engine.optimizer, optimizer)
    tensors: dict[Key, Tensor | FlatShard] = {}
    states: dict[str, Any] = {}
    members: list[list[str]] = [[] for _ in optimizer.param_groups]
    for each in _trained(model):
        members[each.group].append(each.name)
        state = optimizer.state.get(each.master)
        if not state:
            continue
        plain = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        for key, value in state.items():
            if key in plain:
                continue
            if not each.full_shape:
                # A step count is one tensor for all parameters of a list.
                value = _part(each.parameter, key) if _is_sharded(each, value) else value.clone()
            tensors[_key(each, key)] = value
        states[each.name] = {"keys": list(state), "plain": plain}
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": names}
        for group, names in zip(optimizer.param_groups, members, strict=True)
    ]
    return tensors, {"kind": type(optimizer).__name__, "groups": groups, "state": states}


def _link_states(engine_optimizer: Any, optimizer: torch.optim.Optimizer) -> None:
    """Make parameters find their states at stages 1 and 2.

    DeepSpeed does so in the first update, when only the first group has states.
    """
    link = getattr(engine_optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None and optimizer.state:
        engine_optimizer._hp_optimizer_states_linked = False
        link()


def _is_sharded(trained: _Trained, value: Tensor) -> bool:
    """Whether a state is as long as the flat master; a step count is not."""
    return not trained.full_shape and value.dim() > 0 and value.numel() == trained.master.numel()


def _key(trained: _Trained, state: str) -> Key:
    return Key.of(OPTIMIZER, 0, trained.name, state)


def _load_module(model: Wrapped, saved: StateReader, masters: _Masters) -> None:
    here = {
        plain_name(name): value for name, value in model.module.state_dict(keep_vars=True).items()
    }
    names = {key.name for key in saved.shapes if key.kind == WEIGHTS}
    wanted = {name for name, value in here.items() if isinstance(value, Tensor)}
    shapes = {name: tuple(getattr(here[name], "ds_shape", here[name].shape)) for name in wanted}
    wrong = sorted(
        {*(wanted ^ names)}
        | {n for n in wanted & names if saved.shapes[Key(WEIGHTS, n)][0] != shapes[n]}
    )
    if wrong:
        raise CheckpointError(
            f"The checkpoint is of a different model: it differs in {', '.join(wrong[:40])}.",
            code="FX603",
        )
    for name in sorted(wanted):
        value = _read(Key(WEIGHTS, name), saved)
        if saved.ranks == saved.loading_ranks:
            drifted = saved.own(Key(WEIGHTS, name), saved.rank)
            value = value if drifted is None else drifted
        _set_whole(here[name], value.to(model.ctx.device), masters.get(here[name]))
    load_extra(model.module, saved.values["module"])


def _read(key: Key, saved: StateReader) -> Tensor:
    shape, dtype = saved.shapes[key]
    value = torch.empty(shape, dtype=dtype, device="cpu")
    saved.fill(key, value)
    return value


@torch.no_grad()
def _set_whole(tensor: Tensor, value: Tensor, trained: _Trained | None) -> None:
    """Write a value into the weight and into its full-precision master."""
    if hasattr(tensor, "ds_id"):
        with import_deepspeed().zero.GatheredParameters([tensor], modifier_rank=0):
            tensor.data.copy_(value)
    else:
        tensor.data.copy_(value)
    if trained is None:
        return
    if trained.full_shape:
        trained.master.data.copy_(value)
    else:
        flat = value.float().flatten()
        _fill_part(
            trained.parameter,
            None,
            flat.dtype,
            lambda part: part.values.copy_(flat[part.start : part.start + len(part.values)]),
        )


def _load_optimizer(model: Wrapped, saved: StateReader, trained: list[_Trained]) -> None:
    (optimizer,) = model.optimizers
    stored, kind = saved.values["optimizers"], type(optimizer).__name__
    members: list[set[str]] = [set() for _ in optimizer.param_groups]
    for each in trained:
        members[each.group].add(each.name)
    # Checkpoints of other libraries do not name the optimizer.
    if len(stored) != 1 or stored[0]["kind"] not in (kind, ""):
        kinds = ", ".join(each["kind"] for each in stored) or "no optimizer"
        raise CheckpointError(f"The model has a {kind}, but the checkpoint {kinds}.", code="FX603")
    if members != [set(group["params"]) for group in stored[0]["groups"]]:
        raise CheckpointError(
            f"The groups of this {kind} have other parameters than those saved.", code="FX603"
        )
    for group, options in zip(optimizer.param_groups, stored[0]["groups"], strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
    _make_states(optimizer, trained, stored[0]["state"], saved)
    _link_states(model.engine.optimizer, optimizer)
    for each in trained:
        _fill_states(optimizer, each, saved)
    load_schedulers(model, saved)
    _load_scale(model.engine.optimizer, saved.values["scaler"])


def _make_states(
    optimizer: torch.optim.Optimizer,
    trained: list[_Trained],
    states: Mapping[str, Any],
    saved: StateReader,
) -> None:
    """Give each master one state, with every key that one of its parameters was saved with.

    Sharded states are zero where a parameter was saved without them. The old states are dropped
    first, so that both are never in memory.
    """
    new_states: dict[Tensor, dict[str, Any]] = {each.master: {} for each in trained}
    for master in new_states:
        optimizer.state.pop(master, None)
    for each in trained:
        new_state = new_states[each.master]
        state = states.get(each.name) or {"keys": (), "plain": {}}
        for key in state["keys"]:
            if key in state["plain"]:
                new_state.setdefault(key, state["plain"][key])
            elif key == "step" or not saved.shapes[_key(each, key)][0]:
                value = _read(_key(each, key), saved)
                if key in new_state and not each.full_shape:
                    # DeepSpeed keeps one count for the parameters of a list: the largest.
                    value = torch.maximum(new_state[key], value)
                new_state[key] = value
            elif key not in new_state:
                new_state[key] = _empty_state(each, key, saved)
    optimizer.state.update({master: state for master, state in new_states.items() if state})


def _empty_state(trained: _Trained, key: str, saved: StateReader) -> Tensor:
    """Zeros for a state: as large as the master, for all parameters in it."""
    shape, dtype = saved.shapes[_key(trained, key)]
    if trained.full_shape:
        return torch.zeros(shape, dtype=dtype, device=trained.master.device)
    wanted = _shape_of(trained.parameter)
    if shape != wanted:
        raise CheckpointError(
            f"The optimizer's {key!r} of {trained.name} was saved with shape {shape}, and ZeRO "
            f"shards only states of the parameter's shape {wanted}. Use DeepSpeed(stage=0)."
        )
    return torch.zeros_like(trained.master, dtype=dtype, requires_grad=False)


@torch.no_grad()
def _fill_states(optimizer: torch.optim.Optimizer, trained: _Trained, saved: StateReader) -> None:
    """Read the states of one parameter: this rank's shard of them, if they are sharded."""
    for key, value in optimizer.state.get(trained.master, {}).items():
        stored = _key(trained, key)
        if not isinstance(value, Tensor) or stored not in saved.shapes:
            continue
        if trained.full_shape:
            value.copy_(_read(stored, saved))
        elif _is_sharded(trained, value):
            dtype = saved.shapes[stored][1]
            _fill_part(trained.parameter, key, dtype, functools.partial(saved.fill, stored))


def _scale_state(optimizer: Any) -> dict[str, Any] | None:
    """The fields of a dynamic loss scale."""
    if not getattr(optimizer, "dynamic_loss_scale", False):
        return None
    facts = vars(optimizer.loss_scaler).items()
    return {name: value for name, value in facts if isinstance(value, bool | int | float)}


def _load_scale(optimizer: Any, facts: Mapping[str, Any] | None) -> None:
    if facts is None or not getattr(optimizer, "dynamic_loss_scale", False):
        return
    for name in facts.keys() & vars(optimizer.loss_scaler).keys():
        setattr(optimizer.loss_scaler, name, facts[name])


def engine_weights(model: Wrapped) -> dict[str, Weight]:
    """The tensors of the module by name; parameters are gathered from their masters.

    Raises:
        PlanError: AutoTP has replaced layers.
    """
    if model.ctx.mesh.tensor > 1:
        raise PlanError(
            "DeepSpeed(tensor_parallel=...): AutoTP has replaced layers of the module by layers "
            "with a part of each weight. Write full weights with "
            "model.engine.save_16bit_model(folder)."
        )
    if model.engine is model.module:
        return torch_weights(model)
    masters = {each.parameter: each for each in _trained(model)}

    def gather(parameter: Tensor, dtype: torch.dtype) -> Tensor:
        return _full(parameter, masters.get(parameter)).to(dtype)

    def fill(parameter: Tensor, read: Callable[[TensorIndex | None], Tensor]) -> None:
        _set_whole(parameter, read(None).to(model.ctx.device), masters.get(parameter))

    weights = weights_of(model.module)
    for name, weight in weights.items():
        if isinstance(weight.like, nn.Parameter):
            dtype = model.dtypes.get(name, weight.dtype)
            weights[name] = attrs.evolve(
                weight,
                shape=_shape_of(weight.like),
                dtype=dtype,
                gather=functools.partial(gather, weight.like, dtype),
                fill=functools.partial(fill, weight.like),
                together=True,
            )
        else:
            weights[name] = from_first_rank(weight, model.ctx.axis("data"))
    return in_user_dtypes(weights, model)


def _shape_of(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


@torch.no_grad()
def _local(parameter: Any, trained: _Trained | None) -> Tensor | FlatShard:
    """This rank's part of a parameter in full precision; gathers what can only be gathered."""
    if trained is not None:
        return trained.master.detach() if trained.full_shape else _part(parameter)
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    here = parameter.ds_tensor
    if here.final_location is not None or hasattr(here, "ds_quant_scale"):
        return _full(parameter, None)
    return _shard_at_3(parameter, here)


@torch.no_grad()
def _full(parameter: Any, trained: _Trained | None) -> Tensor:
    """A copy of the full value of a parameter, from its master; gathers what is sharded."""
    if trained is not None and trained.full_shape:
        return trained.master.detach().clone()
    if trained is not None:
        return import_deepspeed().utils.safe_get_full_fp32_param(parameter).detach().clone()
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().clone()
    with import_deepspeed().zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _part(parameter: Any, key: str | None = None) -> FlatShard:
    """This rank's part of a sharded parameter's master, or of a state of it."""
    if hasattr(parameter, "ds_id"):
        utils = import_deepspeed().utils
        if key is None:
            return _shard_at_3(parameter, utils.safe_get_local_fp32_param(parameter).float())
        return _shard_at_3(parameter, utils.safe_get_local_optimizer_state(parameter, key))
    mapping, shape = parameter._hp_mapping, tuple(parameter.shape)
    if mapping is None:  # a rank may have no part of a parameter
        return FlatShard(shape=shape, start=0, values=torch.empty(0, device="cpu"))
    values = mapping.get_hp_fragment(key)
    values = values.float() if key is None else values
    return FlatShard(shape=shape, start=mapping.lp_fragment_address.start, values=values.cpu())


def _shard_at_3(parameter: Any, values: Tensor) -> FlatShard:
    """At stage 3, ranks have parts of one length, of which the last may be padded."""
    rank = import_deepspeed().comm.get_rank(group=parameter.ds_process_group)
    start = min(rank * values.numel(), parameter.ds_numel)
    local = values.flatten()[: parameter.ds_numel - start]
    return FlatShard(shape=tuple(parameter.ds_shape), start=start, values=local.cpu())


@torch.no_grad()
def _fill_part(
    parameter: Any, key: str | None, dtype: torch.dtype, fill: Callable[[FlatShard], object]
) -> None:
    """Let `fill` set this rank's part of a sharded parameter's master, or of a state of it."""
    if hasattr(parameter, "ds_id"):
        utils = import_deepspeed().utils
        values = torch.zeros(parameter.partition_numel(), dtype=dtype, device="cpu")
        fill(_shard_at_3(parameter, values))
        if key is None:
            utils.safe_set_local_fp32_param(parameter, values)
        else:
            utils.safe_set_local_optimizer_state(parameter, values, key)
    elif (mapping := parameter._hp_mapping) is not None:
        fragment = mapping.get_hp_fragment(key)
        values = torch.empty(fragment.shape, dtype=dtype, device="cpu")
        start = mapping.lp_fragment_address.start
        fill(FlatShard(shape=tuple(parameter.shape), start=start, values=values))
        fragment.data.copy_(values)
