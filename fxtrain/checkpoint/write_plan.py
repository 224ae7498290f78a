"""Divide the writing of a state among the ranks, and write one rank's data file."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from fxtrain.checkpoint.manifest import CHUNK, Box, DataFile, StoredBox, StoredTensor, digest_of
from fxtrain.checkpoint.storage import Storage
from fxtrain.errors import CheckpointError
from fxtrain.ops.safetensors_header import aligned_order, to_header
from fxtrain.ops.splitting import shard_box
from fxtrain.ops.tensor_bytes import STORED_DTYPES, contiguous, dtype_name, memory_of
from fxtrain.ops.transport.mismatches import by_rank
from fxtrain.ops.whole_tensors import local_values
from fxtrain.state import FlatShard

ChunkId = tuple[str, tuple[int, ...]]  # the name of a tensor, and the start of a chunk of it
# What a rank offers to write of a chunk: bytes, a digest if the values of ranks may differ, and
# whether those of the first rank that offers it are saved.
Offer = tuple[int, str | None, bool]


@attrs.frozen(kw_only=True, eq=False)
class TensorChunk:
    """A box of a tensor that one rank writes.

    Attributes:
        name: Name of the tensor.
        dtype: Name of its dtype in the manifest.
        full_shape: Shape of the full tensor.
        start: Offset of the chunk in the full tensor, per dimension.
        tensor: The values, in the shape of the chunk, on any device.
        own: The tensor belongs only to this rank.
    """

    name: str
    dtype: str
    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    tensor: Tensor
    own: bool = False


def writable_chunks(tensors: Mapping[str, Tensor | FlatShard]) -> dict[ChunkId, TensorChunk]:
    """The chunks that this rank could write of replicated and sharded tensors.

    Raises:
        CheckpointError: a tensor cannot be written; its name is in the message.
    """
    chunks: dict[ChunkId, TensorChunk] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and any(isinstance(p, Partial) for p in tensor.placements):
            raise CheckpointError(
                f"{name} is a DTensor with unreduced (Partial) values. Redistribute it first."
            )
        for start, values in held_boxes(tensor):
            chunks[name, start] = TensorChunk(
                name=name,
                dtype=dtype_name(values, name),
                full_shape=tuple(tensor.shape),
                start=start,
                tensor=values,
            )
    return chunks


def check_arguments(arguments: Sequence[Mapping[str, object]]) -> None:
    """Raise if the arguments of the ranks differ, with those of every rank."""
    first = arguments[0]
    different = {name: None for other in arguments for name in first if other[name] != first[name]}
    if not different:
        return
    values = [", ".join(f"{name}={of_rank[name]!r}" for name in different) for of_rank in arguments]
    advice = "Pass the same arguments on every rank."
    if "path" in different:
        advice += (
            " All ranks share one checkpoint folder: do not put the rank, a time or a random "
            "name into its path, or send rank 0's path with ops.broadcast_object(path, ctx)."
        )
    head = f"Nothing was saved. save: the ranks pass different values of {' and '.join(different)}."
    raise CheckpointError("\n".join([head, *by_rank(enumerate(values)), advice]), code="FX606")


def offers_of(
    writable: Mapping[ChunkId, TensorChunk], varying: frozenset[str], users: frozenset[str]
) -> dict[ChunkId, Offer]:
    """What a rank offers to write.

    Args:
        varying: Names of tensors whose values may differ between ranks.
        users: Names of tensors of the user, which may differ too.
    """
    offers: dict[ChunkId, Offer] = {}
    for chunk_id, chunk in writable.items():
        varies = chunk.name in varying
        digest = digest_of(memory_of(contiguous(chunk.tensor))) if varies else None
        offers[chunk_id] = chunk.tensor.nbytes, digest, varies or chunk.name in users
    return offers


def shared_aliases(
    offers: Sequence[Mapping[ChunkId, Any]], aliases: Sequence[Mapping[str, str]]
) -> dict[str, str]:
    """The aliases of a checkpoint, given those of each rank.

    Stages of a pipeline have different tensors, and the values of a user may share memory on some
    ranks only. As for the values, the first rank that has a tensor decides.
    """
    shared: dict[str, str] = {}
    stored: set[str] = set()
    for offered, of_rank in zip(offers, aliases, strict=True):
        stored |= {name for name, _ in offered} - shared.keys()
        for name in of_rank.keys() - stored:
            shared.setdefault(name, shared.get(of_rank[name], of_rank[name]))
    return shared


def choose_writers(
    offers: Sequence[Mapping[ChunkId, Offer]], aliases: Mapping[str, str]
) -> tuple[dict[ChunkId, int], frozenset[str]]:
    """Which rank writes each chunk that several could write, given `offers_of` by rank.

    A chunk is written by a rank that has it, so that ranks write about as many bytes each. Of
    values that may differ, and of the user's, those of the first rank are shared.

    Returns:
        The ranks of these chunks; and the tensors whose values do differ.
    """
    holders: dict[ChunkId, list[int]] = {}
    sizes: dict[ChunkId, int] = {}
    digests: dict[ChunkId, str | None] = {}
    several: set[ChunkId] = set()
    differing: set[str] = set()
    for holder, offered in enumerate(offers):
        for chunk, (size, digest, first_only) in offered.items():
            if chunk in holders:
                several.add(chunk)
            elif chunk[0] in aliases:
                continue
            sizes[chunk] = size
            if chunk not in holders or not first_only:
                holders.setdefault(chunk, []).append(holder)
            if digests.setdefault(chunk, digest) != digest:
                differing.add(chunk[0])
    load = [0] * len(offers)
    writers: dict[ChunkId, int] = {}
    for negative, chunk in sorted([(-size, chunk) for chunk, size in sizes.items()]):
        writer = min(holders[chunk], key=load.__getitem__)
        load[writer] -= negative
        if chunk in several:
            writers[chunk] = writer
    return writers, frozenset(differing)


def chunks_to_write(
    rank: int,
    writers: Mapping[ChunkId, int],
    differing: frozenset[str],
    aliases: Mapping[str, str],
    own: Mapping[str, Tensor],
    writable: Mapping[ChunkId, TensorChunk],
) -> list[TensorChunk]:
    """The chunks that a rank writes, given what `choose_writers` returns.

    A tensor whose values differ between ranks also belongs to each of them.
    """
    largest_first = sorted([(-chunk.tensor.nbytes, each) for each, chunk in writable.items()])
    assigned = [
        writable[each]
        for _, each in largest_first
        if each[0] not in aliases and writers.get(each, rank) == rank
    ]
    differ = {chunk.name: chunk.tensor for chunk in writable.values() if chunk.name in differing}
    alone = writable_chunks({**own, **differ})
    return assigned + [attrs.evolve(chunk, own=True) for chunk in alone.values()]


def held_boxes(tensor: Tensor | FlatShard) -> list[tuple[tuple[int, ...], Tensor]]:
    """The boxes of a tensor that this rank holds: offset in the full tensor, and a view."""
    values = tensor.values.detach() if isinstance(tensor, FlatShard) else local_values(tensor)
    if 0 in tensor.shape:  # each rank has all of it
        return [((0,) * len(tensor.shape), values.new_empty(tensor.shape))]
    if isinstance(tensor, FlatShard):
        at, boxes = 0, list[tuple[tuple[int, ...], Tensor]]()
        for start, shape in boxes_of(tensor.shape, tensor.start, tensor.start + len(values)):
            size = math.prod(shape)
            boxes.append((start, values[at : at + size].view(shape)))
            at += size
        return boxes
    if not isinstance(tensor, DTensor):
        return [((0,) * tensor.ndim, values)]
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return []
    start, shape = shard_box(tensor.shape, mesh.shape, place, tensor.placements)
    return [] if 0 in shape else [(start, values)]


def boxes_of(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Boxes, as (start, shape), that cover the elements `begin` to `end` of a tensor in order."""
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # of the complete rows
    if first > last:  # inside one row
        yield from _in_row(shape, last, begin, end)
        return
    yield from _in_row(shape, first - 1, begin, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, end)


def _in_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> Iterator[Box]:
    before = row * math.prod(shape[1:])
    for start, size in boxes_of(shape[1:], begin - before, end - before):
        yield (row, *start), (1, *size)


# What a rank wrote: its file by name, none if it had nothing to write; and the boxes in it, each
# after whether its tensor belongs only to this rank, and that tensor's name, dtype and shape.
Written = tuple[dict[str, DataFile], list[tuple[bool, str, str, tuple[int, ...], StoredBox]]]


def write_chunks(storage: Storage, rank: int, chunks: Sequence[TensorChunk]) -> Written:
    """Write the chunks into this rank's file, durably.

    Copies at most one chunk to host memory at a time.
    """
    if not chunks:
        return {}, []
    ordered = [
        chunks[number] for number in aligned_order([chunk.tensor.nbytes for chunk in chunks])
    ]
    header, ends = to_header(_rows(rank, ordered))
    name = f"rank-{rank:05d}.safetensors"
    rows: list[tuple[bool, str, str, tuple[int, ...], StoredBox]] = []
    storage.make()
    with storage.create(name) as write:
        write(memoryview(header))
        for chunk, end in zip(ordered, ends, strict=True):
            memory = memory_of(contiguous(chunk.tensor))
            digests: list[str] = []
            for begin in range(0, len(memory), CHUNK):
                block = memory[begin : begin + CHUNK]
                digests.append(digest_of(block))
                write(block)
            part = StoredBox(
                file=name,
                offset=len(header) + end - len(memory),
                start=chunk.start,
                shape=tuple(chunk.tensor.shape),
                digests=tuple(digests),
            )
            rows.append((chunk.own, chunk.name, chunk.dtype, chunk.full_shape, part))
    file = DataFile(size=len(header) + ends[-1], header=len(header), digest=digest_of(header))
    return {name: file}, rows


def written_tensors(written: Sequence[Written], *, own: bool) -> dict[str, StoredTensor]:
    """The tensors that ranks wrote: those that all share, or those that belong to one."""
    parts: dict[tuple[str, str, tuple[int, ...]], list[StoredBox]] = {}
    for _, rows in written:
        for of_rank, name, dtype, shape, part in rows:
            if of_rank is own:
                parts.setdefault((name, dtype, shape), []).append(part)
    return {
        name: StoredTensor(dtype=dtype, shape=shape, parts=tuple(boxes))
        for (name, dtype, shape), boxes in parts.items()
    }


def _rows(rank: int, chunks: Sequence[TensorChunk]) -> list[tuple[str, str, list[int], int]]:
    """Chunks as the header of their file has them; complex numbers are pairs."""
    rows: list[tuple[str, str, list[int], int]] = []
    for chunk in chunks:
        shape = [*chunk.tensor.shape, *([2] if chunk.tensor.is_complex() else [])]
        name = chunk.name
        if any(chunk.start):
            name += f"@{','.join(map(str, chunk.start))}"
        if chunk.own:
            name = f"rank {rank}: {name}"
        rows.append((name, STORED_DTYPES[chunk.dtype], shape, chunk.tensor.nbytes))
    return rows
