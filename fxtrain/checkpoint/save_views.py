"""What each rank is about to save: compared by all, and shared out between them."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import attrs

from fxtrain._errors import CheckpointError
from fxtrain.checkpoint.async_save import has_way
from fxtrain.checkpoint.manifest import digest_of
from fxtrain.checkpoint.save_arguments import Asked
from fxtrain.checkpoint.snapshot import Snapshot
from fxtrain.checkpoint.write_plan import Piece, own_pieces, writers
from fxtrain.models.tensor_bytes import contiguous, memory_of
from fxtrain.ops.transport.mismatches import by_rank
from fxtrain.state import DistContext, Position

__all__ = ["View", "pieces_of", "raise_all", "view_of"]


@attrs.frozen(kw_only=True)
class View:
    """What one rank is about to save.

    Attributes:
        path: Where, as it was passed.
        problem: Why it cannot.
        alike: Its arguments that must be equal on every rank, in words; none with a problem.
        position: Where it stands.
        sizes: Bytes of the pieces that it could write, by key.
        digests: Name and digest of the pieces that may differ between ranks, by key.
        aliases: Names of tensors that are another one.
        named: On rank 0, the name and the token of the checkpoint.
        has_way: Its group for saves in the background works.
    """

    path: str
    problem: str | None
    alike: Mapping[str, str]
    position: Position
    sizes: Mapping[str, int]
    digests: Mapping[str, tuple[str, str]]
    aliases: Mapping[str, str]
    named: tuple[str, str] | None
    has_way: bool


def view_of(
    ctx: DistContext,
    path: Any,
    problem: Exception | None,
    asked: Asked | None,
    taken: Snapshot | None,
    offers: Mapping[str, Piece],
    named: tuple[str, str] | None,
) -> View:
    return View(
        path=str(path),
        problem=None if problem is None else f"{type(problem).__name__}: {problem}",
        alike={} if asked is None else asked.alike,
        position=Position() if asked is None else asked.position,
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


def raise_all(views: Sequence[View], problem: Exception | None) -> None:
    """Raise on every rank if one has a problem, asks for something else, or stands elsewhere."""
    lines = by_rank((rank, one.problem) for rank, one in enumerate(views) if one.problem)
    if lines:
        raise CheckpointError(
            "\n".join([f"Nothing was saved in {views[0].path}:", *lines])
        ) from problem
    first = views[0].alike
    unequal = [name for name in first if any(one.alike[name] != first[name] for one in views)]
    if unequal:
        raise CheckpointError(_unequal(views, unequal))
    if len({view.position for view in views}) > 1:
        lines = [f"  rank {rank}: {view.position}" for rank, view in enumerate(views)]
        raise CheckpointError("\n".join(["save: the ranks stand at different positions:", *lines]))


def _unequal(views: Sequence[View], names: Sequence[str]) -> str:
    found = [", ".join(f"{name}={view.alike[name]}" for name in names) for view in views]
    advice = "Pass the same arguments on every rank."
    if "path" in names:
        advice += (
            " A checkpoint is one folder that all ranks share: do not put the rank, a time or a "
            "random name into its path; or send rank 0's with ops.broadcast_object(path, ctx)."
        )
    head = f"Nothing was saved. save: the ranks pass different values of {' and '.join(names)}."
    return "\n".join([head, *by_rank(enumerate(found)), advice])


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
