"""Saving: a checkpoint appears whole, or not at all, and every rank knows which."""

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import attrs
import torch

from fxtrain import ops
from fxtrain._errors import CheckpointError, CollectiveError
from fxtrain._version import __version__
from fxtrain.checkpoint._background import Saving, earlier, has_way, start
from fxtrain.checkpoint._bytes import contiguous, memory_of
from fxtrain.checkpoint._manifest import Entry, Manifest, Part, digest_of, dump_manifest
from fxtrain.checkpoint._names import Keep, checkpoints, new_name, to_prune
from fxtrain.checkpoint._pieces import Piece, offers_of, own_pieces, writers
from fxtrain.checkpoint._place import Place, place_of
from fxtrain.checkpoint._snapshot import Snapshot, by_name, snapshot
from fxtrain.checkpoint._staging import Staging, stage
from fxtrain.checkpoint._write import Written, write_file
from fxtrain.state import DistContext, Position, Wrapped

__all__ = ["save", "save_alone"]


def save(
    path: Any,
    ctx: DistContext,
    model: Wrapped | Mapping[str, Wrapped],
    *,
    position: Position = Position(),  # noqa: B008 - a frozen value
    extra: Any = None,
    metric: float | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: int | None = None,
    best: Literal["min", "max"] = "min",
    background: bool = False,
    busy: Literal["wait", "skip"] = "wait",
) -> Saving:
    """Save models, and all that a run needs to go on bit for bit.

    That is parameters, buffers, optimizers, schedulers, the loss scale, an open accumulation
    window, the random generators of every rank, the position in the data, and `extra`. The
    checkpoint is the folder `update-…` in `path`, named after `position.updates`.

    Args:
        path: Folder of the run's checkpoints, on a file system that all ranks share, or an
            fsspec URL. One run at a time writes into it.
        model: What `fx.wrap` returned, or several of them by name.
        position: Where the run stands: `batch.position` or `report.position`.
        extra: The user's own state, the same on every rank: tensors, plain values, attrs
            records, objects with `state_dict()`, nested at will.
        metric: What `keep_best` compares.
        keep_last: Keep this many of the newest checkpoints; all, if no rule is given.
        keep_every: Keep those whose number of updates is a multiple of this.
        keep_best: Keep this many with the best metric.
        best: Whether the best metric is the smallest or the largest.
        background: Copy the state to host memory and write it in a thread. What only an
            optimizer's step changes may still be copied when `save` returns; the next step
            of the optimizer waits for it. Before you change parameters in another way, call
            `copied()` on the handle; where it was forgotten, the save fails.
        busy: What to do while an earlier save is still being written: wait for it, or skip
            this one and return the handle of the earlier.

    Returns:
        A handle with the `path` of the checkpoint; `handle.result()` waits for it.

    Effects:
        Writes one file per rank, which holds each number once over all ranks. A few small
        collectives. Older checkpoints that no rule keeps are removed after the new one is
        there, and what an interrupted save left behind before.

    Raises:
        CheckpointError: a value cannot be saved, or a rank could not write; on every rank.
            Earlier checkpoints are whole. Also the error of an earlier save in the
            background that nobody has asked for.

    Example:
        >>> import fxtrain as fx, tempfile, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        ...     folder = tempfile.mkdtemp()
        ...     _ = fx.save(folder, ctx, model, position=fx.Position(updates=7))
        ...     fx.latest(folder)[-17:]
        'update-0000000007'
    """
    keep = _keep(keep_last, keep_every, keep_best, best, metric)
    models = by_name(model)
    if not isinstance(position, Position):
        raise CheckpointError(
            f"save(position=...) takes a Position, found {type(position).__name__}. Use "
            f"batch.position or report.position."
        )
    folder = place_of(path)
    with _together(str(folder)):
        under_way = earlier(ctx, busy)
        if under_way is not None:
            return under_way
        job = _prepare(ctx, folder, models, position, extra, metric, keep)
        if background:
            return _start(ctx, job, models)
    job.run(ctx)
    return Saving(path=job.final)


def _start(ctx: DistContext, job: "_Job", models: Mapping[str, Wrapped]) -> Saving:
    staged = job.staged(ctx)
    saving = start(ctx, job.final, staged.run, staged.staging, anew=job.anew)
    if staged.staging is not None:
        staged.staging.hold([one for model in models.values() for one in model.optimizers])
    return saving


@contextmanager
def _together(what: str) -> Iterator[None]:
    """A rank that is gone is an error of the checkpoint, on every rank that is left."""
    try:
        yield
    except CollectiveError as error:
        raise CheckpointError(
            f"{what}: nothing was saved, or a rank was gone before all could agree that it was. "
            f"Earlier checkpoints are whole. {error}"
        ) from error


def save_alone(path: Any, taken: Snapshot) -> str:
    """Write a state that one process holds; the path of the checkpoint."""
    folder, ctx = place_of(path), DistContext()
    folder.make()
    _clean(folder, [])
    job = _Job(
        folder=folder,
        name=new_name(folder, taken.position.updates),
        token=secrets.token_hex(4),
        taken=taken,
        pieces=[*offers_of(taken.tensors).values()],
        keep=Keep(),
    )
    job.run(ctx)
    return job.final


@attrs.frozen(kw_only=True, eq=False)
class _Job:
    """One save, agreed by all ranks and not yet written."""

    folder: Place
    name: str
    token: str
    taken: Snapshot
    pieces: Sequence[Piece]
    keep: Keep
    problem: str | None = None  # why this rank cannot write
    staging: Staging | None = None
    anew: bool = False  # the group of saves in the background is to be opened

    @property
    def final(self) -> str:
        return str(self.folder.join(self.name))

    def staged(self, ctx: DistContext) -> "_Job":
        """The same of copies, so that the model may change; it says so if there is no room."""
        tensors = self.taken.tensors
        steady = {
            name: tensor
            for name in self.taken.steady
            if isinstance(tensor := tensors[name], torch.Tensor)
        }
        try:
            staging = stage(ctx, self.pieces, steady)
            return attrs.evolve(self, pieces=staging.pieces, staging=staging)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            return attrs.evolve(self, pieces=[], problem=f"{type(error).__name__}: {error}")

    def run(self, ctx: DistContext) -> None:
        """Write this rank's file and commit together with the other ranks."""
        draft = self.folder.draft(self.name, self.token)
        problem, written = self.problem, Written(rank=ctx.rank)
        try:
            with nullcontext() if self.staging is None else self.staging.making():
                written = write_file(draft, ctx.rank, self.pieces)
        except Exception as error:  # as above
            problem = f"{type(error).__name__}: {error}"
        with _together(self.final):
            found = ops.gather_objects((problem, written), ctx)
            problems = {rank: text for rank, (text, _) in enumerate(found) if text is not None}
            if not problems:
                word = self._commit(ctx, [written for _, written in found])
                problems = {0: word} if word is not None else {}
            if problems:
                self._give_up(ctx, problems)

    def _commit(self, ctx: DistContext, written: Sequence[Written]) -> str | None:
        """Rank 0 makes the checkpoint appear; every rank learns what became of it."""
        problem: str | None = None
        if ctx.is_main:
            try:
                manifest = dump_manifest(_manifest(ctx, self.taken, written))
                self.folder.commit(self.name, self.token, manifest)
                for name in to_prune(self.folder, self.keep):
                    self.folder.remove(name)
            except Exception as error:  # as above
                problem = f"{type(error).__name__}: {error}"
        return ops.broadcast_object(problem, ctx)

    def _give_up(self, ctx: DistContext, problems: Mapping[int, str]) -> None:
        lines = [f"  rank {rank}: {text}" for rank, text in problems.items()]
        whole = False
        if ctx.is_main:
            try:
                whole = self.name in checkpoints(self.folder)
                _clean(self.folder, lines)
            except OSError as error:
                lines.append(f"  rank 0: {type(error).__name__}: {error}")
        whole, lines = ops.broadcast_object((whole, lines), ctx)
        head = (
            f"{self.final} was saved and is whole, but what comes after failed:"
            if whole
            else f"{self.final} was not saved. Earlier checkpoints are whole."
        )
        raise CheckpointError("\n".join([head, *lines]))


def _prepare(
    ctx: DistContext,
    folder: Place,
    models: Mapping[str, Wrapped],
    position: Position,
    extra: Any,
    metric: float | None,
    keep: Keep,
) -> _Job:
    """Agree on what is saved and under which name; no rank has touched the disk but rank 0."""
    problem: Exception | None = None
    taken, named, offers = None, None, dict[str, Piece]()
    try:
        taken = snapshot(ctx, models, position, extra, metric)
        offers = offers_of(taken.tensors)
        if ctx.is_main:
            folder.make()
            _clean(folder, [])
            named = (new_name(folder, position.updates), secrets.token_hex(4))
    except Exception as error:  # raised below, on every rank
        problem = error
    view = _View(
        problem=None if problem is None else f"{type(problem).__name__}: {problem}",
        position=position,
        sizes={key: piece.size for key, piece in offers.items()},
        digests={} if taken is None else _digests(taken, offers),
        aliases={} if taken is None else taken.aliases,
        named=named,
        has_way=has_way(ctx),
    )
    views = ops.gather_objects(view, ctx)
    _raise_all(views, str(folder), problem)
    assert taken is not None
    name, token = views[0].named
    # Ranks of a pipeline hold different tensors, and know different aliases.
    taken = attrs.evolve(taken, aliases={k: v for view in views for k, v in view.aliases.items()})
    pieces = _pieces_of(ctx, views, taken, offers)
    return _Job(
        folder=folder,
        name=name,
        token=token,
        taken=taken,
        pieces=pieces,
        keep=keep,
        anew=not all(view.has_way for view in views),
    )


def _pieces_of(
    ctx: DistContext, views: Sequence["_View"], taken: Snapshot, offers: Mapping[str, Piece]
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


@attrs.frozen(kw_only=True)
class _View:
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


def _digests(taken: Snapshot, offers: Mapping[str, Piece]) -> dict[str, tuple[str, str]]:
    return {
        key: (piece.name, digest_of(memory_of(contiguous(piece.tensor))))
        for key, piece in offers.items()
        if piece.name in taken.drifting
    }


def _writers(views: Sequence[_View], drifting: Set[str]) -> dict[str, int]:
    holders: dict[str, list[int]] = {}
    for rank, view in enumerate(views):
        for key in view.sizes:
            # Of what may differ, and of the user's own tensors, the first rank's count.
            first = key in drifting or key.startswith("extra")
            if key not in holders or not first:
                holders.setdefault(key, []).append(rank)
    sizes = {key: size for view in views for key, size in view.sizes.items()}
    return writers(sizes, holders)


def _raise_all(views: Sequence[_View], folder: str, problem: Exception | None) -> None:
    """Raise on every rank if one has a problem or stands somewhere else."""
    lines = [f"  rank {rank}: {one.problem}" for rank, one in enumerate(views) if one.problem]
    if lines:
        raise CheckpointError("\n".join([f"Nothing was saved in {folder}:", *lines])) from problem
    if len({view.position for view in views}) > 1:
        lines = [f"  rank {rank}: {view.position}" for rank, view in enumerate(views)]
        raise CheckpointError("\n".join(["save: the ranks stand at different positions:", *lines]))


def _clean(folder: Place, lines: list[str]) -> None:
    """Remove what an interrupted save left behind; what cannot be removed is told."""
    for name in folder.leftovers():
        try:
            folder.remove(name)
        except OSError as error:
            lines.append(f"  rank 0: {name} of an interrupted save cannot be removed: {error}")


def _manifest(ctx: DistContext, taken: Snapshot, written: Sequence[Written]) -> Manifest:
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
    return Manifest(
        versions={"fxtrain": __version__, "torch": torch.__version__},
        topology={"world_size": ctx.world_size, "mesh": ctx.mesh.sizes},
        position=taken.position,
        metric=taken.metric,
        models=taken.models,
        extra=taken.extra,
        tensors={
            name: Entry(dtype=dtype, shape=whole, parts=tuple(parts))
            for name, (dtype, whole, parts) in tensors.items()
        },
        aliases=taken.aliases,
        own=tuple(own),
        files={one.file[0]: one.file[1] for one in written if one.file is not None},
    )


def _keep(last: Any, every: Any, best: Any, mode: Any, metric: Any) -> Keep:
    for name, value in (("keep_last", last), ("keep_every", every), ("keep_best", best)):
        if value is not None and (type(value) is not int or value < 1):
            raise CheckpointError(f"save({name}={value!r}): pass how many, 1 or more.")
    if mode not in ("min", "max"):
        raise CheckpointError(f"save(best={mode!r}): choose 'min' or 'max'.")
    if metric is not None and (type(metric) not in (int, float) or not math.isfinite(metric)):
        raise CheckpointError(
            f"save(metric={metric!r}): pass a finite number, such as loss.item(), that is the "
            f"same on every rank."
        )
    if best is not None and metric is None:
        raise CheckpointError("save(keep_best=...) needs metric=, the number to compare.")
    return Keep(last=last, every=every, best=best, mode=mode)
