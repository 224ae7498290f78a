"""Check every byte of a checkpoint, and compare two checkpoints leaf by leaf."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._reading import StrPath
from fxtrain.checkpoint.folders import find_checkpoint, read_manifest
from fxtrain.checkpoint.manifest import (
    CHUNK,
    Manifest,
    StoredBox,
    StoredTensor,
    digest_of,
)
from fxtrain.checkpoint.reading import check_header, file_problems, open_reader
from fxtrain.checkpoint.storage import MANIFEST, Storage, UnreadableError, open_storage
from fxtrain.errors import CheckpointError
from fxtrain.state import Change, Position, unstructure


@attrs.frozen(kw_only=True)
class Verified:
    """A checkpoint whose every byte is as written.

    Attributes:
        path: Its folder.
        position: Position of the run.
        tensors: Number of tensors.
        size: Bytes of its data files.
        world_size: Number of ranks that saved.
    """

    path: str
    position: Position
    tensors: int
    size: int
    world_size: int


def verify(path: StrPath) -> Verified:
    """Compare every byte of a checkpoint with its digest.

    Args:
        path: A checkpoint, or the folder of a run, whose latest checkpoint is used.

    Effects:
        Reads all files once, a few MiB at a time. No collectives: call it on one rank.

    Raises:
        CheckpointError: data is missing, added, truncated or changed; the message names each
            file or tensor. Also if the checkpoint cannot be read or was written by a newer
            fxtrain, which does not mean that it is damaged.

    Example:
        >>> import fxtrain as fx, tempfile, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        ...     saving = fx.save(tempfile.mkdtemp(), ctx, model)
        ...     fx.checkpoint.verify(saving.path).world_size
        1
    """
    storage, manifest = find_checkpoint(path)
    files = storage.files()
    problems = file_problems(files, manifest)
    extra = files.keys() - manifest.files.keys() - {MANIFEST}
    problems += [f"  {name} does not belong to the checkpoint" for name in sorted(extra)]
    if not problems:
        problems = list(_changes(storage, manifest))
    if problems:
        raise CheckpointError("\n".join([f"{storage} is damaged:", *problems]), code="FX602")
    return Verified(
        path=str(storage),
        position=manifest.position,
        tensors=len(manifest.tensors) + sum(map(len, manifest.own)),
        size=sum(file.size for file in manifest.files.values()),
        world_size=len(manifest.own),
    )


def _changes(storage: Storage, manifest: Manifest) -> Iterator[str]:
    by_file: dict[str, list[tuple[str, StoredTensor, StoredBox]]] = {
        name: [] for name in manifest.files
    }
    for entries in (manifest.tensors, *manifest.own):
        for name, entry in entries.items():
            for part in entry.parts:
                by_file[part.file].append((name, entry, part))
    for file, parts in by_file.items():
        with storage.open(file) as read:
            try:
                check_header(read, file, manifest.files[file])
            except UnreadableError:
                raise
            except CheckpointError as error:
                yield f"  {error}"
            for name, entry, part in sorted(parts, key=lambda each: each[2].offset):
                for low in range(0, size := math.prod(part.shape) * entry.itemsize, CHUNK):
                    chunk, first = bytearray(min(CHUNK, size - low)), part.offset + low
                    read(first, memoryview(chunk))
                    if digest_of(chunk) != part.digests[low // CHUNK]:
                        end = first + len(chunk)
                        yield f"  {name} was changed in {file}, bytes {first} to {end}"


def compare(left: StrPath, right: StrPath) -> tuple[list[Change], int]:
    """The leaves in which two checkpoints differ in any bit.

    Leaves are tensors, and plain values of the position, user state, plans and models.

    Args:
        left: A checkpoint.
        right: Another checkpoint, whose tensors may be sharded differently.

    Returns:
        The differences, those of plain values first; and the number of leaves of `left`.

    Effects:
        Reads both, one tensor at a time. No collectives: call it on one rank.

    Raises:
        CheckpointError: a checkpoint is damaged.

    Example:
        >>> import fxtrain as fx, tempfile, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        ...     one = fx.save(tempfile.mkdtemp(), ctx, model, extra=1).result()
        ...     other = fx.save(tempfile.mkdtemp(), ctx, model, extra=2).result()
        ...     fx.checkpoint.compare(one, other)[0]
        [Change(path='extra', left='1', right='2')]
    """
    storages = open_storage(left), open_storage(right)
    first, second = map(read_manifest, storages)
    changes: list[Change] = []
    before, after = _values(first), _values(second)
    for path in {**before, **after}:
        a, b = before.get(path, _ABSENT), after.get(path, _ABSENT)
        if type(a) is not type(b) or a != b:
            changes.append(Change(path, _shown(a), _shown(b)))
    stored, others = _tensors(first), _tensors(second)
    with (
        open_reader(storages[0], first) as left_reader,
        open_reader(storages[1], second) as right_reader,
    ):
        for name in {**stored, **others}:
            a, b = stored.get(name), others.get(name)
            if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
                changes.append(Change(name, _summary(a), _summary(b)))
            elif texts := _difference(left_reader.new(name, a), right_reader.new(name, b)):
                changes.append(Change(name, *texts))
    plain = sum(not isinstance(leaf, dict | list) for leaf in before.values())
    return changes, len(stored) + plain


def _values(manifest: Manifest) -> dict[str, Any]:
    """The plain values of the position, of the user and of the models, by path."""
    data = {"position": unstructure(manifest.position), "extra": manifest.extra}
    return dict(_leaves("", {**data, "models": manifest.models}))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not value or not isinstance(value, Mapping | list):
        yield path, value
        return
    for key, inner in enumerate(value) if isinstance(value, list) else value.items():
        yield from _leaves(f"{path}.{key}" if path else str(key), inner)


def _tensors(manifest: Manifest) -> dict[str, StoredTensor]:
    own = {
        f"rank {rank}: {name}": entry
        for rank, entries in enumerate(manifest.own)
        for name, entry in entries.items()
    }
    return {**manifest.tensors, **own}


def _difference(left: Tensor, right: Tensor) -> tuple[str, str] | None:
    """The first element whose bits differ: equal NaNs are equal, 0.0 and -0.0 are not."""
    if not left.numel():
        return None
    raw, more = (t.reshape(-1).view(torch.uint8).reshape(t.numel(), -1) for t in (left, right))
    unequal = (raw != more).any(1)
    count = int(unequal.sum())
    if not count:
        return None
    first = int(unequal.nonzero()[0])
    a, b = left.reshape(-1)[first].item(), right.reshape(-1)[first].item()
    return f"{a!r} at {first} of {left.numel()}, {count} differ", repr(b)


def _summary(entry: StoredTensor | None) -> str:
    return "nothing" if entry is None else f"{entry.dtype} {list(entry.shape)}"


def _shown(value: Any) -> str:
    text = "nothing" if value is _ABSENT else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


_ABSENT = object()
