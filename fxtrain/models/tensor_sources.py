"""Sources of a model's values: model files, an index over several, or tensors."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fxtrain._reading import path_problem, read_file
from fxtrain._record import shown
from fxtrain.errors import CheckpointError
from fxtrain.models.folder import INDEX, LARGEST_INDEX, MARKER, SINGLE
from fxtrain.models.gguf_files import read_gguf
from fxtrain.models.pickles import load_weights_only
from fxtrain.models.safetensors_files import parse_json_object, read_header
from fxtrain.models.stored_layers import StoredLayer, stored_layers
from fxtrain.ops.whole_tensors import full_values
from fxtrain.state import FileTensor, TensorIndex

_PICKLES = (".bin", ".pt", ".pth")
_MODEL_SUFFIXES = (".safetensors", *_PICKLES, ".gguf")
_CHECKPOINT = "manifest.json"
# The last one as in Accelerate's guide to big models.
_OTHER_NAMES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "index.json")

Read = Callable[[str, TensorIndex | None], Tensor]


@attrs.frozen(kw_only=True, eq=False)
class TensorSource:
    """Tensors that can be read by name, in full or in part."""

    what: str  # for messages
    entries: Mapping[str, FileTensor]
    others: Mapping[str, str]  # additional names, each with the name in `entries`
    read: Read  # (name, part) → values, on any device; valid while the source is open
    metadata: Mapping[str, str] = attrs.Factory(dict)  # of the files, in any form
    layers: Mapping[str, StoredLayer] = attrs.Factory(dict)  # those that are quantized


@attrs.frozen(kw_only=True, eq=False)
class WeightSource:
    """Weights of a model that `load_model` can read, in another format than model files.

    Attributes:
        what: Description for messages.
        open: () → context manager of the opened tensors.
    """

    what: str
    open: Callable[[], contextlib.AbstractContextManager[TensorSource]] = attrs.field(repr=False)


@contextlib.contextmanager
def open_source(source: Any) -> Iterator[TensorSource]:
    """Open a file, an index, a folder, a mapping of tensors or a `WeightSource`."""
    if isinstance(source, Mapping):
        yield with_layers(_of_tensors(dict(source), "the state dict"))
        return
    if isinstance(source, WeightSource):
        with source.open() as opened:
            yield with_layers(opened)
        return
    if not isinstance(source, str | os.PathLike):
        raise CheckpointError(
            "load_model reads a file, a folder, a dict of tensors or "
            f"fx.checkpoint.saved_weights(...), found {type(source).__name__}."
        )
    if problem := path_problem(source):
        raise CheckpointError(f"load_model(source=...): {problem}.")
    path = Path(source)
    if os.path.isdir(path):
        path = _in_folder(path)
    if not os.path.exists(path):
        raise CheckpointError(
            f"load_model: {shown(str(source))} is neither a file nor a folder. Download a model "
            f"from a hub first.",
            code="FX601",
        )
    files = _read_index(path) if path.suffix == ".json" else {path: None}
    with contextlib.ExitStack() as stack:
        opened = [_open_file(file, names, stack) for file, names in files.items()]
        yield with_layers(_join(str(source), opened))


def renamed(
    source: TensorSource, prefix: str, rename: Callable[[str], str | None] | None
) -> TensorSource:
    """The tensors of a source under the model's names for them.

    Only names with the prefix are kept, without it. `rename` may return None to skip a tensor. Two
    tensors with one name are a CheckpointError.
    """
    if not prefix and rename is None:
        return source

    def new(name: str) -> str | None:
        if not name.startswith(prefix):
            return None
        return name[len(prefix) :] if rename is None else rename(name[len(prefix) :])

    before: dict[str, str] = {}
    for name in source.entries:
        now = new(name)
        if now in before:
            raise CheckpointError(
                f"load_model: prefix and rename map both {before[now]!r} and {name!r} of "
                f"{source.what} to {now!r}. Map them to different names."
            )
        if now is not None:
            before[now] = name
    after = {name: now for now, name in before.items()}
    others = {new(name): after[stored] for name, stored in source.others.items() if stored in after}
    return TensorSource(
        what=source.what,
        entries={now: source.entries[name] for now, name in before.items()},
        others={now: stored for now, stored in others.items() if now is not None},
        read=lambda name, part: source.read(before[name], part),
        metadata=source.metadata,
        layers=_renamed_layers(source, after),
    )


def _renamed_layers(source: TensorSource, after: Mapping[str, str]) -> dict[str, StoredLayer]:
    layers: dict[str, StoredLayer] = {}
    for layer, stored in source.layers.items():
        names = {key: after.get(f"{layer}.{key}") for key in stored.keys}
        new = {(name or "").removesuffix(f".{key}") for key, name in names.items()}
        if any(names.values()):
            if len(new) > 1 or not all(name and name.endswith(key) for key, name in names.items()):
                raise CheckpointError(
                    f"load_model: rename gives the tensors of the quantized layer {layer!r} names "
                    f"that do not belong together. Rename all of them alike."
                )
            layers[new.pop()] = stored
    return layers


def with_layers(source: TensorSource) -> TensorSource:
    """The same source with its quantized layers found, and their values as tensors only."""
    found = stored_layers(
        source.what, source.entries, source.metadata, lambda name: source.read(name, None)
    )
    layers = {**source.layers, **found}
    if not layers:
        return source
    entries = dict(source.entries)
    offsets: dict[str, Tensor] = {}
    for layer, stored in layers.items():
        for name in stored.summaries:
            entries.pop(name, None)
        for key, value in stored.values.items():
            name = f"{layer}.{key}"
            offsets[name] = value
            entries[name] = FileTensor(name=name, dtype=value.dtype, shape=tuple(value.shape))

    def read(name: str, part: TensorIndex | None) -> Tensor:
        return offsets[name] if name in offsets else source.read(name, part)

    return attrs.evolve(source, entries=entries, read=read, layers=layers)


def _in_folder(folder: Path) -> Path:
    """The file or index in a folder to read its model from."""
    if (folder / SINGLE).exists() and (folder / INDEX).exists() and not (folder / MARKER).exists():
        raise CheckpointError(
            f"{folder} contains both {SINGLE} and {INDEX}, one of which is outdated. Pass the "
            f"path of the current one."
        )
    for name in (SINGLE, INDEX, *_OTHER_NAMES):
        if (folder / name).exists() or (folder / name).is_symlink():
            return inside(folder, name)
    others = [*folder.glob("*.index.json"), *folder.glob("*.gguf")]
    others = others or [*folder.glob("*.safetensors")]
    if len(others) == 1:
        return inside(folder, others[0].name)
    if any(folder.glob(_CHECKPOINT)) or any(folder.glob(f"*/{_CHECKPOINT}")):
        raise CheckpointError(
            f"{folder} contains a checkpoint and no model files. Load its weights with "
            f"fx.load_model(fx.checkpoint.saved_weights({str(folder)!r}), model).",
            code="FX601",
        )
    names = sorted(path.name for path in folder.iterdir())[:10]
    raise CheckpointError(
        f"{folder} contains no {SINGLE} and no {INDEX}, but "
        f"{', '.join(names) or 'nothing else'}. Pass the path of a model file.",
        code="FX601",
    )


def _read_index(path: Path) -> dict[Path, list[str]]:
    """The files of an index, each with the names of the tensors to read from it."""
    try:
        raw = read_file(path, LARGEST_INDEX)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from error
    index = parse_json_object(raw, path)
    table = index.get("weight_map", index)
    if not isinstance(table, dict) or {type(name) for name in table.values()} != {str}:
        raise CheckpointError(f"{path} has no weight_map from tensor names to file names.")
    files: dict[str, list[str]] = {}
    for tensor, name in table.items():
        files.setdefault(name, []).append(tensor)
    return {inside(path.parent, name): tensors for name, tensors in files.items()}


def inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder; raises if the name or a link leads outside."""
    for kind in (PurePosixPath, PureWindowsPath):
        if kind(name).anchor or ".." in kind(name).parts or not kind(name).name:
            raise CheckpointError(f"{folder}: the file name {shown(name)} is outside the folder.")
    try:
        root = folder.resolve()
        real = (root / name).resolve()
        exists = real.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, NUL, or a loop of links
        why = f"the file name {shown(name)} is not valid: {error}"
        raise CheckpointError(f"{folder}: {why}.") from error
    # The cache of a model hub stores a snapshot as links into the `blobs` folder next to it.
    in_cache = root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs"
    if not real.is_relative_to(root) and not in_cache:
        raise CheckpointError(
            f"{folder}: {name} is a link to {real}, outside the folder. To read that file, pass "
            f"its path."
        )
    if not exists:
        raise CheckpointError(f"{folder}: the file {shown(name)} does not exist.")
    return folder / name


def _open_file(path: Path, names: list[str] | None, stack: contextlib.ExitStack) -> TensorSource:
    """Open one file; of an indexed file, expose only the tensors that the index lists."""
    if path.suffix == ".safetensors":
        file = _of_safetensors(path, stack)
    elif path.suffix in _PICKLES:
        contents = load_weights_only(path, str(path), mmap=True)
        if not isinstance(contents, Mapping):
            kind = type(contents).__name__
            raise CheckpointError(f"{path} contains a {kind}, not tensors by name.")
        file = _of_tensors(dict(contents), str(path))
    elif path.suffix == ".gguf":
        entries, values = read_gguf(path)
        file = TensorSource(what=str(path), entries=entries, others={}, read=_read_whole(values))
    else:
        raise CheckpointError(
            f"{path} has an unknown suffix. Pass a model file ({', '.join(_MODEL_SUFFIXES)}) or "
            f"an index (.json)."
        )
    if names is None:
        return file
    if absent := [name for name in names if name not in file.entries]:
        raise CheckpointError(
            f"{path}: the index lists {shown(absent[0])}"
            f"{f' and {len(absent) - 1} more tensors' if absent[1:] else ''}, which this file "
            f"does not contain. The index and the file belong to different models."
        )
    return attrs.evolve(file, entries={name: file.entries[name] for name in names})


def _of_safetensors(path: Path, stack: contextlib.ExitStack) -> TensorSource:
    entries, metadata = read_header(path)

    @functools.cache  # mapped when the first value is needed
    def opened() -> Any:
        try:
            return stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, RuntimeError) as error:
            raise CheckpointError(
                f"{path}: safetensors cannot read this file: {error}.", code="FX602"
            ) from error

    def read(name: str, part: TensorIndex | None) -> Tensor:
        entry = entries[name]
        if part is None or not part or not entry.nbytes:
            full = opened().get_tensor(name)
            return full if part is None else _select(full, part)
        return read_hull(part, entry.dtype, lambda hull: opened().get_slice(name)[hull])

    return TensorSource(
        what=str(path), entries=entries, others=metadata, read=read, metadata=metadata
    )


def _read_whole(values: Callable[[str], Tensor]) -> Read:
    """A function that reads a part of a tensor from its full values."""
    return lambda name, part: values(name) if part is None else _select(values(name), part)


def _of_tensors(tensors: dict[Any, Any], what: str) -> TensorSource:
    strange = [name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)]
    if strange or not all(isinstance(name, str) for name in tensors):
        names = ", ".join(shown(name) for name in (strange or list(tensors))[:5])
        raise CheckpointError(
            f"{what} should map names to tensors, but has other values under {names}. Pass only "
            f"the model's state dict."
        )

    entries = {
        name: FileTensor(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    read = _read_whole(lambda name: full_values(tensors[name]))
    return TensorSource(what=what, entries=entries, others={}, read=read)


def _join(what: str, files: list[TensorSource]) -> TensorSource:
    homes = {name: file for file in files for name in file.entries}
    # A file's metadata may contain more than names of tensors.
    others = {
        name: stored
        for file in files
        for name, stored in file.others.items()
        if stored in file.entries and name not in homes
    }
    return TensorSource(
        what=what,
        entries={name: file.entries[name] for name, file in homes.items()},
        others=others,
        read=lambda name, part: homes[name].read(name, part),
        metadata={key: text for file in files for key, text in file.metadata.items()},
    )


def read_hull(
    part: TensorIndex, dtype: torch.dtype, read: Callable[[tuple[slice, ...]], Tensor]
) -> Tensor:
    """Read a part of a tensor as the smallest box that contains it, and select from that."""
    hull = tuple(
        rows if isinstance(rows, slice) else slice(int(rows.min()), int(rows.max()) + 1)
        for rows in part
    )
    if any(rows.start == rows.stop for rows in hull):
        return torch.empty([rows.stop - rows.start for rows in hull], dtype=dtype, device="cpu")
    within = tuple(
        slice(0, rows.stop - rows.start) if isinstance(rows, slice) else rows - box.start
        for rows, box in zip(part, hull, strict=True)
    )
    return _select(read(hull), within)


def _select(tensor: Tensor, part: TensorIndex) -> Tensor:
    for dim, rows in enumerate(part):
        if isinstance(rows, slice):
            tensor = tensor.narrow(dim, rows.start, rows.stop - rows.start)
        else:
            tensor = tensor.index_select(dim, rows.to(tensor.device))
    return tensor
