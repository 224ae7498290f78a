"""The weights in a checkpoint, saved by any number of ranks: loaded, or merged into model files."""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from fxtrain._display import read_bytes
from fxtrain._reading import StrPath, path_problem
from fxtrain.checkpoint.folders import find_checkpoint
from fxtrain.checkpoint.manifest import Manifest
from fxtrain.checkpoint.reading import open_reader
from fxtrain.checkpoint.storage import LocalStorage, Storage
from fxtrain.errors import CheckpointError
from fxtrain.models.folder import (
    commit,
    split_into_files,
    staging,
    write_index,
)
from fxtrain.models.safetensors_files import writing
from fxtrain.models.stored_layers import saved_layers
from fxtrain.models.tensor_sources import TensorSource, WeightSource, read_hull
from fxtrain.ops.tensor_bytes import DTYPES
from fxtrain.state import FileTensor, TensorIndex
from fxtrain.state.keys import WEIGHTS


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
    limit: Any = read_bytes(max_shard, "max_shard")
    weights = saved_weights(path, model=model)
    if problem := path_problem(folder):
        raise CheckpointError(f"merge(folder=...): {problem}.")
    target = Path(folder).absolute()
    with weights.open() as source:
        for name, entry in source.entries.items():
            if entry.dtype.is_complex:
                raise CheckpointError(
                    f"{source.what} cannot be merged: safetensors cannot hold complex tensors, "
                    f"such as {name}. Save them as real tensors (torch.view_as_real)."
                )
        if described := [name for name, layer in source.layers.items() if layer.facts]:
            raise CheckpointError(
                f"{source.what} cannot be merged: files of quantized layers, such as "
                f"{described[0]}, are written from a model. Load the checkpoint into one: "
                f"fx.load_model(fx.checkpoint.saved_weights(...), net), and use fx.export(net, "
                f"folder)."
            )
        files = split_into_files(list(source.entries.values()), limit, source.others)
        try:
            with staging(target) as fresh:
                for file in files:
                    with writing(fresh / file.name, file.entries, file.metadata) as put:
                        for entry in file.entries:
                            put(source.read(entry.name, None))
                write_index(fresh, files)
                commit(fresh, target)
        except OSError as error:
            raise CheckpointError(f"merge from {source.what} to {target}: {error}.") from error
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
        Loaded(missing=(), unexpected=(), other_shapes=())
        >>> torch.equal(net.weight, other.weight)
        True
    """
    storage, manifest = find_checkpoint(path)
    if model is None and len(manifest.models) == 1:
        model = next(iter(manifest.models))
    if model is None or model not in manifest.models:
        what = "several models" if model is None else f"no model {model!r}"
        choices = " or ".join(map(repr, manifest.models))
        raise CheckpointError(f"{storage} contains {what}. Choose one: model={choices}.")
    opened = functools.partial(_open, storage, manifest, model)
    return WeightSource(what=str(storage), open=opened)


@contextmanager
def _open(storage: Storage, manifest: Manifest, model: str) -> Iterator[TensorSource]:
    """The tensors of a model in a checkpoint."""
    keys = manifest.keys_of(model)
    paths = {key.name: path for key, path in keys.items() if key.kind == WEIGHTS}
    first: dict[str, str] = {}  # by the path that is stored
    others: dict[str, str] = {}
    entries: dict[str, FileTensor] = {}
    for name, path in paths.items():
        where = manifest.aliases.get(path, path)
        if first.setdefault(where, name) != name:
            others[name] = first[where]
            continue
        stored = manifest.tensors[where]
        entry = FileTensor(name=name, dtype=DTYPES[stored.dtype], shape=stored.shape)
        if len(stored.parts) == 1 and isinstance(storage, LocalStorage):
            (part,) = stored.parts  # one local file contains all of it
            place = {"path": Path(storage.path).absolute() / part.file, "start": part.offset}
            entry = attrs.evolve(entry, **place)
        entries[name] = entry

    with open_reader(storage, manifest) as reader:

        def read(name: str, part: TensorIndex | None) -> Tensor:
            if not part:
                return reader.new(paths[name])
            return read_hull(part, entries[name].dtype, functools.partial(reader.box, paths[name]))

        layers, metadata = saved_layers(str(storage), entries, manifest.models[model])
        yield TensorSource(
            what=str(storage), entries=entries, others=others, read=read, metadata=metadata,
            layers=layers,
        )  # fmt: skip
