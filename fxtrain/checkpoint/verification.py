"""Check every byte of a checkpoint."""

import math
from collections.abc import Iterator

import attrs

from fxtrain._reading import StrPath
from fxtrain.checkpoint.folders import checkpoint_at, read_manifest
from fxtrain.checkpoint.manifest import (
    CHUNK,
    MANIFEST,
    Manifest,
    StoredBox,
    StoredTensor,
    digest_of,
)
from fxtrain.checkpoint.reading import file_problems, files_of, header_of
from fxtrain.checkpoint.storage import Storage, UnreadableError
from fxtrain.errors import CheckpointError
from fxtrain.models.tensor_bytes import STORED_DTYPES
from fxtrain.state import Position
from fxtrain.state.parsing import parse_json

# Exceptions that parsing an invalid safetensors header may raise.
_MALFORMED = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError)


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
    storage = checkpoint_at(path)
    files = files_of(storage)
    manifest = read_manifest(storage)
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
                header = header_of(read, file, manifest.files[file])
                yield from _header_problems(file, header, parts)
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


def _header_problems(
    file: str, header: bytes, parts: list[tuple[str, StoredTensor, StoredBox]]
) -> Iterator[str]:
    """Differences between the manifest and the safetensors header, which other tools read."""
    try:
        spans = {
            (*map(int, value["data_offsets"]), str(value["dtype"]))
            for key, value in parse_json(header[8:]).items()
            if key != "__metadata__"
        }
    except _MALFORMED as error:
        yield f"  the header of {file} is not a safetensors header: {str(error)[:200]}"
        return
    if int.from_bytes(header[:8], "little") != len(header) - 8:
        yield f"  the header of {file} differs in length from its length field"
    for name, entry, part in parts:
        begin = part.offset - len(header)
        size = math.prod(part.shape) * entry.itemsize
        if (begin, begin + size, STORED_DTYPES[entry.dtype]) not in spans:
            yield f"  {name} is not at the offset given by the header of {file}"
