"""Divide the writing of a state among the ranks, and write one rank's data file."""

import math
import platform
from collections.abc import Iterator, Mapping, Sequence, Set

import attrs
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fxtrain.checkpoint.manifest import CHUNK, Box, DataFile, StoredBox, StoredTensor, digest_of
from fxtrain.checkpoint.snapshot import Snapshot
from fxtrain.checkpoint.storage import Storage
from fxtrain.errors import CheckpointError
from fxtrain.models.safetensors_files import aligned_first, to_header
from fxtrain.models.tensor_bytes import STORED_DTYPES, contiguous, dtype_name, memory_of
from fxtrain.ops.same_errors import gather_with_errors
from fxtrain.ops.transport.mismatches import by_rank
from fxtrain.ops.whole_tensors import local_values
from fxtrain.state import DistContext, FlatShard


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


@attrs.frozen(kw_only=True)
class Proposal:
    """What one rank is about to save, for the other ranks.

    Attributes:
        path: The path as passed.
        arguments: Those that must be equal on every rank.
        sizes: Bytes of the chunks that it could write, by key.
        digests: Name and digest of the chunks that may differ between ranks, by key.
        aliases: Names of tensors that share the memory of another.
        named: On rank 0, the name and token of the checkpoint.
        has_background_group: Whether it has a working group for background saves.
    """

    path: str
    arguments: Mapping[str, object] = attrs.field(factory=dict)
    sizes: Mapping[str, int] = attrs.field(factory=dict)
    digests: Mapping[str, tuple[str, str]] = attrs.field(factory=dict)
    aliases: Mapping[str, str] = attrs.field(factory=dict)
    named: tuple[str, str] | None = None
    has_background_group: bool = False


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


def compare_proposals(
    ctx: DistContext, mine: Proposal, problem: Exception | None
) -> list[Proposal]:
    """The proposals of all ranks.

    Raises:
        CheckpointError: a rank has a problem, or arguments differ; on every rank.
    """
    proposals, lines = gather_with_errors(mine, problem, ctx)
    if lines:
        head = f"Nothing was saved in {proposals[0].path}:"
        raise CheckpointError("\n".join([head, *lines]), code="FX606") from problem
    first = proposals[0].arguments
    unequal = [
        name for name in first if any(other.arguments[name] != first[name] for other in proposals)
    ]
    if unequal:
        values = [
            ", ".join(f"{name}={proposal.arguments[name]!r}" for name in unequal)
            for proposal in proposals
        ]
        advice = "Pass the same arguments on every rank."
        if "path" in unequal:
            advice += (
                " All ranks share one checkpoint folder: do not put the rank, a time or a random "
                "name into its path, or send rank 0's path with ops.broadcast_object(path, ctx)."
            )
        head = (
            f"Nothing was saved. save: the ranks pass different values of {' and '.join(unequal)}."
        )
        raise CheckpointError("\n".join([head, *by_rank(enumerate(values)), advice]), code="FX606")
    return proposals


def varying_digests(
    captured: Snapshot, writable: Mapping[str, TensorChunk]
) -> dict[str, tuple[str, str]]:
    """Name and digest of the chunks that may differ between ranks, by key."""
    return {
        key: (chunk.name, digest_of(memory_of(contiguous(chunk.tensor))))
        for key, chunk in writable.items()
        if chunk.name in captured.varies_by_rank
    }


def chunks_to_write(
    ctx: DistContext,
    proposals: Sequence[Proposal],
    captured: Snapshot,
    writable: Mapping[str, TensorChunk],
) -> list[TensorChunk]:
    """The chunks that this rank writes, given what all ranks could write."""
    digests: dict[str, set[tuple[str, str]]] = {}
    for proposal in proposals:
        for key, digest in proposal.digests.items():
            digests.setdefault(key, set()).add(digest)
    differing = {name for pairs in digests.values() if len(pairs) > 1 for name, _ in pairs}
    writers = _writers(proposals, digests.keys())
    own = dict(captured.own)
    own |= {chunk.name: chunk.tensor for chunk in writable.values() if chunk.name in differing}
    return [
        *(chunk for key, chunk in writable.items() if writers[key] == ctx.rank),
        *(attrs.evolve(chunk, own=True) for chunk in writable_chunks(own).values()),
    ]


def _writers(proposals: Sequence[Proposal], varies_by_rank: Set[str]) -> dict[str, int]:
    """The rank that writes each chunk: one that has it, balanced by bytes."""
    holders: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for rank, proposal in enumerate(proposals):
        for key, size in proposal.sizes.items():
            sizes[key] = size
            # For tensors that may differ, and for user tensors, the first rank's values are used.
            first_only = key in varies_by_rank or key.startswith("extra")
            if key not in holders or not first_only:
                holders.setdefault(key, []).append(rank)
    load = [0] * len(proposals)
    writers: dict[str, int] = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        writers[key] = min(holders[key], key=lambda rank: (load[rank], rank))
        load[writers[key]] += sizes[key]
    return writers


def held_boxes(tensor: Tensor | FlatShard) -> list[tuple[tuple[int, ...], Tensor]]:
    """The boxes of a tensor that this rank holds: offset in the full tensor, and a view."""
    if isinstance(tensor, FlatShard):
        values, at, boxes = tensor.values.detach(), 0, list[tuple[tuple[int, ...], Tensor]]()
        for start, shape in boxes_of(tensor.shape, tensor.start, tensor.start + len(values)):
            size = math.prod(shape)
            boxes.append((start, values[at : at + size].view(shape)))
            at += size
        return boxes
    if not isinstance(tensor, DTensor):
        return [((0,) * tensor.ndim, local_values(tensor))]
    if tensor.device_mesh.get_coordinate() is None:
        return []
    shape, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return [] if 0 in shape else [(tuple(start), local_values(tensor))]


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
