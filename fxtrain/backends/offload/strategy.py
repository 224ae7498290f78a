"""Stream units from the CPU or from disk to their device when they are needed."""

import functools
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain import big
from fxtrain.backends.core.initial_values import apply_with_buffers
from fxtrain.backends.core.model_state import load_state, state_of
from fxtrain.backends.core.module_changes import (
    prepare_module,
    send_values,
    xla_problems,
)
from fxtrain.backends.core.step_functions import average_grads
from fxtrain.backends.core.weights import torch_weights
from fxtrain.backends.offload.mapped_files import (
    digest_of,
    fits,
    map_file,
    mapped,
    unchanged,
    write_tensor,
)
from fxtrain.backends.offload.streaming import (
    DeviceCopies,
    Streaming,
    attach,
)
from fxtrain.backends.offload.units import PlacedTensor, placed_tensors, streamed_units
from fxtrain.backends.single import SINGLE, make_handle
from fxtrain.errors import CheckpointError, PlanError
from fxtrain.models import load_model
from fxtrain.models.quantized_loading import put_stored_layers, quantized_source
from fxtrain.models.tensor_sources import open_source
from fxtrain.ops.same_errors import fail_together
from fxtrain.ops.whole_tensors import set_values
from fxtrain.precision.quantizing import (
    allocate,
    has_no_memory,
    is_quantized,
    quantized_layers,
    stored_tensors,
)
from fxtrain.state import (
    DistContext,
    FileTensor,
    MicroBatch,
    ModelState,
    Offload,
    Placement,
    Plan,
    StateReader,
    Strategy,
    TensorIndex,
    Weight,
    Wrapped,
)
from fxtrain.state.placement import DISK, dtype_of

_Read = Callable[[TensorIndex | None], Tensor]
_FILES = "frozen_files"  # of a checkpoint: digests of files with frozen parameters, by name


def _check(ctx: DistContext, plan: Plan, module: nn.Module) -> tuple[str, ...]:
    problems = [*xla_problems(ctx, "Offload")]
    problems += [
        f"The mesh has {axis}={ctx.mesh.sizes[axis]}, which Offload does not use: its ranks would "
        f"all do the same. Leave the axis out of fx.Mesh(...)."
        for axis in ("tensor", "pipeline")
        if ctx.mesh.sizes[axis] > 1
    ]
    config: Offload = plan.strategy
    if config.placement is None:
        return tuple(problems)
    try:
        placed_tensors(module, config.placement)
    except PlanError as error:
        problems.append(f"Offload(placement=...): {error}")
    named = (module.named_modules, module.named_parameters, module.named_buffers)
    known = {name for names in named for name, _ in names(remove_duplicate=False)}
    unknown = [unit.name for unit in config.placement.units if unit.name not in known]
    if unknown:
        problems.append(
            f"Offload(placement=...): {type(module).__name__} has no module or tensor "
            f"{', '.join(map(repr, unknown[:5]))}. The placement was made for another model."
        )
    return (*problems, *_device_problems(ctx, config.placement, "placement"))


def _device_problems(ctx: DistContext, placement: Placement, field: str) -> tuple[str, ...]:
    problems: list[str] = []
    main = torch.device(placement.device)
    if main.type != ctx.device.type or main.index not in (None, ctx.device.index):
        problems.append(
            f"Offload({field}=...): it computes on {placement.device!r}, and this context on "
            f"{str(ctx.device)!r}. Name this device in {field}, or use "
            f"fx.detect(device={placement.device!r})."
        )
    for name in placement.devices:
        if name in ("cpu", DISK):
            continue
        kind, index = torch.device(name).type, torch.device(name).index or 0
        there = getattr(torch, kind).device_count() if hasattr(torch, kind) else 0
        if index >= there:
            problems.append(
                f"Offload({field}=...): it places units on {name!r}, and this machine has "
                f"{there} devices of that kind. Name devices of this machine."
            )
    return tuple(problems)


def wrap_streamed(
    strategy: Strategy,
    module: nn.Module,
    ctx: DistContext,
    plan: Plan,
    optimizer: Any,
    scheduler: Any,
    *,
    copy: bool | None = None,
) -> Wrapped:
    """Wrap a module as its placement says.

    Args:
        copy: Copy streamed units to their device, also if that is the CPU.
    """
    config: Offload = plan.strategy
    with fail_together(ctx, "wrap"):
        placement = config.placement or _compute_placement(
            config, module, ctx, trains=optimizer is not None
        )
    _refuse_packed(module, placement, trains=optimizer is not None)
    tensors = placed_tensors(module, placement)
    if optimizer is not None:
        _refuse_training(tensors)
    units = streamed_units(module, tensors, placement)
    prefetch = placement.prefetch if config.prefetch is None else config.prefetch
    if copy is None:  # the CPU uses units where they are
        copy = any(unit.device.type != "cpu" for unit in units)
    streaming = Streaming(
        tensors={tensor.names[0]: tensor for tensor in tensors},
        units=units,
        folder=None if config.offload_folder is None else Path(config.offload_folder),
        prefetch=prefetch,
        copies=DeviceCopies(units=units, prefetch=prefetch, pin=config.pin) if copy else None,
        empty={tensor.names[0] for tensor in tensors if has_no_memory(tensor.tensors[0])},
    )
    undo = ExitStack()
    undo.callback(streaming.close)
    try:
        undo.callback(_freeze(tensors))
        stored = set(stored_tensors(module)) if config.source is not None else set[str]()
        _hold(streaming, placement, filled_later=stored)
        _send(streaming, ctx)
        prepare_module(module, plan, ctx, hooked=True)
        attach(module, streaming, backward=optimizer is not None)
        wrapped = make_handle(strategy, module, ctx, plan, optimizer, scheduler, undo=undo.close)
        wrapped = attrs.evolve(wrapped, strategy_state=streaming, placement=placement)
        if config.source is not None:
            source: Any = config.source
            if plan.quantize is not None:  # as it is read
                source = quantized_source(config.source, module, plan.quantize)
            load_model(source, wrapped, cast=bool(placement.dtypes))
    except BaseException:
        undo.close()
        raise
    return wrapped


def _compute_placement(
    config: Offload, module: nn.Module, ctx: DistContext, *, trains: bool
) -> Placement:
    """Place a model in the memory that the config allows; what trains of a frozen one stays."""
    memory: Any = config.memory or None
    if memory is None and ctx.world_size > 1:  # other ranks use the other devices
        share = f"{90 // ctx.local_world_size}%"
        memory = {"cpu": share} if ctx.device.type == "cpu" else {ctx.device: "90%", "cpu": share}
    named = list(module.named_parameters(remove_duplicate=False))
    trained = [name for name, parameter in named if parameter.requires_grad]
    placement = big.place(
        big.sizes(module),
        big.budget(memory),
        resident=trained if trains and len(trained) < len(named) else (),
        prefetch=config.prefetch,
    )
    if problems := _device_problems(ctx, placement, "memory"):
        raise PlanError("\n".join(problems))
    return placement


def _refuse_training(tensors: tuple[PlacedTensor, ...]) -> None:
    trained = [
        tensor.names[0] for tensor in tensors if tensor.streamed and tensor.tensors[0].requires_grad
    ]
    if trained:
        more = f" and {len(trained) - 5} more" if trained[5:] else ""
        raise PlanError(
            f"wrap(optimizer=...): these parameters require a gradient, and the placement streams "
            f"them: {', '.join(trained[:5])}{more}. Only parameters that stay on their device can "
            f"be trained: freeze these with requires_grad_(False), or place them on a device."
        )


def _refuse_packed(module: nn.Module, placement: Placement, *, trains: bool) -> None:
    """Quantized weights that cannot stream to an accelerator."""
    if all(torch.device(device).type == "cpu" for device in placement.devices if device != DISK):
        return
    libraries = {library.name for _, _, library in quantized_layers(module)}
    if "torchao" in libraries:
        raise PlanError(
            "Offload(placement=...): the placement uses an accelerator, and the model has weights "
            "of torchao, which cannot be moved between devices in place. Use fx.Bnb4() or "
            "fx.Bnb8(), or a placement on the CPU and the disk."
        )
    if libraries and trains:
        raise PlanError(
            "wrap(optimizer=...): backward through quantized weights that stream to an "
            "accelerator is not supported. Use Single() or DDP() with Plan(quantize=...), or "
            "train on the CPU."
        )


def _freeze(tensors: tuple[PlacedTensor, ...]) -> Callable[[], None]:
    """Stop gradients of streamed parameters; returns a function that undoes it."""
    frozen = [
        tensor
        for placed in tensors
        for tensor in placed.tensors
        if placed.streamed and isinstance(tensor, nn.Parameter) and tensor.requires_grad
    ]
    for tensor in frozen:
        tensor.requires_grad = False

    def undo() -> None:
        for tensor in frozen:
            tensor.requires_grad = True

    return undo


def _hold(streaming: Streaming, placement: Placement, *, filled_later: Set[str]) -> None:
    """Give tensors the dtype of the placement, and move those with values to where it says.

    Args:
        filled_later: Names of tensors whose values a source has.
    """
    for name, placed in streaming.tensors.items():
        rule = dtype_of(placement.dtypes, name)
        wanted = None if rule is None else getattr(torch, rule)
        for tensor in placed.tensors:
            floating = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            if floating and wanted not in (None, tensor.dtype):
                set_values(tensor, tensor.detach().to(wanted))
        if name in streaming.empty:
            continue
        if placed.held == DISK and not filled_later.isdisjoint(placed.names):
            streaming.empty.add(name)
        elif placed.held == DISK:
            _keep_in_folder(streaming, placed, placed.tensors[0])
        else:
            for tensor in placed.tensors:
                set_values(tensor, tensor.data.to(placed.held))


def _send(streaming: Streaming, ctx: DistContext) -> None:
    """Give all ranks rank 0's values of what stays on a device and is trained, and of buffers."""
    if ctx.axis("loss").world_size == 1:
        return
    resident = [
        placed.tensors[0]
        for name, placed in streaming.tensors.items()
        if not placed.streamed and name not in streaming.empty
    ]
    send_values(resident, ctx.axis("loss"))


@contextmanager
def _sync(model: Wrapped, micro_batch: MicroBatch) -> Iterator[None]:
    """Average gradients over ranks at the end: those of the few parameters that are trained."""
    yield
    data = model.ctx.axis("loss")
    trained = [p for o in model.optimizers for g in o.param_groups for p in g["params"]]
    if not (micro_batch.reduces and trained and data.world_size > 1):
        return
    absent = [index for index, parameter in enumerate(trained) if parameter.grad is None]
    used = trained[0].detach().new_ones(len(trained))
    for index in absent:
        used[index] = 0
        trained[index].grad = torch.zeros_like(trained[index])
    average_grads([*(parameter.grad for parameter in trained), used], data)
    for index in absent:
        if not used[index]:  # on no rank: optimizers leave it alone, as on one rank
            trained[index].grad = None


def _weights(model: Wrapped) -> dict[str, Weight]:
    """The module's tensors, which are filled as the placement says."""
    streaming: Streaming = model.strategy_state
    first = {name: known for known, placed in streaming.tensors.items() for name in placed.names}
    return {
        name: attrs.evolve(weight, place=functools.partial(_place, streaming, first[name]))
        if name in first
        else weight
        for name, weight in torch_weights(model).items()
    }


def _place(streaming: Streaming, name: str, read: _Read, stored: FileTensor) -> None:
    """Give the tensor of a first name its values: from where they are in a file, or by `read`.

    Raises:
        CheckpointError: a file cannot be mapped or written.
        PlanError: values for the disk are in no file, and there is no offload folder.
    """
    streaming.settle()
    placed = streaming.tensors[name]
    dtype = placed.tensors[0].dtype
    exact = streaming.folder is not None and streaming.copies is None
    if placed.held == DISK and stored.path is not None and fits(stored, dtype, exact=exact):
        _link(streaming, placed, stored.path, stored)
    elif placed.held == DISK:
        _keep_in_folder(streaming, placed, read(None).to(dtype))
    else:
        home = torch.device(placed.held)
        for tensor in placed.tensors:
            _fill(tensor, read, home)
        placed.source = stored.path or placed.source
    streaming.empty.discard(name)


def _keep_in_folder(streaming: Streaming, placed: PlacedTensor, value: Tensor) -> None:
    """Write a tensor to the offload folder, and use it from there."""
    if streaming.folder is None:
        raise PlanError(
            f"The placement has {placed.names[0]!r} on disk, and no safetensors file contains it "
            f"as {value.dtype}. Use fx.Offload(offload_folder=...), into which it is written once, "
            f"or take the model from a safetensors file: fx.Offload(source=...)."
        )
    _link(streaming, placed, *write_tensor(streaming.folder, placed.names[0], value.data))


def _link(streaming: Streaming, placed: PlacedTensor, path: Path, stored: FileTensor) -> None:
    """Let a tensor use the bytes of a file."""
    file = streaming.files.get(path)
    if file is None or not unchanged(file):
        file = streaming.files[path] = map_file(path)
        streaming.digests.pop(path, None)
    value = mapped(file, stored)
    for tensor in placed.tensors:
        set_values(tensor, value)
    placed.file, placed.start, placed.source = file, stored.start, path


@torch.no_grad()
def _fill(tensor: Tensor, read: _Read, device: torch.device) -> None:
    if has_no_memory(tensor):
        set_values(tensor, torch.empty_like(tensor.data, device=device))
    tensor.copy_(read(None))


def _trained_state(model: Wrapped) -> ModelState:
    """The state without frozen parameters that are in model files, whose digests it has instead.

    Effects:
        Reads those files once, the first time.
    """
    state = state_of(model, omit=_frozen(model.strategy_state))
    return attrs.evolve(state, values={**state.values, _FILES: _digests(model.strategy_state)})


def _load_trained(model: Wrapped, saved: StateReader) -> None:
    """Put a saved state into a model whose frozen parameters come from the same files.

    Raises:
        CheckpointError: the files are others, or it is the state of another model.
    """
    wanted: Mapping[str, Any] = saved.values.get(_FILES, {})
    digests = _digests(model.strategy_state)
    if sorted(wanted.values()) != sorted(digests.values()):
        others = [name for name, digest in wanted.items() if digest not in digests.values()]
        raise CheckpointError(
            f"The checkpoint belongs to frozen parameters in {', '.join(wanted) or 'no file'}, "
            f"and this model has them from {', '.join(digests) or 'no file'}"
            f"{f': {others[0]} has another digest' if others else ''}. Load the files with which "
            f"the checkpoint was saved.",
            code="FX603",
        )
    model.strategy_state.settle()
    load_state(model, saved, omit=_frozen(model.strategy_state))


def _frozen(streaming: Streaming) -> frozenset[str]:
    return frozenset(name for tensor in _from_files(streaming) for name in tensor.names)


def _from_files(streaming: Streaming) -> list[PlacedTensor]:
    return [tensor for tensor in streaming.tensors.values() if tensor.fixed]


def _digests(streaming: Streaming) -> dict[str, str]:
    """The digests of the files with frozen parameters, by the names of the files."""
    paths = sorted(
        {tensor.source for tensor in _from_files(streaming) if tensor.source is not None}
    )
    for path in paths:
        if path not in streaming.digests:
            try:
                streaming.digests[path] = digest_of(path)
            except OSError as error:
                raise CheckpointError(
                    f"{path}, which has frozen parameters, cannot be read: "
                    f"{error.strerror or error}. A checkpoint names such files with their digests."
                ) from error
    return {path.name: streaming.digests[path] for path in paths}


def _take_layers(module: nn.Module, plan: Plan) -> Callable[[], None]:
    """Put quantized layers, without memory, where the files have such."""
    source = plan.strategy.source
    with ExitStack() as undo:
        if source is not None and not is_quantized(module):
            with open_source(source) as tensors:
                undo.callback(put_stored_layers(source, tensors, module))
        undo.callback(allocate(module, torch.device("cpu"), memory=False))
        return undo.pop_all().close


OFFLOAD = attrs.evolve(
    SINGLE,
    name="Offload",
    config=Offload,
    check=_check,
    wrap=wrap_streamed,
    take_layers=_take_layers,
    one_rank=False,
    waits_in_forward=True,
    grads_in_module=False,
    sync=_sync,
    apply=apply_with_buffers,
    state=_trained_state,
    load_state=_load_trained,
    weights=_weights,
    converts_layers=False,
    updates_on_host=False,
    verify=None,
)
