"""The sizes of a model's units, measured on a module, on code that builds one, or on files."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain.errors import MissingPackageError, PlanError
from fxtrain.models.block_names import names_among, own_names
from fxtrain.models.memory_estimates import BYTES, layer_of
from fxtrain.models.quantized_loading import put_stored_layers
from fxtrain.models.safetensors_files import Entry
from fxtrain.models.tensor_sources import Source, open_source
from fxtrain.models.weight_list import KvCache, build_on_meta, cache_of, read_json
from fxtrain.precision.plain_tensors import live_tensors
from fxtrain.precision.quantizing import quantize_on_meta
from fxtrain.state import DtypeRule, Quantize, Unit
from fxtrain.state.placement import dtype_of, rules_of

_CONFIG = "config.json"
_PLAIN = frozenset((Tensor, nn.Parameter))
_IN_FP32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")  # lists of transformers


@attrs.frozen(kw_only=True)
class Sizes:
    """The sizes of a model, without its values.

    Attributes:
        source: Description of the model.
        units: In the order of the model; each tensor belongs to one of them.
        tensors: Bytes by every name of every parameter and buffer, in the order of the model; 0
            for a tensor that is tied to one before it.
        buffers: The names of buffers.
        tied: Groups of names of one tensor.
        dtypes: Rules by which the sizes were computed.
        cache: Shape of the key-value cache; None if unknown.
        itemsize: Bytes of an element of most parameters.
    """

    source: str
    units: tuple[Unit, ...]
    tensors: Mapping[str, int] = attrs.field(repr=False)
    buffers: frozenset[str] = attrs.field(default=frozenset(), repr=False)
    tied: tuple[tuple[str, ...], ...] = ()
    dtypes: tuple[DtypeRule, ...] = ()
    cache: KvCache | None = None
    itemsize: int = 4

    @property
    def bytes(self) -> int:
        """Of all tensors, each counted once."""
        return sum(unit.bytes for unit in self.units)


class _Tally:
    """Counts the tensors of one unit after another.

    It keeps no object for a tensor but its name: a model may have 170,000, and Python's garbage
    collector looks at every object again and again.
    """

    def __init__(
        self, rules: tuple[DtypeRule, ...], special: Mapping[str, float | str] | None
    ) -> None:
        self.rules = rules
        self.widths = {rule.dtype: _itemsize(rule.dtype) for rule in rules}
        packed = special or {}
        self.packed = tuple(DtypeRule(match=match, dtype=match) for match in packed)
        self.per_element = {match: _per_element(match, size) for match, size in packed.items()}
        self.units: list[Unit] = []
        self.tensors: dict[str, int] = {}
        self.buffers: list[str] = []
        self.first: dict[Any, str] = {}
        self.tied: dict[str, list[str]] = {}
        self.elements: dict[int, int] = {}
        self.open("")

    def open(self, name: str, kind: str = "") -> None:
        """Begin a unit."""
        self.name, self.kind = name, kind
        self.bytes = self.in_buffers = self.reads = 0
        self.inside: set[Any] = set()

    def close(self) -> None:
        """End the unit; a unit without tensors is dropped."""
        if self.inside:
            unit = Unit(
                name=self.name, bytes=self.bytes, buffers=self.in_buffers, reads=self.reads,
                kind=self.kind,
            )  # fmt: skip
            self.units.append(unit)

    def add(
        self, name: str, key: Any, dtype: torch.dtype, numel: int, nbytes: int, *, buffer: bool
    ) -> None:
        """Count a tensor under one of its names; tensors with equal keys are one."""
        if buffer:
            size = nbytes
        else:
            size = self._held(name, dtype, numel, nbytes)
            if key not in self.inside:
                self.reads += size
        self.inside.add(key)
        before = self.first.setdefault(key, name)
        if before is not name:
            self.tied.setdefault(before, [before]).append(name)
            size = 0
        self.tensors[name] = size
        self.bytes += size
        if buffer:
            self.in_buffers += size
            self.buffers.append(name)

    def sizes(self, source: str, cache: KvCache | None) -> Sizes:
        """The sizes of all units so far."""
        return Sizes(
            source=source,
            units=tuple(self.units),
            tensors=self.tensors,
            buffers=frozenset(self.buffers),
            tied=tuple(map(tuple, self.tied.values())),
            dtypes=self.rules,
            cache=cache,
            itemsize=max(self.elements, key=lambda width: self.elements[width], default=4),
        )

    def _held(self, name: str, dtype: torch.dtype, numel: int, nbytes: int) -> int:
        """Bytes of a parameter in the format that rules give it."""
        width = dtype.itemsize
        if (self.packed or self.rules) and dtype.is_floating_point:
            match = dtype_of(self.packed, name)
            if match is not None:
                return round(numel * self.per_element[match])
            word = dtype_of(self.rules, name)
            if word is not None:
                width = self.widths[word]
                nbytes = numel * width
        self.elements[width] = self.elements.get(width, 0) + numel
        return nbytes


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
    module, files, source = _open(model)
    parts = [] if module is None else [part for _, part in _walk(module)]
    if dtype is not None:
        in_fp32 = sorted(set[str]().union(*(own_names(parts, words) for words in _IN_FP32)))
        rules += tuple(DtypeRule(match=f"*{name}*", dtype="float32") for name in in_fp32)
        rules += (DtypeRule(match="*", dtype=dtype),)
    tally = _Tally(rules, special)
    stored = {} if files is None else files.entries
    if module is None:
        if no_split or quantize is not None:
            field = "no_split" if no_split else "quantize"
            raise PlanError(
                f"sizes({field}=...): {source} has names of tensors but no classes. Omit {field}, "
                f"or pass the model's config or code. The layers of numbered sequences are not "
                f"split."
            )
        _count_files(stored, tally)
        return tally.sizes(source, None)
    kinds = set(names_among(parts) if no_split is None else no_split)
    classes = {type(part).__name__ for part in parts}
    if no_split is not None and (unknown := sorted(kinds - classes)):
        raise PlanError(
            f"sizes(no_split=...): the model has no module of the class {', '.join(unknown)}. It "
            f"has {', '.join(sorted(classes)[:20])}."
        )
    undo = None if quantize is None else quantize_on_meta(module, quantize)
    try:
        _count_module(module, kinds, stored, tally)
    finally:
        if undo is not None:
            undo()
    config: Any = getattr(module, "config", None)
    return tally.sizes(source, cache_of(config.to_dict()) if hasattr(config, "to_dict") else None)


def _open(model: Any) -> tuple[nn.Module | None, Source | None, str]:
    """The module of a model, its files, and a description of the source."""
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
    with torch.device("meta"):
        built = model()
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
            children = list(part._modules.items())
            waiting.extend(
                (start + key, child) for key, child in reversed(children) if child is not None
            )


def _count_module(
    module: nn.Module, kinds: set[str], stored: Mapping[str, Entry], tally: _Tally
) -> None:
    inside: str | None = None  # what the names of modules in the open unit start with
    for name, part in _walk(module):
        if inside is None or not name.startswith(inside):
            # MultiheadAttention reads the weights of its child without calling it.
            whole = type(part).__name__ in kinds or isinstance(part, nn.MultiheadAttention)
            tally.close()
            tally.open(name, type(part).__name__)
            inside = (f"{name}." if name else "") if whole or not part._modules else None
        alone = inside is None  # a module beside whose children there are tensors
        for tensors, buffer in ((part._parameters, False), (part._buffers, True)):
            for key, tensor in tensors.items():
                if tensor is None:
                    continue
                path = f"{name}.{key}" if name else key
                if alone:
                    tally.close()
                    tally.open(path)
                dtype = tensor.dtype if path not in stored else stored[path].dtype
                plain, numel = type(tensor) in _PLAIN, tensor.numel()
                if not plain and (packed := live_tensors(part)):
                    for inner, value in packed.items():  # no rule changes their dtypes
                        size = value.numel() * value.element_size()
                        path = f"{name}.{inner}" if name else inner
                        tally.add(path, id(value), torch.uint8, size, size, buffer=False)
                    continue
                size = numel * dtype.itemsize if plain or path in stored else _nbytes(tensor)
                identity = _identity(tensor, numel) if plain and numel else id(tensor)
                tally.add(path, identity, dtype, numel, size, buffer=buffer)
    tally.close()


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


def _count_files(stored: Mapping[str, Entry], tally: _Tally) -> None:
    """Units by names alone: the layers of numbered sequences, and modules outside of them."""
    units: dict[str, list[Entry]] = {}
    for entry in stored.values():
        units.setdefault(layer_of(entry.name), []).append(entry)
    for unit, entries in units.items():
        tally.open(unit)
        for entry in entries:
            numel = entry.nbytes // entry.dtype.itemsize
            tally.add(entry.name, entry.name, entry.dtype, numel, entry.nbytes, buffer=False)
        tally.close()


def _itemsize(name: str) -> int:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(
            f"sizes: {name!r} is not a dtype. Choose one by torch's name, such as 'bfloat16'."
        )
    return dtype.itemsize


def _per_element(match: str, size: float | str) -> float:
    nbytes = BYTES.get(size) if isinstance(size, str) else size
    if not isinstance(nbytes, int | float) or nbytes <= 0:
        raise PlanError(
            f"sizes(special={{{match!r}: {size!r}}}): choose a number of bytes per element, or "
            f"one of {', '.join(map(repr, BYTES))}."
        )
    return nbytes
