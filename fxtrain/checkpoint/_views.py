"""What each rank is about to save: compared by all, and shared out between them."""

from collections.abc import Mapping, Sequence, Set

import attrs

from fxtrain._errors import CheckpointError
from fxtrain.checkpoint._background import has_way
from fxtrain.checkpoint._bytes import contiguous, memory_of
from fxtrain.checkpoint._manifest import digest_of
from fxtrain.checkpoint._pieces import Piece, own_pieces, writers
from fxtrain.checkpoint._snapshot import Snapshot
from fxtrain.state import DistContext, Position

__all__ = ["View", "pieces_of", "raise_all", "view_of"]


@attrs.frozen(kw_only=True)
class View:
    """What one rank is about to save.

    Attributes:
        problem: Why it cannot.
        position: Where it stands.
        sizes: Bytes of the pieces that it could write, by key.
        digests: Name and digest of the pieces that may differ between ranks, by key.
        aliases: Names of tensors that are another one.
        named: On rank 0, the name and the token of the checkpoint.
        has_way: Its group for saves in the background works.
    """

    problem: str | None
    position: Position
    sizes: Mapping[str, int]
    digests: Mapping[str, tuple[str, str]]
    aliases: Mapping[str, str]
    named: tuple[str, str] | None
    has_way: bool


def view_of(
    ctx: DistContext,
    problem: Exception | None,
    position: Position,
    taken: Snapshot | None,
    offers: Mapping[str, Piece],
    named: tuple[str, str] | None,
) -> View:
    return View(
        problem=None if problem is None else f"{type(problem).__name__}: {problem}",
        position=position,
        sizes={key: piece.size for key, piece in offers.items()},
        digests={} if taken is None else _digests(taken, offers),
        aliases={} if taken is None else taken.aliases,
        named=named,
        has_way=has_way(ctx),
    )


def _digests(taken: Snapshot, offers: Mapping[str, Piece]) -> dict[str, tuple[str, str]]:
    return {
        key: (piece.name, digest_of(memory_of(contiguous(piece.tensor))))
        for key, piece in offers.items()
        if piece.name in taken.drifting
    }


def _writers(views: Sequence[View], drifting: Set[str]) -> dict[str, int]:
    holders: dict[str, list[int]] = {}
    for rank, view in enumerate(views):
        for key in view.sizes:
            # Of what may differ, and of the user's own tensors, the first rank's count.
            first = key in drifting or key.startswith("extra")
            if key not in holders or not first:
                holders.setdefault(key, []).append(rank)
    sizes = {key: size for view in views for key, size in view.sizes.items()}
    return writers(sizes, holders)


def raise_all(views: Sequence[View], folder: str, problem: Exception | None) -> None:
    """Raise on every rank if one has a problem or stands somewhere else."""
    lines = [f"  rank {rank}: {one.problem}" for rank, one in enumerate(views) if one.problem]
    if lines:
        raise CheckpointError("\n".join([f"Nothing was saved in {folder}:", *lines])) from problem
    if len({view.position for view in views}) > 1:
        lines = [f"  rank {rank}: {view.position}" for rank, view in enumerate(views)]
        raise CheckpointError("\n".join(["save: the ranks stand at different positions:", *lines]))


def pieces_of(
    ctx: DistContext, views: Sequence[View], taken: Snapshot, offers: Mapping[str, Piece]
) -> list[Piece]:
    """What this rank writes, given what all could."""
    drifting: dict[str, set[tuple[str, str]]] = {}
    for view in views:
        for key, found in view.digests.items():
            drifting.setdefault(key, set()).add(found)
    chosen = _writers(views, drifting.keys())
    drifted = {name for found in drifting.values() if len(found) > 1 for name, _ in found}
    own = dict(taken.own)
    own |= {piece.name: piece.tensor for piece in offers.values() if piece.name in drifted}
    mine = [piece for key, piece in offers.items() if chosen[key] == ctx.rank]
    return [*mine, *own_pieces(own)]
