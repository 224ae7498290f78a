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
from fxtrain.ops.safetensors_header import aligned_first, to_header
from fxtrain.ops.splitting import shard_box
from fxtrain.ops.tensor_bytes import STORED_DTYPES, contiguous, dtype_name, memory_of
from fxtrain.ops.transport.mismatches import by_rank
from fxtrain.ops.whole_tensors import local_values
from fxtrain.state import FlatShard


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


def writable_chunks(tensors: Mapping[str, Tensor | FlatShard]) -> dict[str, TensorChunk]:
    """The chunks that this rank could write of replicated and sharded tensors.

    Returns:
        Chunks by a key that is equal for the same chunk on different ranks.

    Raises:
        CheckpointError: a tensor cannot be written; its name is in the message.
    """
    chunks: dict[str, TensorChunk] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and any(isinstance(p, Partial) for p in tensor.placements):
            raise CheckpointError(
                f"{name} is a DTensor with unreduced (Partial) values. Redistribute it first."
            )
        for start, values in held_boxes(tensor):
            chunks[f"{name}@{start}"] = TensorChunk(
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
    writable: Mapping[str, TensorChunk], varying: frozenset[str]
) -> dict[str, tuple[int, str | None]]:
    """Bytes of the chunks that a rank could write, by key; and a digest if ranks may differ."""
    offers: dict[str, tuple[int, str | None]] = {}
    for key, chunk in writable.items():
        varies = chunk.name in varying
        digest = digest_of(memory_of(contiguous(chunk.tensor))) if varies else None
        offers[key] = chunk.tensor.nbytes, digest
    return offers


def shared_aliases(
    offers: Sequence[Mapping[str, Any]], aliases: Sequence[Mapping[str, str]]
) -> dict[str, str]:
    """The aliases of a checkpoint, given those of each rank.

    Stages of a pipeline have different tensors, and the values of a user may share memory on some
    ranks only. As for the values, the first rank that has a tensor decides.
    """
    shared: dict[str, str] = {}
    stored: set[str] = set()
    for offered, of_rank in zip(offers, aliases, strict=True):
        stored |= {_tensor_of(key) for key in offered} - shared.keys()
        for name in of_rank.keys() - stored:
            shared.setdefault(name, shared.get(of_rank[name], of_rank[name]))
    return shared


def choose_writers(
    offers: Sequence[Mapping[str, tuple[int, str | None]]], aliases: Mapping[str, str]
) -> tuple[dict[str, int], frozenset[str]]:
    """Which rank writes each chunk that several could write, given `offers_of` by rank.

    A chunk is written by a rank that has it, so that ranks write about as many bytes each. Of
    values that may differ, and of the user's, those of the first rank are shared.

    Returns:
        Ranks by the keys of these chunks; and the tensors whose values do differ.
    """
    holders: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    digests: dict[str, str | None] = {}
    several: set[str] = set()
    differing: set[str] = set()
    for holder, offered in enumerate(offers):
        for key, (size, digest) in offered.items():
            if key in holders:
                several.add(key)
            elif _tensor_of(key) in aliases:
                continue
            sizes[key] = size
            first_only = digest is not None or key.startswith("extra")
            if key not in holders or not first_only:
                holders.setdefault(key, []).append(holder)
            if digests.setdefault(key, digest) != digest:
                differing.add(_tensor_of(key))
    load = [0] * len(offers)
    writers: dict[str, int] = {}
    for negative, key in sorted((-size, key) for key, size in sizes.items()):
        writer = min(holders[key], key=load.__getitem__)
        load[writer] -= negative
        if key in several:
            writers[key] = writer
    return writers, frozenset(differing)


def chunks_to_write(
    rank: int,
    writers: Mapping[str, int],
    differing: frozenset[str],
    aliases: Mapping[str, str],
    own: Mapping[str, Tensor],
    writable: Mapping[str, TensorChunk],
) -> list[TensorChunk]:
    """The chunks that a rank writes, given what `choose_writers` returns.

    A tensor whose values differ between ranks also belongs to each of them.
    """
    assigned = [
        chunk
        for key, chunk in sorted(
            writable.items(), key=lambda item: (-item[1].tensor.nbytes, item[0])
        )
        if chunk.name not in aliases and writers.get(key, rank) == rank
    ]
    differ = {chunk.name: chunk.tensor for chunk in writable.values() if chunk.name in differing}
    alone = writable_chunks({**own, **differ})
    return assigned + [attrs.evolve(chunk, own=True) for chunk in alone.values()]


def _tensor_of(key: str) -> str:
    return key.rpartition("@")[0]


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
    ordered = sorted(chunks, key=lambda chunk: aligned_first(chunk.tensor.nbytes))
    header, ends = to_header([_row(rank, chunk) for chunk in ordered])
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
