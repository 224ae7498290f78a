"""Compare what each rank is about to save, and divide the writing among the ranks."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import attrs

from fxtrain._errors import CheckpointError
from fxtrain.checkpoint.async_save import has_background_group
from fxtrain.checkpoint.manifest import digest_of
from fxtrain.checkpoint.save_arguments import SaveRequest
from fxtrain.checkpoint.snapshot import Snapshot
from fxtrain.checkpoint.write_plan import TensorChunk, assign_writers, rank_chunks
from fxtrain.models.tensor_bytes import contiguous, memory_of
from fxtrain.ops.same_errors import gather_with_errors
from fxtrain.ops.transport.mismatches import by_rank
from fxtrain.state import DistContext, Position

__all__ = ["SaveProposal", "chunks_to_write", "compare_proposals", "save_proposal"]


@attrs.frozen(kw_only=True)
class SaveProposal:
    """What one rank is about to save.

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
    sizes: Mapping[str, int]
    digests: Mapping[str, tuple[str, str]]
    aliases: Mapping[str, str]
    named: tuple[str, str] | None
    has_background_group: bool


def save_proposal(
    ctx: DistContext,
    path: Any,
    request: SaveRequest | None,
    captured: Snapshot | None,
    writable: Mapping[str, TensorChunk],
    named: tuple[str, str] | None,
) -> SaveProposal:
    return SaveProposal(
        path=str(path),
        must_match={} if request is None else request.must_match,
        position=Position() if request is None else request.position,
        sizes={key: chunk.size for key, chunk in writable.items()},
        digests={} if captured is None else _digests(captured, writable),
        aliases={} if captured is None else captured.aliases,
        named=named,
        has_background_group=has_background_group(ctx),
    )


def _digests(captured: Snapshot, writable: Mapping[str, TensorChunk]) -> dict[str, tuple[str, str]]:
    return {
        key: (chunk.name, digest_of(memory_of(contiguous(chunk.tensor))))
        for key, chunk in writable.items()
        if chunk.name in captured.varies_by_rank
    }


def _writers(views: Sequence[SaveProposal], varies_by_rank: Set[str]) -> dict[str, int]:
    holders: dict[str, list[int]] = {}
    for rank, view in enumerate(views):
        for key in view.sizes:
            # For tensors that may differ, and for user tensors, the first rank's values are used.
            first = key in varies_by_rank or key.startswith("extra")
            if key not in holders or not first:
                holders.setdefault(key, []).append(rank)
    sizes = {key: size for view in views for key, size in view.sizes.items()}
    return assign_writers(sizes, holders)


def compare_proposals(
    ctx: DistContext, mine: SaveProposal, problem: Exception | None
) -> list[SaveProposal]:
    """The proposals of all ranks.

    Raises:
        CheckpointError: a rank has a problem, or arguments or positions differ; on every rank.
    """
    views, lines = gather_with_errors(mine, problem, ctx)
    if lines:
        raise CheckpointError(
            "\n".join([f"Nothing was saved in {views[0].path}:", *lines]), code="FX606"
        ) from problem
    first = views[0].must_match
    unequal = [name for name in first if any(one.must_match[name] != first[name] for one in views)]
    if unequal:
        raise CheckpointError(_unequal(views, unequal), code="FX606")
    if len({view.position for view in views}) > 1:
        lines = [f"  rank {rank}: {view.position}" for rank, view in enumerate(views)]
        raise CheckpointError(
            "\n".join(["save: the ranks are at different positions:", *lines]), code="FX606"
        )
    return views


def _unequal(views: Sequence[SaveProposal], names: Sequence[str]) -> str:
    found = [", ".join(f"{name}={view.must_match[name]}" for name in names) for view in views]
    advice = "Pass the same arguments on every rank."
    if "path" in names:
        advice += (
            " All ranks share one checkpoint folder: do not put the rank, a time or a random "
            "name into its path, or send rank 0's path with ops.broadcast_object(path, ctx)."
        )
    head = f"Nothing was saved. save: the ranks pass different values of {' and '.join(names)}."
    return "\n".join([head, *by_rank(enumerate(found)), advice])


def chunks_to_write(
    ctx: DistContext,
    views: Sequence[SaveProposal],
    captured: Snapshot,
    writable: Mapping[str, TensorChunk],
) -> list[TensorChunk]:
    """The chunks that this rank writes, given what all ranks could write."""
    varies_by_rank: dict[str, set[tuple[str, str]]] = {}
    for view in views:
        for key, found in view.digests.items():
            varies_by_rank.setdefault(key, set()).add(found)
    chosen = _writers(views, varies_by_rank.keys())
    differing = {name for found in varies_by_rank.values() if len(found) > 1 for name, _ in found}
    own = dict(captured.own)
    own |= {chunk.name: chunk.tensor for chunk in writable.values() if chunk.name in differing}
    local = [chunk for key, chunk in writable.items() if chosen[key] == ctx.rank]
    return [*local, *rank_chunks(own)]
