"""Divide the writing of a state among the ranks: what each could write, and what it does."""

import math
from collections.abc import Iterator, Mapping, Sequence, Set

import attrs
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fxtrain.checkpoint.manifest import digest_of
from fxtrain.checkpoint.snapshot import Snapshot
from fxtrain.errors import CheckpointError
from fxtrain.models.tensor_bytes import contiguous, dtype_name, memory_of
from fxtrain.ops.same_errors import gather_with_errors
from fxtrain.ops.transport.mismatches import by_rank
from fxtrain.ops.whole_tensors import local_values
from fxtrain.state import DistContext, FlatShard, Position

Box = tuple[tuple[int, ...], tuple[int, ...]]


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
        must_match: Arguments that must be equal on every rank, as text; empty if invalid.
        position: Position of the run.
        sizes: Bytes of the chunks that it could write, by key.
        digests: Name and digest of the chunks that may differ between ranks, by key.
        aliases: Names of tensors that share the memory of another.
        named: On rank 0, the name and token of the checkpoint.
        has_background_group: Whether it has a working group for background saves.
    """

    path: str
    must_match: Mapping[str, str]
    position: Position
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
    found: dict[str, TensorChunk] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, FlatShard):
            found |= {f"{name}@{chunk.start}": chunk for chunk in _flat_chunks(name, tensor)}
        elif not isinstance(tensor, DTensor):
            found[name] = _plain(name, tensor)
        elif (chunk := _dtensor_chunks(name, tensor)) is not None:
            found[f"{name}@{chunk.start}"] = chunk
    return found


def compare_proposals(
    ctx: DistContext, mine: Proposal, problem: Exception | None
) -> list[Proposal]:
    """The proposals of all ranks.

    Raises:
        CheckpointError: a rank has a problem, or arguments or positions differ; on every rank.
    """
    proposals, lines = gather_with_errors(mine, problem, ctx)
    if lines:
        head = f"Nothing was saved in {proposals[0].path}:"
        raise CheckpointError("\n".join([head, *lines]), code="FX606") from problem
    first = proposals[0].must_match
    unequal = [
        name for name in first if any(one.must_match[name] != first[name] for one in proposals)
    ]
    if unequal:
        raise CheckpointError(_unequal(proposals, unequal), code="FX606")
    if len({proposal.position for proposal in proposals}) > 1:
        lines = [f"  rank {rank}: {one.position}" for rank, one in enumerate(proposals)]
        raise CheckpointError(
            "\n".join(["save: the ranks are at different positions:", *lines]), code="FX606"
        )
    return proposals


def _unequal(proposals: Sequence[Proposal], names: Sequence[str]) -> str:
    values = [", ".join(f"{name}={one.must_match[name]}" for name in names) for one in proposals]
    advice = "Pass the same arguments on every rank."
    if "path" in names:
        advice += (
            " All ranks share one checkpoint folder: do not put the rank, a time or a random "
            "name into its path, or send rank 0's path with ops.broadcast_object(path, ctx)."
        )
    head = f"Nothing was saved. save: the ranks pass different values of {' and '.join(names)}."
    return "\n".join([head, *by_rank(enumerate(values)), advice])


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
    writers = _writers(proposals, digests.keys())
    differing = {name for both in digests.values() if len(both) > 1 for name, _ in both}
    own = dict(captured.own)
    own |= {chunk.name: chunk.tensor for chunk in writable.values() if chunk.name in differing}
    return [
        *(chunk for key, chunk in writable.items() if writers[key] == ctx.rank),
        *(attrs.evolve(_plain(name, tensor), own=True) for name, tensor in own.items()),
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


def box_of(tensor: DTensor) -> Box:
    """(start, shape) of this rank's shard of a DTensor."""
    shape, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(start), tuple(shape)


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


def boxes_in(part: FlatShard) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Views of a flat shard as boxes, each with its offset in the full tensor."""
    values, at = part.values.detach(), 0
    for start, shape in boxes_of(part.shape, part.start, part.start + len(values)):
        size = math.prod(shape)
        yield start, values[at : at + size].view(shape)
        at += size


def _flat_chunks(name: str, part: FlatShard) -> Iterator[TensorChunk]:
    """This rank's flat shard as boxes, since files contain boxes."""
    dtype = dtype_name(part.values, name)
    for start, box in boxes_in(part):
        yield TensorChunk(name=name, dtype=dtype, full_shape=part.shape, start=start, tensor=box)


def _plain(name: str, tensor: Tensor) -> TensorChunk:
    shape = tuple(tensor.shape)
    return TensorChunk(
        name=name,
        dtype=dtype_name(tensor, name),
        full_shape=shape,
        start=(0,) * len(shape),
        tensor=tensor.detach(),
    )


def _dtensor_chunks(name: str, tensor: DTensor) -> TensorChunk | None:
    """This rank's shard, or None if it has none."""
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise CheckpointError(
            f"{name} is a DTensor with unreduced (Partial) values. Redistribute it first."
        )
    if tensor.device_mesh.get_coordinate() is None:
        return None
    start, shape = box_of(tensor)
    local = local_values(tensor)
    if 0 in shape:
        return None
    return TensorChunk(
        name=name,
        dtype=dtype_name(local, name),
        full_shape=tuple(tensor.shape),
        start=start,
        tensor=local,
    )
