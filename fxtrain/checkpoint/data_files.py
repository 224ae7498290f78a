"""One rank's data file: a safetensors file, written sequentially while digests are computed."""

import platform
from collections.abc import Sequence
from typing import Any

import attrs

from fxtrain.checkpoint.local_storage import Storage
from fxtrain.checkpoint.manifest import CHUNK, DataFile, StoredBox, StoredTensor, digest_of
from fxtrain.checkpoint.write_plan import TensorChunk
from fxtrain.models.safetensors_files import aligned_first, to_header
from fxtrain.models.tensor_bytes import STORED_DTYPES, contiguous, memory_of

__all__ = ["Written", "file_name", "tables", "write_file"]


@attrs.frozen(kw_only=True)
class Written:
    """What a rank wrote, for the manifest.

    Attributes:
        rank: The rank that wrote.
        host: The machine on which it runs.
        file: Name, size and digest of its file; None if it had nothing to write.
        tensors: (name, dtype, full shape, part) of tensors that all ranks share.
        own: The same for tensors that belong only to this rank.
    """

    rank: int
    host: str = attrs.field(factory=platform.node)
    file: tuple[str, DataFile] | None = None
    tensors: tuple[tuple[str, str, tuple[int, ...], StoredBox], ...] = ()
    own: tuple[tuple[str, str, tuple[int, ...], StoredBox], ...] = ()


def file_name(rank: int) -> str:
    """Name of a rank's data file."""
    return f"rank-{rank:05d}.safetensors"


def write_file(storage: Storage, rank: int, chunks: Sequence[TensorChunk]) -> Written:
    """Write the chunks into this rank's file, durably.

    Copies at most one chunk to host memory at a time.
    """
    if not chunks:
        return Written(rank=rank)
    ordered = sorted(chunks, key=lambda piece: aligned_first(piece.size))
    header, ends = to_header(_row(rank, piece) for piece in ordered)
    name = file_name(rank)
    storage.make()
    parts: list[tuple[TensorChunk, StoredBox]] = []
    with storage.create(name) as file:
        file.write(memoryview(header))
        for chunk, end in zip(ordered, ends, strict=True):
            digests = _write_values(file, chunk)
            part = StoredBox(
                file=name,
                offset=len(header) + end - chunk.size,
                start=chunk.start,
                shape=tuple(chunk.tensor.shape),
                digests=tuple(digests),
            )
            parts.append((chunk, part))
    about = DataFile(size=len(header) + ends[-1], header=len(header), digest=digest_of(header))
    found = [
        (chunk.own, (chunk.name, chunk.dtype, chunk.full_shape, part)) for chunk, part in parts
    ]
    return Written(
        rank=rank,
        file=(name, about),
        tensors=tuple(one for own, one in found if not own),
        own=tuple(one for own, one in found if own),
    )


def tables(
    written: Sequence[Written],
) -> tuple[dict[str, StoredTensor], tuple[dict[str, StoredTensor], ...], dict[str, DataFile]]:
    """Combine what all ranks wrote: shared tensors, per-rank tensors, and files."""
    tensors: dict[str, tuple[str, tuple[int, ...], list[StoredBox]]] = {}
    own: list[dict[str, StoredTensor]] = []
    for one in written:
        for name, dtype, full_shape, part in one.tensors:
            tensors.setdefault(name, (dtype, full_shape, []))[2].append(part)
        own.append(
            {
                name: StoredTensor(dtype=dtype, shape=full_shape, parts=(part,))
                for name, dtype, full_shape, part in one.own
            }
        )
    shared = {
        name: StoredTensor(dtype=dtype, shape=full_shape, parts=tuple(parts))
        for name, (dtype, full_shape, parts) in tensors.items()
    }
    files = {one.file[0]: one.file[1] for one in written if one.file is not None}
    return shared, tuple(own), files


def _write_values(file: Any, chunk: TensorChunk) -> list[str]:
    values = contiguous(chunk.tensor)  # lives until its bytes are written
    memory = memory_of(values)
    digests: list[str] = []
    for begin in range(0, len(memory), CHUNK):
        block = memory[begin : begin + CHUNK]
        digests.append(digest_of(block))
        file.write(block)
    return digests


def _row(rank: int, piece: TensorChunk) -> tuple[str, str, list[int], int]:
    """A piece as the header of its file has it; complex numbers are pairs."""
    shape = [*piece.tensor.shape, *([2] if piece.tensor.is_complex() else [])]
    key = f"{piece.name}@{','.join(map(str, piece.start))}" if any(piece.start) else piece.name
    return (
        f"rank {rank}: {key}" if piece.own else key,
        STORED_DTYPES[piece.dtype],
        shape,
        piece.size,
    )
