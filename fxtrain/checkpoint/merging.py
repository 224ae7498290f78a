"""Merge a checkpoint, saved by any number of ranks, into the files of one model."""

import os
from collections.abc import Sequence
from pathlib import Path

from fxtrain._arguments import known_arguments
from fxtrain._errors import CheckpointError
from fxtrain._reading import StrPath, path_problem
from fxtrain.checkpoint.folders import checkpoint_at, read_manifest
from fxtrain.checkpoint.local_storage import Storage
from fxtrain.checkpoint.manifest import Manifest
from fxtrain.checkpoint.reading import open_reader
from fxtrain.models.folder import (
    commit,
    parse_size,
    split,
    staging,
    write_index,
)
from fxtrain.models.safetensors_files import Entry, writing
from fxtrain.models.tensor_bytes import DTYPES

__all__ = ["merge"]

_PARAMETERS = "module."


@known_arguments(CheckpointError)
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
        Reads only the weights, one tensor at a time. No collectives: call it on one rank.

    Raises:
        CheckpointError: the checkpoint or the model does not exist, or is damaged.

    Example:
        >>> import fxtrain as fx, tempfile, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        ...     saving = fx.save(tempfile.mkdtemp(), ctx, model)
        ...     [file.name for file in fx.merge(saving.path, tempfile.mkdtemp())]
        ['model.safetensors']
    """
    storage = checkpoint_at(path)
    manifest = read_manifest(storage)
    prefix = f"{_chosen(manifest, model, storage)}/{_PARAMETERS}"
    entries = [
        Entry(name=name.removeprefix(prefix), dtype=DTYPES[one.dtype], shape=one.shape)
        for name, one in manifest.tensors.items()
        if name.startswith(prefix)
    ]
    _check(entries, storage)
    others = {
        name.removeprefix(prefix): kept.removeprefix(prefix)
        for name, kept in manifest.aliases.items()
        if name.startswith(prefix)
    }
    files = split(entries, parse_size(max_shard), others)
    if problem := path_problem(folder):
        raise CheckpointError(f"merge(folder=...): {problem}.")
    target = Path(folder).absolute()
    with open_reader(storage, manifest) as reader, staging(target) as source:
        for file in files:
            with writing(source / file.name, file.entries, file.metadata) as put:
                for entry in file.entries:
                    put(reader.new(prefix + entry.name))
        write_index(source, files)
        commit(source, target)
    return tuple(target / file.name for file in files)


def _chosen(manifest: Manifest, requested: str | None, storage: Storage) -> str:
    if requested is None and len(manifest.models) == 1:
        return next(iter(manifest.models))
    if requested is None or requested not in manifest.models:
        what = "several models" if requested is None else f"no model {requested!r}"
        choices = " or ".join(map(repr, manifest.models))
        raise CheckpointError(f"{storage} contains {what}. Choose one: model={choices}.")
    return requested


def _check(entries: Sequence[Entry], storage: Storage) -> None:
    complex_ones = [entry.name for entry in entries if entry.dtype.is_complex]
    if complex_ones:
        raise CheckpointError(
            f"{storage} cannot be merged: safetensors does not support complex tensors such as "
            f"{complex_ones[0]}. Save them as real tensors (torch.view_as_real)."
        )
