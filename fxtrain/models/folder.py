"""A folder with a model's weights: the names of its files, and replacing them atomically.

Other libraries read `model.safetensors` if it exists, and the index otherwise. Creating or
removing that one file therefore switches a folder from one export to another.
"""

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from fxtrain._reading import read_file
from fxtrain.checkpoint.storage import locked, sync_folder
from fxtrain.errors import CheckpointError
from fxtrain.models.safetensors_files import parse_json_object
from fxtrain.ops.safetensors_header import aligned_order
from fxtrain.state import FileTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST_INDEX = 100_000_000  # bytes
# Exists while a folder contains both a single file and an index, and the single file is current.
MARKER = ".fxtrain-exporting"
_STAGING = ".fxtrain-export."
_REPLACED_PREFIX = ".fxtrain-before."
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@attrs.frozen(kw_only=True)
class ModelFile:
    """One file of an export, with its tensors in order; metadata has other names of its tensors."""

    name: str
    entries: tuple[FileTensor, ...]
    metadata: Mapping[str, str]


def split_into_files(
    entries: Sequence[FileTensor], limit: int, others: Mapping[str, str]
) -> tuple[ModelFile, ...]:
    """Divide tensors into files of at most `limit` bytes of values, as transformers does."""
    groups: list[list[FileTensor]] = []
    group: list[FileTensor] = []
    filled = 0
    for entry in entries:
        if entry.nbytes > limit:
            groups.append([entry])
            continue
        if filled + entry.nbytes > limit:
            groups.append(group)
            group, filled = [], 0
        group.append(entry)
        filled += entry.nbytes
    if group or not groups:
        groups.append(group)
    count = len(groups)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    files: list[ModelFile] = []
    for name, group in zip([SINGLE] if count == 1 else names, groups, strict=True):
        stored = {entry.name for entry in group}
        known_as = {
            other: stored_name for other, stored_name in others.items() if stored_name in stored
        }
        ordered = tuple(group[number] for number in aligned_order([e.nbytes for e in group]))
        files.append(ModelFile(name=name, entries=ordered, metadata=known_as | {"format": "pt"}))
    return tuple(files)


@contextlib.contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """A new staging folder for files that `commit` moves into `folder`, which is created if needed.

    It is inside `folder`, so that moving needs no copy even if that is a mount point; what an
    interrupted export left there is removed first. Processes that export into one folder do so one
    after the other, where its file system has locks.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file. Export into a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        for left in folder.glob(f"{_STAGING}*"):
            shutil.rmtree(left, ignore_errors=True)
        fresh = Path(tempfile.mkdtemp(prefix=_STAGING, dir=folder))
        try:
            yield fresh
        except FileNotFoundError as error:
            if fresh.is_dir():
                raise
            raise CheckpointError(
                f"{folder}: another process exports into this folder, and removed the files of "
                f"this one. Export or merge on one rank, or into a folder per process."
            ) from error
        finally:
            # An error here must not hide the original one; the next export removes leftovers.
            shutil.rmtree(fresh, ignore_errors=True)


def commit(source: Path, folder: Path) -> None:
    """Move a finished export into place, over files of the same name, and remove earlier weights.

    A single rename or removal switches readers from the earlier export to this one. If this is
    interrupted at any point, one of the two is complete.
    """
    coming = {path.name for path in source.iterdir()}
    head, other = (SINGLE, INDEX) if SINGLE in coming else (INDEX, SINGLE)
    if (folder / other).exists():
        write_text(folder / MARKER, f"Export in progress; until it ends, {SINGLE} is current.\n")
    if head == INDEX:
        _rename_earlier(source, folder, coming)
    for name in sorted(coming - {head}):
        os.replace(source / name, folder / name)
    sync_folder(folder)
    os.replace(source / head, folder / head)
    sync_folder(folder)
    (folder / other).unlink(missing_ok=True)
    sync_folder(folder)
    for path in list(folder.iterdir()):
        stale = _SHARD.fullmatch(path.name) or path.name.startswith(_REPLACED_PREFIX)
        if stale and path.name not in coming:
            path.unlink()
    (folder / MARKER).unlink(missing_ok=True)
    sync_folder(folder)


def write_index(folder: Path, files: Sequence[ModelFile]) -> None:
    """Write the index of tensors to files, if there is more than one file."""
    if len(files) > 1:
        places = {entry.name: file.name for file in files for entry in file.entries}
        total = sum(entry.nbytes for file in files for entry in file.entries)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_text(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file and flush it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _rename_earlier(source: Path, folder: Path, coming: set[str]) -> None:
    """Rename files of an earlier export whose names the new one uses.

    Two exports with the same number of files have the same names: replacing the files one by
    one would leave an index over files of both.
    """
    table = _earlier_index(folder)
    if table is None or not coming & set(table["weight_map"].values()):
        return
    moved = {
        name: f"{_REPLACED_PREFIX}{name}" for name in coming & set(table["weight_map"].values())
    }
    for name, aside in moved.items():
        (folder / aside).unlink(missing_ok=True)
        _link(folder / name, folder / aside)
    places = {key: moved.get(name, name) for key, name in table["weight_map"].items()}
    write_text(source / f"{_REPLACED_PREFIX}index", json.dumps(table | {"weight_map": places}))
    sync_folder(folder)
    os.replace(source / f"{_REPLACED_PREFIX}index", folder / INDEX)
    sync_folder(folder)


def _earlier_index(folder: Path) -> dict[str, Any] | None:
    """The index in a folder; None if there is none that describes a readable export."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        table = parse_json_object(read_file(path, LARGEST_INDEX), path)
    except (CheckpointError, OSError):
        return None
    places = table.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        return None
    return table if all((folder / name).is_file() for name in places.values()) else None


def _link(path: Path, name: Path) -> None:
    try:
        os.link(path, name)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, name)
