"""Replace the layers of a model by quantised ones, undo it, and split them over ranks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain.errors import PlanError
from fxtrain.precision.bnb_layers import BNB4, BNB8
from fxtrain.precision.library import Library, is_sharded, linear_like
from fxtrain.precision.plain_tensors import is_quantized, quantized_layers
from fxtrain.precision.targets import Targets, choose_layers, modules_to_keep
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
    """The library that quantises as a record says."""
    return _BY_RECORD[type(record)]


def planned_layers(
    module: nn.Module, record: Quantize, device: torch.device, *, trains: bool
) -> Targets:
    """The layers that a record quantises; none in a model that is quantised in its format.

    Effects:
        None on the module. Imports the library.

    Raises:
        PlanError: the model is quantised in another way, the device cannot compute in this
            one, it has no gradient for what is to be trained, or a layer does not fit it.
        MissingPackageError: the library is not installed.
    """
    problem = library_of(record).check(record, device)
    if problem is None and trains and _has_no_gradient(attrs.asdict(record)):
        problem = f"{record!r} {NO_GRADIENT}"
    if problem is not None:
        raise PlanError(f"Plan(quantize=...): {problem}")
    if _quantized_already(module, record):
        return Targets(names=(), skipped={})
    return choose_layers(module, record, trains=trains)


def _quantized_already(module: nn.Module, record: Quantize) -> bool:
    """Whether the model is quantised as a record says; an error if it is in another way."""
    for name, part, library in quantized_layers(module):
        if (other := difference(part, library, record)) is not None:
            raise PlanError(
                f"Plan(quantize=fx.{type(record).__name__}(...)): asked for {other[0]}, but {name} "
                f"is quantised already, with {other[1]}. Pass the unquantised model, or change the "
                f"plan."
            )
    return is_quantized(module)


def quantize_layers(
    module: nn.Module, record: Quantize, device: torch.device, *, trains: bool = False
) -> Callable[[], None]:
    """Quantise the layers of a model in place, one at a time.

    Args:
        trains: Skip layers whose weight requires grad.

    Returns:
        A function that puts the original layers back, which stay in memory as long as it is
        referenced.

    Effects:
        Replaces layers; the new ones are frozen and on the device.

    Raises:
        PlanError: as `planned_layers`; the model is as it was, then and after any other error.
    """
    names = planned_layers(module, record, device, trains=trains).names
    return _replaced(module, names, record, device)


def quantize_on_meta(
    module: nn.Module, record: Quantize, *, trains: bool = False
) -> Callable[[], None]:
    """Replace layers of a model by quantised ones without values, to measure it.

    Sizes do not depend on the device, so one that cannot compute in the format is not refused.

    Returns:
        A function that puts the original layers back.

    Raises:
        PlanError: as `planned_layers`, except for the device.
    """
    if _quantized_already(module, record):
        return converted_to_fp32(module, record)
    if isinstance(record, Torchao):
        record = attrs.evolve(record, activations=None)
    device = torch.device("meta")
    names = planned_layers(module, record, device, trains=trains).names
    return _replaced(module, names, record, device)


def _replaced(
    module: nn.Module, names: Sequence[str], record: Quantize, device: torch.device
) -> Callable[[], None]:
    """Replace layers by quantised ones; returns a function that puts the original ones back."""
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
    for part in modules_to_keep(module, record):
        for parameter in part.parameters():
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                changed.append((parameter, parameter.data))
                parameter.data = parameter.data.float()

    def undo() -> None:
        for parameter, before in changed:
            parameter.data = before

    return undo


def sharding_problem(module: nn.Module, record: Quantize | None) -> str | None:
    """Why the quantised weights of a model cannot be split over ranks; None if they can.

    Args:
        record: How the model will be quantised, if it is not yet.
    """
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
            f"{foreign[0]} was quantised by another library, whose layers expect a weight that "
            f"is not split. Load it with fx.load_model(folder, net), where net has plain layers"
        )
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return (
            "the model is on the meta device. Fill it before fx.wrap, with "
            "fx.load_model(folder, net, quantize=...)"
        )
    return None


def hold_as_parameters(module: nn.Module, device: torch.device) -> Callable[[], None]:
    """Hold quantised weights as plain parameters of bytes, and their scales on a device.

    torch then splits and gathers the bytes like those of any other parameter, and the layers
    compute with what was gathered.

    Returns:
        A function that turns them into parameters of their library again, with their current
        values; parameters that are sharded stay as they are.
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
    """The scales and tables of quantised weights, which every rank holds in full."""
    return [
        tensor
        for _, part, library in quantized_layers(module)
        for name, tensor in library.tensors(part).items()
        if name != "weight"
    ]


NO_GRADIENT = (
    "computes without a gradient of its input, so nothing before it could train. Use Bnb4(), "
    "Bnb8() or Torchao with weights of 'int8', 'float8' or 'int2' and no activations, or wrap the "
    "model without an optimizer."
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
            return f"{name} is quantised with {fields}, which {NO_GRADIENT}"
    return None
