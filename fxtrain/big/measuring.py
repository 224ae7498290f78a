"""Measure the units of a model: a module, code that builds one, or files."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxtrain._errors import MissingPackageError, PlanError
from fxtrain.big.unit_sizes import Sizes, Tally
from fxtrain.models.block_names import names_among, own_names
from fxtrain.models.memory_estimates import layer_of
from fxtrain.models.quantized_loading import put_stored_layers
from fxtrain.models.safetensors_files import Entry
from fxtrain.models.tensor_sources import Source, open_source
from fxtrain.models.weight_list import build_on_meta, cache_of, read_json
from fxtrain.precision import live_tensors, quantize_on_meta
from fxtrain.state import DtypeRule, Quantize
from fxtrain.state.placement.offload import rules_of

__all__ = ["sizes"]

_CONFIG = "config.json"
_PLAIN = frozenset((Tensor, nn.Parameter))
_IN_FP32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")  # lists of transformers


def sizes(
    model: nn.Module | str | os.PathLike[str] | Callable[[], nn.Module],
    *,
    no_split: Iterable[str] | None = None,
    dtype: str | None = None,
    dtypes: Mapping[str, str] | Iterable[DtypeRule] = (),
    special: Mapping[str, float | str] | None = None,
    quantize: Quantize | None = None,
) -> Sizes:
    """Measure the units of a model, without reading values.

    Units are modules of the classes in `no_split`, other modules without children, and tensors
    beside modules. Takes time in proportion to the number of tensors.

    Args:
        model: A module on any device; a function that builds one, which runs on the meta device;
            a folder with safetensors files, one such file or its index; a config of
            transformers; `package.module:function`; or the name of a timm model.
        no_split: Class names of modules that stay whole. None takes the model's own list
            (`_no_split_modules` of transformers), or else what its ModuleLists contain.
        dtype: The dtype in which to hold floating-point parameters; None keeps theirs. Modules
            that a model of transformers keeps in fp32 stay so.
        dtypes: Exceptions by patterns of names, as `{"*norm*": "float32"}`; the first match
            counts.
        special: Bytes per element by patterns of names, for parameters that will be quantised:
            a number, or "int8", "int4" or "int2".
        quantize: Measure linear layers as this record quantises them: `fx.Bnb4()`. Those that
            are quantised already, in the module or in the files, are measured so in any case.

    Effects:
        Reads headers of files. For configs and functions, imports and runs that code.

    Raises:
        PlanError: the model, a dtype or a class name is invalid.
        CheckpointError: a file is damaged.

    Example:
        >>> import fxtrain as fx, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> [(unit.name, unit.bytes) for unit in fx.big.sizes(net).units]
        [('0', 80), ('1', 40)]
        >>> fx.big.sizes(net, dtype="bfloat16").bytes
        60
    """
    listed: Any = dtypes if isinstance(dtypes, Mapping) else tuple(dtypes)
    rules = rules_of(listed)
    found, files, what = _open(model)
    parts = [] if found is None else [part for _, part in _walk(found)]
    if dtype is not None:
        kept = sorted(set[str]().union(*(own_names(parts, words) for words in _IN_FP32)))
        rules += tuple(DtypeRule(match=f"*{name}*", dtype="float32") for name in kept)
        rules += (DtypeRule(match="*", dtype=dtype),)
    tally = Tally(rules, special)
    stored = {} if files is None else files.entries
    if found is None:
        if no_split or quantize is not None:
            field = "no_split" if no_split else "quantize"
            raise PlanError(
                f"sizes({field}=...): {what} has names of tensors but no classes. Omit {field}, "
                f"or pass the model's config or code. The layers of numbered sequences are not "
                f"split."
            )
        _count_files(stored, tally)
        return tally.sizes(what, None)
    kinds = set(names_among(parts) if no_split is None else no_split)
    if no_split is not None:
        _check_kinds(kinds, parts)
    undo = None if quantize is None else quantize_on_meta(found, quantize)
    try:
        _count_module(found, kinds, stored, tally)
    finally:
        if undo is not None:
            undo()
    config: Any = getattr(found, "config", None)
    return tally.sizes(what, cache_of(config.to_dict()) if hasattr(config, "to_dict") else None)


def _open(model: Any) -> tuple[nn.Module | None, Source | None, str]:
    """The module of a model, what its files say, and what it is in words."""
    if isinstance(model, nn.Module):
        return model, None, type(model).__name__
    if isinstance(model, str | os.PathLike):
        path = Path(model)
        folder = path if path.is_dir() else path.parent
        is_file = path.name.endswith((".safetensors", ".safetensors.index.json"))
        if not is_file and not (path.is_dir() and any(path.glob("*.safetensors*"))):
            return build_on_meta(str(model)), None, str(model)
        with open_source(model) as source:  # its entries stay valid when it is closed
            built = _built(folder / _CONFIG)
            if built is not None and source.layers:
                put_stored_layers(model, source, built)
            return built, source, str(model)
    if not callable(model):
        raise PlanError(
            f"sizes: found a {type(model).__name__}. Pass a module, a function that builds one, a "
            f"folder with safetensors files, a config, or 'package.module:function'."
        )
    with torch.device("meta"):
        built = model()
    if not isinstance(built, nn.Module):
        raise PlanError(f"sizes: {model!r} returned a {type(built).__name__}, not a module.")
    return built, None, type(built).__name__


def _built(config: Path) -> nn.Module | None:
    """The model of a config beside model files; None if there is none to build."""
    if not config.is_file() or "model_type" not in read_json(config):
        return None
    try:
        return build_on_meta(str(config))
    except MissingPackageError:  # names of tensors suffice then
        return None


def _walk(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under each of its names, parents first."""
    waiting = [("", module)]
    while waiting:
        name, part = waiting.pop()
        yield name, part
        if part._modules:
            start = f"{name}." if name else ""
            children = [(start + key, one) for key, one in part._modules.items() if one is not None]
            waiting.extend(reversed(children))


def _check_kinds(kinds: set[str], parts: list[nn.Module]) -> None:
    there = {type(part).__name__ for part in parts}
    if unknown := sorted(kinds - there):
        raise PlanError(
            f"sizes(no_split=...): the model has no module of the class {', '.join(unknown)}. It "
            f"has {', '.join(sorted(there)[:20])}."
        )


def _count_module(
    module: nn.Module, kinds: set[str], stored: Mapping[str, Entry], tally: Tally
) -> None:
    inside: str | None = None  # what the names of modules in the open unit start with
    for name, part in _walk(module):
        if inside is None or not name.startswith(inside):
            # MultiheadAttention reads the weights of its child without calling it.
            whole = type(part).__name__ in kinds or isinstance(part, nn.MultiheadAttention)
            tally.close()
            tally.open(name, type(part).__name__, whole=whole)
            inside = (f"{name}." if name else "") if whole or not part._modules else None
        alone = inside is None  # a module beside whose children there are tensors
        for held, buffer in ((part._parameters, False), (part._buffers, True)):
            for key, tensor in held.items():
                if tensor is None:
                    continue
                path = f"{name}.{key}" if name else key
                if alone:
                    tally.close()
                    tally.open(path)
                dtype = tensor.dtype if path not in stored else stored[path].dtype
                plain, numel = type(tensor) in _PLAIN, tensor.numel()
                if not plain and (packed := live_tensors(part)):
                    start = f"{name}." if name else ""
                    _count_packed(start, packed, tally)
                    continue
                size = numel * dtype.itemsize if plain or path in stored else _nbytes(tensor)
                identity = _identity(tensor, numel) if plain and numel else id(tensor)
                tally.add(path, identity, dtype, numel, size, buffer=buffer)
    tally.close()


def _count_packed(start: str, packed: Mapping[str, Tensor], tally: Tally) -> None:
    """Count the tensors of a quantised weight, whose dtypes no rule changes."""
    for key, tensor in packed.items():
        size = tensor.numel() * tensor.element_size()
        tally.add(start + key, id(tensor), torch.uint8, size, size, buffer=False)


def _nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor; of one that wraps others, such as torchao's, those of what it wraps."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        return sum(_nbytes(getattr(tensor, name)) for name in flatten()[0])
    return tensor.numel() * tensor.element_size()


def _identity(tensor: Tensor, numel: int) -> Any:
    """Equal for tensors that are one: the same part of the same memory, or of none on meta."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == numel * tensor.element_size():
        return -storage._cdata  # no id of an object is negative
    return storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def _count_files(stored: Mapping[str, Entry], tally: Tally) -> None:
    """Units by names alone: the layers of numbered sequences, and modules outside of them."""
    units: dict[str, list[Entry]] = {}
    for entry in stored.values():
        units.setdefault(layer_of(entry.name), []).append(entry)
    for unit, entries in units.items():
        tally.open(unit, whole=any(entry.name.rpartition(".")[0] != unit for entry in entries))
        for entry in entries:
            numel = entry.nbytes // entry.dtype.itemsize
            tally.add(entry.name, entry.name, entry.dtype, numel, entry.nbytes, buffer=False)
        tally.close()
