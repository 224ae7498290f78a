"""One rank's data file: a safetensors file, written front to back with digests on the way."""

from collections.abc import Sequence
from typing import Any

import attrs

from fxtrain.checkpoint.local_storage import Storage
from fxtrain.checkpoint.manifest import CHUNK, Entry, File, Part, digest_of
from fxtrain.checkpoint.write_plan import TensorChunk
from fxtrain.models.safetensors_files import to_header
from fxtrain.models.tensor_bytes import STORED_DTYPES, contiguous, memory_of

__all__ = ["Written", "file_name", "tables", "write_file"]


@attrs.frozen(kw_only=True)
class Written:
    """What a rank wrote, for the manifest.

    Attributes:
        rank: Of the writer.
        file: Name, size and digest of its file; None if it had nothing to write.
        tensors: (name, dtype, whole shape, part) of tensors of all ranks.
        own: The same of those that belong to this rank alone.
    """

    rank: int
    file: tuple[str, File] | None = None
    tensors: tuple[tuple[str, str, tuple[int, ...], Part], ...] = ()
    own: tuple[tuple[str, str, tuple[int, ...], Part], ...] = ()


def file_name(rank: int) -> str:
    """The data file of a rank."""
    return f"rank-{rank:05d}.safetensors"


def write_file(storage: Storage, rank: int, chunks: Sequence[TensorChunk]) -> Written:
    """Write the pieces into this rank's file, durably.

    Holds one piece in host memory at a time, beside those that are there already.
    """
    if not chunks:
        return Written(rank=rank)
    # Wide numbers first keeps every tensor aligned.
    ordered = sorted(chunks, key=lambda piece: -piece.tensor.element_size())
    header, ends = to_header(_row(rank, piece) for piece in ordered)
    name = file_name(rank)
    storage.make()
    parts: list[tuple[TensorChunk, Part]] = []
    with storage.create(name) as file:
        file.write(memoryview(header))
        for piece, end in zip(ordered, ends, strict=True):
            digests = _write_values(file, piece)
            part = Part(
                file=name,
                offset=len(header) + end - piece.size,
                start=piece.start,
                shape=tuple(piece.tensor.shape),
                digests=tuple(digests),
            )
            parts.append((piece, part))
    about = File(size=len(header) + ends[-1], header=len(header), digest=digest_of(header))
    rows = [(piece.own, (piece.name, piece.dtype, piece.full_shape, part)) for piece, part in parts]
    return Written(
        rank=rank,
        file=(name, about),
        tensors=tuple(row for own, row in rows if not own),
        own=tuple(row for own, row in rows if own),
    )


def tables(
    written: Sequence[Written],
) -> tuple[dict[str, Entry], tuple[dict[str, Entry], ...], dict[str, File]]:
    """What all ranks wrote: tensors of all, those of each rank alone, and the files."""
    tensors: dict[str, tuple[str, tuple[int, ...], list[Part]]] = {}
    own: list[dict[str, Entry]] = []
    for one in written:
        for name, dtype, whole, part in one.tensors:
            tensors.setdefault(name, (dtype, whole, []))[2].append(part)
        own.append(
            {
                name: Entry(dtype=dtype, shape=whole, parts=(part,))
                for name, dtype, whole, part in one.own
            }
        )
    shared = {
        name: Entry(dtype=dtype, shape=whole, parts=tuple(parts))
        for name, (dtype, whole, parts) in tensors.items()
    }
    files = {one.file[0]: one.file[1] for one in written if one.file is not None}
    return shared, tuple(own), files


def _write_values(file: Any, piece: TensorChunk) -> list[str]:
    values = contiguous(piece.tensor)  # lives until its bytes are written
    memory = memory_of(values)
    digests: list[str] = []
    for begin in range(0, len(memory), CHUNK):
        chunk = memory[begin : begin + CHUNK]
        digests.append(digest_of(chunk))
        file.write(chunk)
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
