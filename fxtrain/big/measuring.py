"""The sizes of a model's units, measured on a module, on code that builds one, or on files."""

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor, nn

from fxtrain.errors import MissingPackageError, PlanError
from fxtrain.models.code_models import KvCache, build_on_meta, cache_of, read_json
from fxtrain.models.quantized_loading import put_stored_layers
from fxtrain.models.tensor_sources import open_source
from fxtrain.ops.block_names import names_among, own_names
from fxtrain.precision.quantizing import live_tensors, quantize_layers
from fxtrain.state import FileTensor, Quantize, Unit
from fxtrain.state.placement import dtype_of

_CONFIG = "config.json"
_PLAIN = frozenset((Tensor, nn.Parameter))
_IN_FP32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")  # lists of transformers
_Rules = tuple[tuple[str, str], ...]  # patterns of names, and dtypes


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
    dtypes: tuple[tuple[str, str], ...] = ()
    cache: KvCache | None = None
    itemsize: int = 4

    @property
    def bytes(self) -> int:
        """Of all tensors, each counted once."""
        return sum(unit.bytes for unit in self.units)


def sizes(
    model: nn.Module | str | os.PathLike[str] | Callable[[], nn.Module],
    *,
    no_split: Iterable[str] | None = None,
    dtype: str | None = None,
    dtypes: Mapping[str, str] | Iterable[tuple[str, str]] = (),
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
        quantize: Measure linear layers as this record quantizes them: `fx.Bnb4()`. Those that
            are quantized already, in the module or in the files, are measured so in any case.

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
    rules: _Rules = tuple(dict[str, str](dtypes).items())
    module, stored = open_model(model)
    source = str(model) if isinstance(model, str | os.PathLike) else type(module).__name__
    parts = [] if module is None else [part for _, part in _walk(module)]
    if dtype is not None:
        in_fp32 = sorted(set[str]().union(*(own_names(parts, words) for words in _IN_FP32)))
        rules += tuple((f"*{name}*", "float32") for name in in_fp32)
        rules += (("*", dtype),)
    if module is None:
        if no_split or quantize is not None:
            field = "no_split" if no_split else "quantize"
            raise PlanError(
                f"sizes({field}=...): {source} has names of tensors but no classes. Omit {field}, "
                f"or pass the model's config or code. The layers of numbered sequences are not "
                f"split."
            )
        return _sizes(tensors_of_files(stored), source, rules, None)
    kinds = set(names_among(parts) if no_split is None else no_split)
    classes = {type(part).__name__ for part in parts}
    if no_split is not None and (unknown := sorted(kinds - classes)):
        raise PlanError(
            f"sizes(no_split=...): the model has no module of the class {', '.join(unknown)}. It "
            f"has {', '.join(sorted(classes)[:20])}."
        )
    undo = None if quantize is None else quantize_layers(module, quantize, torch.device("meta"))
    try:
        return _sizes(tensors_of(module, kinds, stored), source, rules, cache_of_model(module))
    finally:
        if undo is not None:
            undo()


class TensorSize(NamedTuple):
    """One name of a tensor; names with equal keys are one tensor, which is held once.

    Attributes:
        name: Dotted name in the model.
        key: Identifies the tensor.
        numel: Number of elements; of a quantized weight, those that it stands for, counted in the
            first of its tensors.
        nbytes: Bytes as held.
        dtype: None for the tensors of a quantized weight.
        trained: Whether it requires a gradient.
        buffer: Whether it is a buffer.
        unit: Name of its unit.
        kind: Class of the unit; empty for a tensor.
    """

    name: str
    key: Any
    numel: int
    nbytes: int
    dtype: torch.dtype | None
    trained: bool
    buffer: bool
    unit: str
    kind: str = ""

    @property
    def floating(self) -> bool:
        """Whether it can be converted to another floating-point dtype."""
        return self.dtype is not None and self.dtype.is_floating_point


def _sizes(
    tensors: Iterable[TensorSize],
    source: str,
    rules: _Rules,
    cache: KvCache | None,
) -> Sizes:
    """Add up the tensors of each unit, in the dtypes that rules give them."""
    widths = {name: _itemsize(name) for _, name in rules}
    units: dict[str, list[int]] = {}  # bytes, those of buffers, and those that it computes with
    kinds: dict[str, str] = {}
    nbytes: dict[str, int] = {}
    first: dict[Any, str] = {}
    tied: dict[str, list[str]] = {}
    read: set[tuple[str, Any]] = set()
    elements = Counter[int]()
    buffers: list[str] = []
    for tensor in tensors:
        size = tensor.nbytes
        if tensor.dtype is not None and not tensor.buffer:
            width = tensor.dtype.itemsize
            rule = dtype_of(rules, tensor.name) if tensor.dtype.is_floating_point else None
            if rule is not None:
                width = widths[rule]
                size = tensor.numel * width
            elements[width] += tensor.numel
        unit = units.setdefault(tensor.unit, [0, 0, 0])
        kinds[tensor.unit] = tensor.kind
        if not tensor.buffer and (tensor.unit, tensor.key) not in read:
            unit[2] += size
        read.add((tensor.unit, tensor.key))
        before = first.setdefault(tensor.key, tensor.name)
        if before is not tensor.name:
            tied.setdefault(before, [before]).append(tensor.name)
            size = 0
        nbytes[tensor.name] = size
        unit[0] += size
        if tensor.buffer:
            unit[1] += size
            buffers.append(tensor.name)
    return Sizes(
        source=source,
        units=tuple(
            Unit(name=name, kind=kinds[name], bytes=total, buffers=held, reads=reads)
            for name, (total, held, reads) in units.items()
        ),
        tensors=nbytes,
        buffers=frozenset(buffers),
        tied=tuple(map(tuple, tied.values())),
        dtypes=rules,
        cache=cache,
        itemsize=max(elements, key=elements.__getitem__, default=4),
    )


def open_model(
    model: Any, *, build: bool = True
) -> tuple[nn.Module | None, Mapping[str, FileTensor]]:
    """The module of a model, if there is code for it, and the tensors in its files.

    Args:
        model: As for `sizes`.
        build: Build the model of a config that is beside its files.
    """
    if isinstance(model, nn.Module):
        return model, {}
    if not isinstance(model, str | os.PathLike):
        with torch.device("meta"):
            return model(), {}
    path = Path(model)
    is_config = path.suffix == ".json" and not path.name.endswith(".index.json")
    is_empty = path.is_dir() and not any(path.glob("*.safetensors*"))
    if is_config or is_empty or not os.path.exists(path):
        return build_on_meta(model), {}
    with open_source(model) as source:  # its entries stay valid when it is closed
        built = _built(config_beside(path)) if build else None
        if built is not None and source.layers:
            put_stored_layers(model, source, built)
        return built, source.entries


def config_beside(path: Path) -> Path:
    """Where the config of a model is that has these files."""
    return (path if path.is_dir() else path.parent) / _CONFIG


def cache_of_model(module: Any) -> KvCache | None:
    """The shape of a model's key-value cache; None if unknown."""
    config: Any = getattr(module, "config", None)
    return cache_of(config.to_dict()) if hasattr(config, "to_dict") else None


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


def tensors_of(
    module: nn.Module, kinds: Collection[str] = (), stored: Mapping[str, FileTensor] | None = None
) -> Iterator[TensorSize]:
    """Every name of every parameter and buffer of a module, and of its quantized weights.

    Args:
        kinds: Classes of modules that are one unit.
        stored: Tensors in files, whose dtypes the module's will have.
    """
    stored = stored or {}
    inside: str | None = None  # what the names of modules in the open unit start with
    unit = kind = ""
    for name, part in _walk(module):
        if inside is None or not name.startswith(inside):
            # MultiheadAttention reads the weights of its child without calling it.
            whole = type(part).__name__ in kinds or isinstance(part, nn.MultiheadAttention)
            unit, kind = name, type(part).__name__
            inside = (f"{name}." if name else "") if whole or not part._modules else None
        alone = inside is None  # a module beside whose children there are tensors
        for tensors, buffer in ((part._parameters, False), (part._buffers, True)):
            for key, tensor in tensors.items():
                if tensor is None:
                    continue
                path = f"{name}.{key}" if name else key
                home = (path, "") if alone else (unit, kind)
                plain, numel = type(tensor) in _PLAIN, tensor.numel()
                if not plain and (packed := live_tensors(part)):
                    linear: Any = part
                    count = linear.in_features * linear.out_features
                    for inner, value in packed.items():
                        own = f"{name}.{inner}" if name else inner
                        yield TensorSize(
                            own, id(value), count, value.nbytes, dtype=None, trained=False,
                            buffer=False, unit=home[0], kind=home[1],
                        )  # fmt: skip
                        count = 0
                    continue
                dtype = tensor.dtype if path not in stored else stored[path].dtype
                size = numel * dtype.itemsize if plain or path in stored else _nbytes(tensor)
                identity = _identity(tensor, numel) if plain and numel else id(tensor)
                trained = tensor.requires_grad
                yield TensorSize(path, identity, numel, size, dtype, trained, buffer, *home)


def _nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor, summed over its inner tensors if it is a wrapper subclass."""
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


def tensors_of_files(stored: Mapping[str, FileTensor]) -> Iterator[TensorSize]:
    """Units by names alone: the layers of numbered sequences, and modules outside of them."""
    for name, entry in stored.items():
        yield TensorSize(
            name, name, math.prod(entry.shape), entry.nbytes, entry.dtype,
            trained=entry.dtype.is_floating_point, buffer=False, unit=layer_of(name),
        )  # fmt: skip


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to: an item of a numbered sequence, or else its module."""
    numbered = re.match(r"(.*?(?:^|\.)\d+)\.", name)
    return numbered[1] if numbered else name.rpartition(".")[0] or name


def _itemsize(name: str) -> int:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(
            f"sizes: {name!r} is not a dtype. Choose one by torch's name, such as 'bfloat16'."
        )
    return dtype.itemsize
