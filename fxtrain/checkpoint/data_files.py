"""One rank's data file: a safetensors file, written sequentially while digests are computed."""

import platform
from collections.abc import Mapping, Sequence

import attrs

from fxtrain.checkpoint.manifest import CHUNK, DataFile, StoredBox, StoredTensor, digest_of
from fxtrain.checkpoint.storage import Storage
from fxtrain.checkpoint.write_plan import TensorChunk
from fxtrain.models.safetensors_files import aligned_first, to_header
from fxtrain.models.tensor_bytes import STORED_DTYPES, contiguous, memory_of


@attrs.frozen(kw_only=True)
class Written:
    """What a rank wrote, for the manifest.

    Attributes:
        rank: The rank that wrote.
        host: The machine on which it runs.
        files: Its file, by name; empty if it had nothing to write.
        tensors: Tensors that all ranks share, with the boxes that this rank wrote.
        own: Tensors that belong only to this rank.
    """

    rank: int
    host: str = attrs.field(factory=platform.node)
    files: Mapping[str, DataFile] = attrs.field(factory=dict)
    tensors: Mapping[str, StoredTensor] = attrs.field(factory=dict)
    own: Mapping[str, StoredTensor] = attrs.field(factory=dict)


def write_file(storage: Storage, rank: int, chunks: Sequence[TensorChunk]) -> Written:
    """Write the chunks into this rank's file, durably.

    Copies at most one chunk to host memory at a time.
    """
    if not chunks:
        return Written(rank=rank)
    ordered = sorted(chunks, key=lambda chunk: aligned_first(chunk.tensor.nbytes))
    header, ends = to_header(_row(rank, chunk) for chunk in ordered)
    name = f"rank-{rank:05d}.safetensors"
    storage.make()
    tensors: dict[str, StoredTensor] = {}
    own: dict[str, StoredTensor] = {}
    with storage.create(name) as write:
        write(memoryview(header))
        for chunk, end in zip(ordered, ends, strict=True):
            values = contiguous(chunk.tensor)  # lives until its bytes are written
            memory = memory_of(values)
            digests: list[str] = []
            for begin in range(0, len(memory), CHUNK):
                block = memory[begin : begin + CHUNK]
                digests.append(digest_of(block))
                write(block)
            part = StoredBox(
                file=name,
                offset=len(header) + end - chunk.tensor.nbytes,
                start=chunk.start,
                shape=tuple(chunk.tensor.shape),
                digests=tuple(digests),
            )
            table = own if chunk.own else tensors
            earlier = table[chunk.name].parts if chunk.name in table else ()
            table[chunk.name] = StoredTensor(
                dtype=chunk.dtype, shape=chunk.full_shape, parts=(*earlier, part)
            )
    about = DataFile(size=len(header) + ends[-1], header=len(header), digest=digest_of(header))
    return Written(rank=rank, files={name: about}, tensors=tensors, own=own)


def merged(written: Sequence[Written]) -> dict[str, StoredTensor]:
    """The tensors that all ranks share, with the boxes that any of them wrote."""
    first: dict[str, StoredTensor] = {}
    parts: dict[str, list[StoredBox]] = {}
    for of_rank in written:
        for name, stored in of_rank.tensors.items():
            first.setdefault(name, stored)
            parts.setdefault(name, []).extend(stored.parts)
    return {name: attrs.evolve(first[name], parts=tuple(boxes)) for name, boxes in parts.items()}


def _row(rank: int, chunk: TensorChunk) -> tuple[str, str, list[int], int]:
    """A chunk as the header of its file has it; complex numbers are pairs."""
    shape = [*chunk.tensor.shape, *([2] if chunk.tensor.is_complex() else [])]
    key = f"{chunk.name}@{','.join(map(str, chunk.start))}" if any(chunk.start) else chunk.name
    return (
        f"rank {rank}: {key}" if chunk.own else key,
        STORED_DTYPES[chunk.dtype],
        shape,
        chunk.tensor.nbytes,
    )
