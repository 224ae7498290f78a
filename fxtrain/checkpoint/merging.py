"""The weights in a checkpoint, saved by any number of ranks: loaded, or merged into model files."""

import functools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
from torch import Tensor

from fxtrain._reading import StrPath, path_problem
from fxtrain.checkpoint.folders import checkpoint_at, read_manifest
from fxtrain.checkpoint.manifest import Manifest
from fxtrain.checkpoint.reading import open_reader
from fxtrain.checkpoint.storage import LocalStorage, Storage
from fxtrain.errors import CheckpointError
from fxtrain.models.folder import (
    commit,
    parse_size,
    split,
    staging,
    write_index,
)
from fxtrain.models.safetensors_files import Entry, writing
from fxtrain.models.tensor_bytes import DTYPES
from fxtrain.models.tensor_sources import Source, WeightSource, read_hull
from fxtrain.state import Location, TensorIndex

_PARAMETERS = "module."


def merge(
    path: StrPath,
    folder: str | os.PathLike[str],
    *,
    model: str | None = None,
    max_shard: str | int = "5GB",
) -> tuple[Path, ...]:
    """Write the weights in a checkpoint as model files, in the format of `export`.

    Needs neither the model's code nor the ranks that saved it.

    Args:
        path: A checkpoint, or the folder of a run, whose latest checkpoint is used.
        folder: Destination. Replaces weights of an earlier export and keeps other files.
        model: Name of the model, if the checkpoint contains several.
        max_shard: Largest number of bytes of values in one file, as a number or as "5GB".

    Returns:
        The paths of the weight files.

    Effects:
        Reads only the weights, one tensor at a time. No collectives: call it on one rank. Calls
        of several processes for one folder write it one after the other.

    Raises:
        CheckpointError: the checkpoint or the model does not exist, or is damaged; or the folder
            cannot be written.

    Example:
        >>> import fxtrain as fx, tempfile, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        ...     saving = fx.save(tempfile.mkdtemp(), ctx, model)
        ...     [file.name for file in fx.checkpoint.merge(saving.path, tempfile.mkdtemp())]
        ['model.safetensors']
    """
    found = _find_weights(path, model)
    _check(found)
    files = split(list(found.entries.values()), parse_size(max_shard), found.others)
    if problem := path_problem(folder):
        raise CheckpointError(f"merge(folder=...): {problem}.")
    target = Path(folder).absolute()
    try:
        with open_reader(found.storage, found.manifest) as reader, staging(target) as source:
            for file in files:
                with writing(source / file.name, file.entries, file.metadata) as put:
                    for entry in file.entries:
                        put(reader.new(found.prefix + entry.name))
            write_index(source, files)
            commit(source, target)
    except OSError as error:
        raise CheckpointError(f"merge from {found.storage} to {target}: {error}.") from error
    return tuple(target / file.name for file in files)


def saved_weights(path: StrPath, *, model: str | None = None) -> WeightSource:
    """The weights in a checkpoint, as a source for `load_model`.

    Args:
        path: A checkpoint, or the folder of a run, whose latest checkpoint is used.
        model: Name of the model, if the checkpoint contains several.

    Returns:
        What `load_model` reads. The files are open only while it does. Each rank reads what it
        holds, and verifies what it reads; a unit that `fx.Offload` has on disk is used where it is
        in the checkpoint if it was saved by one rank, without verifying it.

    Effects:
        Reads the manifest.

    Raises:
        CheckpointError: the checkpoint or the model does not exist, or is damaged.

    Example:
        >>> import fxtrain as fx, tempfile, torch
        >>> net, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     saving = fx.save(tempfile.mkdtemp(), ctx, fx.wrap(net, ctx))
        >>> fx.load_model(fx.checkpoint.saved_weights(saving.path), other)
        Loaded(missing=(), unexpected=())
        >>> torch.equal(net.weight, other.weight)
        True
    """
    found = _find_weights(path, model)
    return WeightSource(what=str(found.storage), open=functools.partial(_open, found))


@attrs.frozen(kw_only=True)
class _Weights:
    """The weights of one model in a checkpoint.

    Attributes:
        storage: The checkpoint.
        manifest: Its manifest.
        prefix: Of the names of its tensors there.
        entries: Its tensors by name, without the prefix.
        others: More names of tied tensors, each with the name in `entries`.
    """

    storage: Storage
    manifest: Manifest
    prefix: str
    entries: dict[str, Entry]
    others: dict[str, str]


def _find_weights(path: StrPath, model: str | None) -> _Weights:
    storage = checkpoint_at(path)
    manifest = read_manifest(storage)
    prefix = f"{_chosen(manifest, model, storage)}/{_PARAMETERS}"
    entries = {
        name.removeprefix(prefix): Entry(
            name=name.removeprefix(prefix), dtype=DTYPES[one.dtype], shape=one.shape
        )
        for name, one in manifest.tensors.items()
        if name.startswith(prefix)
    }
    others = {
        name.removeprefix(prefix): kept.removeprefix(prefix)
        for name, kept in manifest.aliases.items()
        if name.startswith(prefix)
    }
    return _Weights(
        storage=storage, manifest=manifest, prefix=prefix, entries=entries, others=others
    )


@contextmanager
def _open(found: _Weights) -> Iterator[Source]:
    with open_reader(found.storage, found.manifest) as reader:

        def read(name: str, part: TensorIndex | None) -> Tensor:
            entry, saved = found.entries[name], found.prefix + name
            if part is None or not part:
                return reader.new(saved)
            return read_hull(part, entry.dtype, functools.partial(reader.box, saved))

        yield Source(
            what=str(found.storage),
            entries=found.entries,
            others=found.others,
            read=read,
            locate=functools.partial(_locate, found),
        )


def _locate(found: _Weights, name: str) -> Location | None:
    """Where a tensor is in a file, if one local file contains all of it."""
    saved = found.manifest.tensors[found.prefix + name]
    if len(saved.parts) != 1 or not isinstance(found.storage, LocalStorage):
        return None
    entry = found.entries[name]
    (part,) = saved.parts
    return Location(
        path=Path(found.storage.path) / part.file,
        start=part.offset,
        nbytes=math.prod(entry.shape) * entry.dtype.itemsize,
        dtype=entry.dtype,
        shape=entry.shape,
    )


def _chosen(manifest: Manifest, requested: str | None, storage: Storage) -> str:
    if requested is None and len(manifest.models) == 1:
        return next(iter(manifest.models))
    if requested is None or requested not in manifest.models:
        what = "several models" if requested is None else f"no model {requested!r}"
        choices = " or ".join(map(repr, manifest.models))
        raise CheckpointError(f"{storage} contains {what}. Choose one: model={choices}.")
    return requested


def _check(found: _Weights) -> None:
    complex_ones = [name for name, entry in found.entries.items() if entry.dtype.is_complex]
    if complex_ones:
        raise CheckpointError(
            f"{found.storage} cannot be merged: safetensors cannot hold complex tensors, such as "
            f"{complex_ones[0]}. Save them as real tensors (torch.view_as_real)."
        )
