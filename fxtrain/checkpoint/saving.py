"""Saving: a checkpoint appears whole, or not at all, and every rank knows which."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal

import attrs
import torch

from fxtrain import ops
from fxtrain._errors import CheckpointError, CollectiveError, FxError
from fxtrain._version import __version__
from fxtrain.checkpoint.async_save import Saving, start_background, wait_for_earlier
from fxtrain.checkpoint.data_files import Written, tables, write_file
from fxtrain.checkpoint.folder_lock import Lock, acquire
from fxtrain.checkpoint.folders import Found, list_checkpoints, new_name, next_order
from fxtrain.checkpoint.host_copies import Staging, stage
from fxtrain.checkpoint.local_storage import Storage, open_storage
from fxtrain.checkpoint.manifest import Manifest, dump_manifest
from fxtrain.checkpoint.owner import this_process
from fxtrain.checkpoint.retention import RetentionRule, to_prune
from fxtrain.checkpoint.save_arguments import SaveRequest, save_request
from fxtrain.checkpoint.save_views import chunks_to_write, raise_all, save_proposal
from fxtrain.checkpoint.snapshot import Snapshot, snapshot
from fxtrain.checkpoint.write_plan import TensorChunk, writable_chunks
from fxtrain.state import CommState, DistContext, Position, Wrapped, check_connected

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
            fsspec URL. One run at a time writes into it: a lock in the folder says who, and
            a lock of a process that has ended is taken over.
        model: What `fx.wrap` returned, or several of them by name.
        position: Where the run stands: `batch.position` or `report.position`.
        extra: The user's own state, the same on every rank: tensors, plain values, attrs
            records, objects with `state_dict()`, nested at will.
        metric: What `keep_best` compares.
        keep_last: Keep this many of the newest checkpoints, by when they were committed; all,
            if no rule is given. Whatever the rules: what was just saved and what this run
            was last restored from stay, and so does what another run that still runs saved.
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
        ContextError: the context is closed.
        CheckpointError: a value cannot be saved, the ranks pass different paths or other
            arguments, a rank could not write, another process is
            saving into the folder, or a checkpoint in it cannot be read; on every rank.
            Earlier checkpoints are whole. Also the error of an earlier save in the
            background that nobody has asked for. If nobody asks until the program ends, the
            error is shown then, and the program exits with 1.

    Example:
        >>> import fxtrain as fx, tempfile, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        ...     folder = tempfile.mkdtemp()
        ...     _ = fx.save(folder, ctx, model, position=fx.Position(updates=7))
        ...     fx.latest(folder)[-17:]
        'update-0000000007'
    """
    check_connected("save", ctx)
    rules = {
        "keep_last": keep_last,
        "keep_every": keep_every,
        "keep_best": keep_best,
        "best": best,
    }
    request, problem = None, None
    try:
        request = save_request(
            path, model, position, metric, rules, background=background, busy=busy
        )
    except FxError as error:
        if ctx.world_size == 1:
            raise
        problem = error  # the other ranks must hear of it
    with _as_checkpoint_error(str(path)):
        under_way = wait_for_earlier(ctx, busy)
        if under_way is not None:
            return under_way
        job = _prepare(ctx, path, request, problem, extra, metric)
        if background and request is not None:
            return _start(ctx, job, request.models)
    job.run(ctx)
    return Saving(path=job.final)


def _start(ctx: DistContext, job: "_Job", models: Mapping[str, Wrapped]) -> Saving:
    try:
        staged = job.staged(ctx)
        saving = start_background(ctx, job.final, staged.run, staged.staging, anew=job.fresh_group)
    except BaseException:
        job.release()
        raise
    if staged.staging is not None:
        staged.staging.hold([one for model in models.values() for one in model.optimizers])
    return saving


@contextmanager
def _as_checkpoint_error(what: str) -> Iterator[None]:
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
    folder, ctx = open_storage(path), DistContext()
    named, lock = _reserve(folder, taken.position.updates)
    job = _Job(
        comm_state=ctx.comm.state,
        folder=folder,
        name=named[0],
        token=named[1],
        snapshot=taken,
        pieces=[*writable_chunks(taken.tensors).values()],
        keep=RetentionRule(),
        lock=lock,
    )
    job.run(ctx)
    return job.final


def _reserve(folder: Storage, updates: int) -> tuple[tuple[str, str], Lock]:
    """Lock a folder, and choose the name and the token of a new checkpoint in it."""
    folder.make()
    lock = acquire(folder)
    try:
        _clean(folder, [])
        return (new_name(folder, updates), secrets.token_hex(4)), lock
    except BaseException:
        lock.release()
        raise


@attrs.frozen(kw_only=True, eq=False)
class _Job:
    """One save, agreed by all ranks and not yet written."""

    folder: Storage
    name: str
    token: str
    snapshot: Snapshot
    pieces: Sequence[TensorChunk]
    keep: RetentionRule
    problem: str | None = None  # why this rank cannot write
    staging: Staging | None = None
    fresh_group: bool = False  # the group of saves in the background is to be opened
    lock: Lock | None = None  # on rank 0, of the folder
    comm_state: CommState

    @property
    def final(self) -> str:
        return str(self.folder.join(self.name))

    def staged(self, ctx: DistContext) -> "_Job":
        """The same of copies, so that the model may change; it says so if there is no room."""
        tensors = self.snapshot.tensors
        steady = {
            name: tensor
            for name in self.snapshot.constant_between_steps
            if isinstance(tensor := tensors[name], torch.Tensor)
        }
        try:
            staging = stage(ctx, self.pieces, steady)
            return attrs.evolve(self, pieces=staging.pieces, staging=staging)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            return attrs.evolve(self, pieces=[], problem=f"{type(error).__name__}: {error}")

    def release(self) -> None:
        """Let others save into the folder."""
        if self.lock is not None:
            self.lock.release()

    def run(self, ctx: DistContext) -> None:
        """Write this rank's file and commit together with the other ranks."""
        try:
            self._run(ctx)
        finally:
            self.release()

    def _run(self, ctx: DistContext) -> None:
        draft = self.folder.begin(self.name, self.token)
        problem, written = self.problem, Written(rank=ctx.rank)
        try:
            with nullcontext() if self.staging is None else self.staging.making():
                written = write_file(draft, ctx.rank, self.pieces)
        except Exception as error:  # as above
            problem = f"{type(error).__name__}: {error}"
        with _as_checkpoint_error(self.final):
            found = ops.gather_objects((problem, written), ctx)
            problems = {rank: text for rank, (text, _) in enumerate(found) if text is not None}
            whole = False
            if not problems:
                whole, word = self._commit(ctx, [written for _, written in found])
                problems = {0: word} if word is not None else {}
            if problems:
                self._give_up(ctx, problems, whole=whole)

    def _commit(self, ctx: DistContext, written: Sequence[Written]) -> tuple[bool, str | None]:
        """Rank 0 makes the checkpoint appear; every rank learns what became of it."""
        problem: str | None = None
        whole = False
        if ctx.is_main:
            try:
                found = list_checkpoints(self.folder)
                order = next_order(found)
                manifest = _manifest(ctx, self.snapshot, written, order)
                if self.lock is not None:
                    self.lock.check()
                self.folder.commit(self.name, self.token, dump_manifest(manifest))
                whole = True
                self._prune(found, manifest)
                self.release()  # before another rank returns from `save`
            except Exception as error:  # as above
                problem = f"{type(error).__name__}: {error}"
        return ops.broadcast_object((whole, problem), ctx)

    def _prune(self, found: Sequence[Found], manifest: Manifest) -> None:
        new = Found(name=self.name, order=manifest.order, metric=manifest.metric)
        # Of damaged ones, whose place is not known, none is newer.
        for name in to_prune([*found, new], self.keep, this_process()):
            # Looked up each time, since the run may go back while this is written.
            if self.folder.join(name).key() != self.comm_state.restored_from:
                with suppress(FileNotFoundError):  # removed by hand meanwhile
                    self.folder.remove(name)

    def _give_up(self, ctx: DistContext, problems: Mapping[int, str], *, whole: bool) -> None:
        lines = [f"  rank {rank}: {text}" for rank, text in problems.items()]
        if ctx.is_main:
            try:
                if self.lock is None or self.lock.is_ours():  # else it may be another's draft
                    _clean(self.folder, lines)
            except (OSError, CheckpointError) as error:
                lines.append(f"  rank 0: {type(error).__name__}: {error}")
            self.release()
        lines = ops.broadcast_object(lines, ctx)
        head = (
            f"{self.final} was saved and is whole, but what comes after failed:"
            if whole
            else f"{self.final} was not saved. Earlier checkpoints are whole."
        )
        raise CheckpointError("\n".join([head, *lines]))


def _prepare(
    ctx: DistContext,
    path: Any,
    request: SaveRequest | None,
    problem: Exception | None,
    extra: Any,
    metric: float | None,
) -> _Job:
    """Agree on what is saved and under which name; no rank has touched the disk but rank 0.

    Args:
        request: The arguments; None where this rank's make no sense.
        problem: Why not.
    """
    taken, named, lock, offers = None, None, None, dict[str, TensorChunk]()
    try:
        try:
            if request is not None:
                taken = snapshot(ctx, request.models, request.position, extra, metric)
                offers = writable_chunks(taken.tensors)
                if ctx.is_main:
                    named, lock = _reserve(request.folder, request.position.updates)
        except Exception as error:  # raised below, on every rank
            problem = error
        views = ops.gather_objects(
            save_proposal(ctx, path, problem, request, taken, offers, named), ctx
        )
        raise_all(views, problem)
        assert taken is not None and request is not None
        name, token = views[0].named
        # Ranks of a pipeline hold different tensors, and know different aliases.
        aliases = {k: v for view in views for k, v in view.aliases.items()}
        taken = attrs.evolve(taken, aliases=aliases)
        return _Job(
            folder=request.folder,
            name=name,
            token=token,
            snapshot=taken,
            pieces=chunks_to_write(ctx, views, taken, offers),
            keep=request.keep,
            fresh_group=not all(view.has_background_group for view in views),
            lock=lock,
            comm_state=ctx.comm.state,
        )
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def _clean(folder: Storage, lines: list[str]) -> None:
    """Remove what an interrupted save left behind; what cannot be removed is told."""
    for name in folder.leftovers():
        try:
            folder.remove(name)
        except OSError as error:
            lines.append(f"  rank 0: {name} of an interrupted save cannot be removed: {error}")


def _manifest(
    ctx: DistContext, taken: Snapshot, written: Sequence[Written], order: int
) -> Manifest:
    tensors, own, files = tables(written)
    return Manifest(
        versions={"fxtrain": __version__, "torch": torch.__version__},
        topology={
            "world_size": ctx.world_size,
            "mesh": ctx.mesh.sizes,
            "order": order,
            "saver": attrs.asdict(this_process()),
        },
        position=taken.position,
        metric=taken.metric,
        models=taken.models,
        extra=taken.extra,
        tensors=tensors,
        aliases=taken.aliases,
        own=own,
        files=files,
    )
