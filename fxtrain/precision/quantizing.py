"""Replace the layers of a model by quantised ones, undo it, and split them over ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain.errors import PlanError
from fxtrain.precision.bnb_layers import BNB4, BNB8, state_of4
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
    library = library_of(record)
    problem = library.check(record, device) or (_no_gradient(record) if trains else None)
    if problem is not None:
        raise PlanError(f"Plan(quantize=...): {problem}")
    if _quantized_already(module, record):
        return Targets(names=(), skipped={})
    return choose_layers(module, record, trains=trains)


def _quantized_already(module: nn.Module, record: Quantize) -> bool:
    """Whether the model is quantised as a record says; an error if it is in another way."""
    for name, part, library in quantized_layers(module):
        if (other := difference(part, library, record)) is not None:
            wanted, has = other
            raise PlanError(
                f"Plan(quantize=fx.{type(record).__name__}(...)): asked for {wanted}, but {name} "
                f"is quantised already, {has}. Pass the unquantised model, or change the plan."
            )
    return is_quantized(module)


def quantize_layers(
    module: nn.Module, record: Quantize, device: torch.device, *, trains: bool = False
) -> tuple[Targets, Callable[[], None]]:
    """Quantise the layers of a model in place, one at a time.

    Args:
        trains: Skip layers whose weight requires grad.

    Returns:
        The layers, and a function that puts the original ones back, which stay in memory as long as
        it is referenced.

    Effects:
        Replaces layers; the new ones are frozen and on the device.

    Raises:
        PlanError: as `planned_layers`; the model is as it was, then and after any other error.

    Example:
        >>> import torch
        >>> import fxtrain as fx
        >>> from fxtrain.precision.quantizing import quantize_layers
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 2))
        >>> targets, undo = quantize_layers(net, fx.Torchao(), torch.device("cpu"))
        >>> targets.names
        ('0',)
    """
    targets = planned_layers(module, record, device, trains=trains)
    return targets, _replaced(module, targets.names, record, device)


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


def _no_gradient(record: Quantize) -> str | None:
    """Why adapters cannot be trained on a format: torchao computes it without a gradient."""
    if not isinstance(record, Torchao) or (record.weights != "int4" and not record.activations):
        return None
    call = f"Torchao(weights={record.weights!r}, activations={record.activations!r})"
    return f"{call} {NO_GRADIENT}"


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
    """What a record asks for, and how a layer is quantised instead; None if that is the same.

    Example:
        >>> import torch
        >>> import fxtrain as fx
        >>> from fxtrain.precision.quantizing import quantize_layers
        >>> from fxtrain.precision.torchao_layers import TORCHAO
        >>> from fxtrain.precision.quantizing import difference
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 2))
        >>> _ = quantize_layers(net, fx.Torchao(), torch.device("cpu"))
        >>> difference(net[0], TORCHAO, fx.Torchao(activations="int8"))
        ("activations='int8'", 'with activations=None')
    """
    own_format, wanted = library.format(part), library.planned(record)
    if own_format != wanted:
        return wanted, f"as {own_format}"
    other = {
        name: value
        for name, value in _fields(part, library).items()
        if getattr(record, name) != value
    }
    if not other:
        return None
    asked = {name: getattr(record, name) for name in other}
    return _listed(asked), f"with {_listed(other)}"


def gradient_problem(module: nn.Module) -> str | None:
    """Which layer of a model gives no gradient to what is before it, or None."""
    for name, part, library in quantized_layers(module):
        own_format = library.format(part)
        activations = _fields(part, library).get("activations")
        if activations is not None or own_format == "torchao int4":
            inputs = f" with activations={activations!r}" if activations else ""
            return f"{name} is quantised as {own_format}{inputs}, which {NO_GRADIENT}"
    return None


def packed_layer(module: nn.Module) -> str | None:
    """The first layer whose scales bitsandbytes reordered, or would reorder, or None.

    On some CPUs its own forward packs weights. Moving or saving the model unpacks them, and leaves
    scales that are not quantised themselves in the order (blocks of a row, rows).
    """
    for name, part, library in quantized_layers(module):
        state = state_of4(part) if library is BNB4 else None
        if state is None or state.nested:
            continue
        reordered = state.absmax.ndim == 2 and len(state.absmax) > 1
        if reordered or getattr(state, "packing_format_for_cpu", False):
            return name
    return None


def _fields(part: nn.Module, library: Library) -> dict[str, Any]:
    """The fields of a record that a layer tells, beside its format."""
    if library is TORCHAO:
        return _torchao_fields(part.get_parameter("weight"))
    fields = {name: value for name, value in library.settings(part).items() if name != "kind"}
    if library is BNB4:
        facts = library.facts(part)
        fields |= {
            "blocksize": facts["blocksize"],
            "double_quant": "nested_blocksize" in facts,
        }
    return fields


def _torchao_fields(weight: Tensor) -> dict[str, Any]:
    tensor: Any = weight
    if hasattr(tensor, "act_quant_kwargs"):
        float8 = tensor.qdata.dtype.is_floating_point
        activations = "float8" if float8 else "int8"
        return {"activations": None if tensor.act_quant_kwargs is None else activations}
    if hasattr(tensor, "group"):
        return {"group": tensor.group}
    return {"group": tensor.block_size[-1]} if type(weight).__name__.startswith("Int4") else {}


def _listed(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())
