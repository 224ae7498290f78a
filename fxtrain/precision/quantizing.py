"""Quantized layers of a model: found, made and undone, and their tensors by name."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain.errors import PlanError
from fxtrain.ops.whole_tensors import is_sharded
from fxtrain.precision.bnb_layers import BNB4, BNB8
from fxtrain.precision.library import Library, linear_like
from fxtrain.precision.targets import choose_layers, matches
from fxtrain.precision.torchao_layers import TORCHAO
from fxtrain.state import Bnb4, Bnb8, Quantize, Torchao

# Where torch keeps the hooks around the calls of a module.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
_BY_RECORD: dict[type, Library] = {Bnb4: BNB4, Bnb8: BNB8, Torchao: TORCHAO}


def library_of(record: Quantize) -> Library:
    """The library that quantizes as a record says."""
    return _BY_RECORD[type(record)]


def quantized_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module, Library]]:
    """The quantized layers of a model by name, each with its library.

    Layers are known by their classes and tensors, so that models that another program quantized
    are included. No library is imported.
    """
    for name, part in module.named_modules():
        if (library := _owner(part)) is not None:
            yield name, part, library


def _owner(part: nn.Module) -> Library | None:
    return next((library for library in _BY_RECORD.values() if library.owns(part)), None)


def is_quantized(module: nn.Module) -> bool:
    """Whether a model has a quantized layer."""
    return next(quantized_layers(module), None) is not None


def plain_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model that are not those of quantized weights."""
    hidden = {id(part.weight) for _, part, _ in quantized_layers(module)}
    return [parameter for parameter in module.parameters() if id(parameter) not in hidden]


def quantized_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The live tensors of all quantized weights, by name."""
    return {
        _join(name, key): tensor
        for name, part, library in quantized_layers(module)
        for key, tensor in library.tensors(part).items()
    }


def quantized_facts(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Format and settings of each quantized weight, beside its tensors, by layer."""
    return {
        name: {"format": weight_format(part, library), **library.facts(part)}
        for name, part, library in quantized_layers(module)
    }


def weight_format(part: nn.Module, library: Library) -> str:
    """Library and format of a quantized layer, as text."""
    fields = library.settings(part)
    return f"{library.name} {fields.get('weights') or fields.get('quant_type', 'int8')}"


def stored_tensors(module: nn.Module) -> dict[str, Any]:
    """The state dict of a model, with plain, live tensors for quantized weights."""
    stored: dict[str, Any] = dict(module.state_dict(keep_vars=True))
    for name, part, library in quantized_layers(module):
        bias, prefix = _join(name, "bias"), _join(name, "")
        for key in [key for key in stored if key.startswith(prefix) and key != bias]:
            del stored[key]
        stored |= {_join(name, key): tensor for key, tensor in library.tensors(part).items()}
    return stored


def allocate(module: nn.Module, device: torch.device, *, memory: bool = True) -> Callable[[], None]:
    """Move quantized weights from the meta device to another, without values; returns the undo.

    `memory=False` gives them none, for a strategy that allocates their tensors one by one.
    """
    before: list[tuple[Library, nn.Module, dict[str, Tensor]]] = []
    for _, part, library in quantized_layers(module):
        if not memory:
            vars(part)["keeps_copy"] = False  # of weights in bitsandbytes' layout for CPUs
        tensors = library.tensors(part)
        if any(tensor.is_meta for tensor in tensors.values()):
            empty = {key: torch.empty_like(like, device=device) for key, like in tensors.items()}
            for tensor in () if memory else empty.values():
                tensor.untyped_storage().resize_(0)
            before.append((library, part, tensors))
            library.put(part, empty)

    def undo() -> None:
        for library, part, tensors in before:
            library.put(part, tensors)

    return undo


def has_no_memory(tensor: Tensor) -> bool:
    """Whether a tensor has no values: on the meta device, or from `allocate` without memory."""
    return tensor.is_meta or (tensor.numel() > 0 and not tensor.untyped_storage().nbytes())


def live_tensors(part: nn.Module) -> dict[str, Tensor]:
    """The tensor objects of a quantized weight, whose `.data` a strategy may replace.

    None of any other module.
    """
    library = _owner(part)
    tensors = {} if library is None else library.tensors(part)
    if "weight" in tensors:  # bitsandbytes' parameter, of which this is another object
        tensors["weight"] = part.get_parameter("weight")
    return tensors


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def planned_layers(
    module: nn.Module, record: Quantize, device: torch.device, *, trains: bool
) -> tuple[str, ...]:
    """Names of the layers that a record quantizes; none in a model that has its format already.

    A PlanError if the model is quantized in another way, the device cannot compute in this one, it
    has no gradient for what is to be trained, or a layer does not fit it. Imports the library.
    """
    problem = library_of(record).check(record, device)
    measured = device.type == "meta"
    if problem is None and trains and not measured and _has_no_gradient(attrs.asdict(record)):
        problem = f"{record!r} {NO_GRADIENT}"
    if problem is not None:
        raise PlanError(f"Plan(quantize=...): {problem}")
    if _quantized_already(module, record):
        return ()
    return choose_layers(module, record, trains=trains)[0]


def _quantized_already(module: nn.Module, record: Quantize) -> bool:
    """Whether the model is quantized as a record says; an error if it is in another way."""
    for name, part, library in quantized_layers(module):
        if (other := difference(part, library, record)) is not None:
            raise PlanError(
                f"Plan(quantize=fx.{type(record).__name__}(...)): asked for {other[0]}, but {name} "
                f"is quantized already, with {other[1]}. Pass the unquantized model, or change the "
                f"plan."
            )
    return is_quantized(module)


def quantize_layers(
    module: nn.Module, record: Quantize, device: torch.device, *, trains: bool = False
) -> Callable[[], None]:
    """Quantize the layers of a model in place, one at a time; returns the undo.

    The new layers are frozen and on the device; on the meta device they have no values, to measure
    them. `trains` skips layers whose weight requires grad. The original layers stay in memory as
    long as the undo is referenced. After an error, the model is as it was.
    """
    names = planned_layers(module, record, device, trains=trains)
    if device.type == "meta" and isinstance(record, Torchao):
        record = attrs.evolve(record, activations=None)  # torchao asks for the GPU at once
    library, layers = library_of(record), dict[str, nn.Module]()
    for name in names:
        part = module.get_submodule(name)
        assert isinstance(part, nn.Linear)
        if not part.weight.is_meta and part.weight.device != device:
            part = linear_like(part, part.weight.detach().to(device))
        layers[name] = library.quantize(part, record)
    undo_layers, undo_kept = put_layers(module, layers), converted_to_fp32(module, record)

    def undo() -> None:
        undo_layers()
        undo_kept()

    return undo


def _has_no_gradient(fields: Mapping[str, Any]) -> bool:
    """Whether torchao computes a format without a gradient, so that no adapter trains on it."""
    return fields.get("weights") == "int4" or fields.get("activations") is not None


def put_layers(module: nn.Module, layers: dict[str, nn.Module]) -> Callable[[], None]:
    """Replace submodules by name; returns a function that puts the original ones back.

    A submodule with several names is replaced under all of them. The new submodule shares the hooks
    of the original one.
    """
    new = {id(module.get_submodule(name)): layer for name, layer in layers.items()}
    for name, layer in layers.items():
        old = vars(module.get_submodule(name))
        vars(layer).update({key: old[key] for key in _HOOKS if key in old})
    places = [
        (parent, key, child)
        for parent in module.modules()
        for key, child in parent._modules.items()
        if id(child) in new
    ]
    for parent, key, child in places:
        parent._modules[key] = new[id(child)]

    def undo() -> None:
        for parent, key, child in places:
            parent._modules[key] = child

    return undo


def converted_to_fp32(module: nn.Module, record: Quantize) -> Callable[[], None]:
    """Convert the modules that a record keeps in fp32; returns a function that undoes it."""
    changed: list[tuple[nn.Parameter, torch.Tensor]] = []
    for name, part in module.named_modules():
        kept = any(matches(pattern, name) for pattern in record.keep_fp32)
        for parameter in part.parameters() if kept else ():
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                changed.append((parameter, parameter.data))
                parameter.data = parameter.data.float()

    def undo() -> None:
        for parameter, before in changed:
            parameter.data = before

    return undo


def sharding_problem(module: nn.Module, record: Quantize | None) -> str | None:
    """Why weights that are or will be quantized cannot be split over ranks; None if they can."""
    layers = list(quantized_layers(module))
    libraries = {library for _, _, library in layers}
    if record is not None:
        libraries.add(library_of(record))
    whole = sorted(library.name for library in libraries if library.split is None)
    if whole:
        return (
            f"tensors of {whole[0]} cannot be split over ranks. Use fx.Bnb4() or fx.Bnb8(), or "
            f"DDP() with a replica of them on each rank"
        )
    foreign = [name for name, part, _ in layers if not type(part).__module__.startswith("fxtrain")]
    if foreign:
        return (
            f"{foreign[0]} was quantized by another library, whose layers expect a weight that "
            f"is not split. Load it with fx.load_model(folder, net), where net has plain layers"
        )
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return (
            "the model is on the meta device. Fill it before fx.wrap, with "
            "fx.load_model(folder, net, quantize=...)"
        )
    return None


def hold_as_parameters(module: nn.Module, device: torch.device) -> Callable[[], None]:
    """Hold quantized weights as plain parameters of bytes, and their scales on a device.

    torch then splits and gathers the bytes like those of any other parameter, and the layers
    compute with what was gathered. What is returned turns them into parameters of their library
    again, with their current values; parameters that are sharded stay as they are.
    """
    changed: list[tuple[nn.Module, Library]] = []
    for _, part, library in quantized_layers(module):
        assert library.split is not None
        library.split(part, device)
        changed.append((part, library))

    def undo() -> None:
        for part, library in changed:
            if not is_sharded(part.weight):
                library.put(part, library.tensors(part))

    return undo


def companions(module: nn.Module) -> list[Tensor]:
    """The scales and tables of quantized weights, which every rank holds in full."""
    return [
        tensor
        for _, part, library in quantized_layers(module)
        for name, tensor in library.tensors(part).items()
        if name != "weight"
    ]


NO_GRADIENT = (
    "computes without a gradient of its input, so nothing before it could train. Use Bnb4(), "
    "Bnb8() or Torchao with weights of 'int8' or 'float8' and no activations, or wrap the model "
    "without an optimizer."
)


def difference(part: nn.Module, library: Library, record: Quantize) -> tuple[str, str] | None:
    """The first field that a record asks for and a layer has otherwise, and what it has."""
    asked = attrs.asdict(record)
    for name, value in library.settings(part).items():
        if asked.get(name) != value:
            return f"{name}={asked.get(name)!r}", f"{name}={value!r}"
    return None


def gradient_problem(module: nn.Module) -> str | None:
    """Which layer of a model gives no gradient to what is before it, or None."""
    for name, part, library in quantized_layers(module):
        if _has_no_gradient(fields := library.settings(part)):
            return f"{name} is quantized with {fields}, which {NO_GRADIENT}"
    return None
