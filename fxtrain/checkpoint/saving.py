"""Save checkpoints atomically: every rank learns whether the checkpoint was committed."""

import logging
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal

import attrs
import torch

from fxtrain import ops
from fxtrain._reading import StrPath
from fxtrain._version import __version__
from fxtrain.checkpoint.background import (
    CheckpointState,
    Saving,
    finished,
    in_progress,
    stage,
    start_background,
    wait_for_earlier,
)
from fxtrain.checkpoint.folder_lock import Lock, acquire, process_of, this_process
from fxtrain.checkpoint.folders import (
    LARGEST,
    CheckpointInfo,
    check_rule,
    list_checkpoints,
    new_name,
    to_prune,
)
from fxtrain.checkpoint.manifest import Manifest, dump_manifest
from fxtrain.checkpoint.snapshot import Snapshot, by_name, converted, snapshot
from fxtrain.checkpoint.storage import LocalStorage, Storage, open_storage
from fxtrain.checkpoint.write_plan import (
    TensorChunk,
    Written,
    check_arguments,
    choose_writers,
    chunks_to_write,
    offers_of,
    shared_aliases,
    writable_chunks,
    write_chunks,
    written_tensors,
)
from fxtrain.errors import CheckpointError, CollectiveError
from fxtrain.ops.standing import RunFolder
from fxtrain.ops.transport.exchange import collect_payloads
from fxtrain.ops.transport.mismatches import by_rank
from fxtrain.ops.transport.pickled import dump, error_text, unpickle_all
from fxtrain.state import DistContext, Key, ModelState, Position, Wrapped
from fxtrain.state.context import check_connected

# A network file system may show a file late that another machine has written.
_VISIBLE_AFTER_S = 5.0
_POLL_INTERVAL_S = 0.1
_LOG = logging.getLogger(__name__)


def save(
    path: StrPath,
    ctx: DistContext,
    model: Wrapped | Mapping[str, Wrapped],
    *,
    position: Position | None = None,
    extra: object = None,
    metric: float | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: int | None = None,
    best: Literal["min", "max"] = "min",
    background: bool = False,
    busy: Literal["wait", "skip"] = "wait",
) -> Saving:
    """Save models and everything that a run needs to resume bit for bit.

    Saves parameters, buffers, optimizers, schedulers, the loss scale, an open accumulation
    window, the random generators of every rank, the position in the data, and `extra`. The
    checkpoint is the folder `update-…` in `path`, named after `position.updates`.

    Args:
        path: Folder of the run's checkpoints, on a file system that all ranks share, or an
            fsspec URL. A lock in the folder ensures that one run at a time writes into it;
            the lock of a process that has ended is replaced.
        model: A model returned by `fx.wrap`, or several by name.
        position: Position of the run: `batch.position` or `report.position`. Only models that have
            made no update may be saved without one.
        extra: User state, the same on every rank: tensors, plain values, attrs records and
            objects with `state_dict()`, nested arbitrarily.
        metric: The number that `keep_best` compares.
        keep_last: Keep this many of the most recently committed checkpoints; all, if no rule
            is given. No rule removes the new checkpoint, the one that this run was last
            restored from, or those of another run that is still active.
        keep_every: Keep checkpoints whose number of updates is a multiple of this.
        keep_best: Keep this many with the best metric.
        best: Whether the best metric is the smallest or the largest.
        background: Copy the state to host memory, return, and write it in a thread.
        busy: What to do while an earlier save is in progress: wait for it, or skip this save
            and return the earlier handle.

    Returns:
        A handle with the `path` of the checkpoint; `handle.result()` waits for the save.

    Effects:
        Writes one file per rank; every value is written once across all ranks. A few small
        collectives. Removes leftovers of interrupted saves before, and checkpoints that no
        rule keeps after the new one is committed.

    Raises:
        ContextError: the context is closed.
        CheckpointError: a value cannot be saved, the ranks pass different arguments, a rank
            cannot write, another process is saving into the folder, or a checkpoint in it
            cannot be read; on every rank. Earlier checkpoints stay intact. Also the error of
            an earlier background save whose `result()` was never called; if the program ends
            first, it prints that error and exits with 1.

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
    rule = {"keep_last": keep_last, "keep_every": keep_every, "keep_best": keep_best, "best": best}

    def capture() -> Snapshot:
        wait_for_earlier(ctx)
        check_rule(rule, metric)
        if busy not in ("wait", "skip"):
            raise CheckpointError(f"save(busy={busy!r}): choose 'wait' or 'skip'.")
        models = by_name(model)
        return snapshot(ctx, models, _position(position, models), extra, metric)

    with _as_checkpoint_error(str(path)):
        earlier = in_progress(ctx, busy)
        if earlier is not None:
            return earlier
        arguments = {"background": background, "busy": busy, "position": position}
        # Ranks may differ in its last bits, and that of rank 0 counts.
        arguments["metric"] = None if metric is None else "a number"
        job, open_group = _prepare(ctx, path, capture, rule, arguments)
        if not background:
            return Saving(path=job.path, future=finished(job.run(ctx)))
        try:
            job.stage(ctx)
            return start_background(ctx, job.path, job.run, open_group=open_group)
        except BaseException:
            job.release()
            raise


def save_alone(
    path: StrPath, state: ModelState, aliases: Mapping[Key, Key], position: Position
) -> str:
    """Write a state from a single process, and return the path of the checkpoint.

    Args:
        aliases: Further keys of tensors, each with the one in the state.
    """
    ctx = DistContext()
    job, _ = _prepare(ctx, path, lambda: converted(state, aliases, position), {}, {})
    job.run(ctx)
    return job.path


def _position(position: Any, models: Mapping[str, Wrapped]) -> Position:
    """The position to save; raises if it is missing or of another type."""
    if position is None:
        for name, model in models.items():
            if model.window.updates or model.window.micro:
                raise CheckpointError(
                    f"save(position=...) is missing, but model {name!r} has been "
                    f"trained: the checkpoint would continue with the first row of the data. Pass "
                    f"position=report.position, or batch.position."
                )
        return Position()
    if not isinstance(position, Position):
        raise CheckpointError(
            f"save(position=...) takes a Position, found {type(position).__name__}. Pass "
            f"batch.position or report.position."
        )
    kinds = {"is_last": bool, "order": str}
    wrong = [
        f"{field}={value!r}"
        for field, value in attrs.asdict(position).items()
        if type(value) is not kinds.get(field, int)
        or (field != "order" and not 0 <= value < 10**18)
    ]
    if wrong:
        raise CheckpointError(
            f"save(position=...) has {', '.join(wrong)}: its counts are integers from 0, such as "
            f"int(value)."
        )
    return position


@contextmanager
def _as_checkpoint_error(what: str) -> Iterator[None]:
    """Turn the failure of a rank into a `CheckpointError` on every remaining rank."""
    try:
        yield
    except CollectiveError as error:
        raise CheckpointError(
            f"{what}: nothing was saved, or a rank failed before all ranks could confirm the "
            f"commit. Earlier checkpoints are intact. {error}",
            code="FX606",
        ) from error


def _prepare(
    ctx: DistContext,
    path: StrPath,
    capture: Callable[[], Snapshot],
    rule: Mapping[str, Any],
    arguments: Mapping[str, object],
) -> tuple["_Job", bool]:
    """Agree on the state to save and its name; only rank 0 accesses the disk.

    Args:
        capture: Checks the arguments, and takes the snapshot.
        rule: The arguments that say which checkpoints are kept, for `to_prune`.
        arguments: Others of this rank that must be equal on every rank.

    Returns:
        The save, and whether a rank lacks a group for background saves in which no rank has failed.
    """
    problem, lock, proposal, where = None, None, None, str(path)
    with ExitStack() as undo:
        try:
            folder = open_storage(path)
            where = str(folder)
            captured = capture()
            fields = captured.fields
            writable = writable_chunks(captured.tensors)
            named = None
            if ctx.is_main:
                folder.make()
                lock = acquire(folder)
                undo.callback(lock.release)
                for name in folder.leftovers():  # of interrupted saves
                    _remove(folder, name)
                run = ctx.comm.slot(RunFolder)
                if isinstance(folder, LocalStorage) and not run.path:
                    run.path = os.path.abspath(folder.path)
                named = new_name(folder, fields["position"].updates), secrets.token_hex(4)
            offers = offers_of(writable, captured.varying, captured.users)
            proposal = offers, fields["aliases"], named
        except Exception as error:  # raised below on every rank
            problem = error
        state = ctx.comm.slot(CheckpointState)
        group = state.background
        has_group = group is not None and group.comm.state.failure is None
        facts = where, {"path": where, **rule, **arguments}, has_group, proposal
        rows, lines = _collect(facts, problem, ctx)
        answer: Any = _decided(rows, lines) if ctx.is_main else None
        answer = ops.broadcast_object(answer, ctx)
        if isinstance(answer, str) or proposal is None:
            raise CheckpointError(str(answer), code="FX606") from problem
        (name, token), aliases, (writers, differing), has_groups = answer
        job = _Job(
            folder=folder,
            name=name,
            token=token,
            fields={**fields, "aliases": aliases},
            chunks=chunks_to_write(ctx.rank, writers, differing, aliases, captured.own, writable),
            rule=rule,
            lock=lock,
            state=state,
        )
        undo.pop_all()  # the job releases the lock
    return job, not has_groups


def _collect(
    value: Any, problem: BaseException | None, ctx: DistContext
) -> tuple[list[Any], list[str]]:
    """On rank 0, the values of all ranks, and a line for each problem; on others, nothing.

    Rank 0 alone decides what follows, since at many ranks the values are large, and tells the
    others, who wait for it. So it gets problems as values, and its own is one of the lines.
    """
    text = "" if problem is None else error_text(problem)
    own = (value, text, text and platform.node())
    rows = [own]
    if ctx.world_size > 1:
        call = ("gather_objects", "dst=0")
        blobs = collect_payloads(ctx, call, dump(own, ctx))
        try:
            rows = unpickle_all(call[0], dict(enumerate(blobs)), ctx, sure=True)
        except CollectiveError as error:  # the others wait for an answer
            return [], [f"  rank 0: {error}"]
    hosts = {rank: host for rank, (*_, host) in enumerate(rows) if host and ctx.num_nodes > 1}
    problems = by_rank(((rank, text) for rank, (_, text, _) in enumerate(rows) if text), hosts)
    return [value for value, *_ in rows], problems


def _decided(rows: Sequence[Any], lines: Sequence[str]) -> Any:
    """What rank 0 tells all ranks about a save: how each takes part, or why nothing is saved."""
    if lines:
        where = f" in {rows[0][0]}" if rows else ""
        return "\n".join([f"Nothing was saved{where}:", *lines])
    _, every_arguments, groups, every = zip(*rows, strict=True)
    try:
        check_arguments(every_arguments)
    except CheckpointError as error:
        return error.message
    offers, every_aliases, every_named = zip(*every, strict=True)
    aliases = shared_aliases(offers, every_aliases)
    return every_named[0], aliases, choose_writers(offers, aliases), all(groups)


@attrs.define(kw_only=True, eq=False)
class _Job:
    """A save that all ranks have agreed on and none has written yet."""

    folder: Storage
    name: str
    token: str
    fields: Mapping[str, Any]  # of the manifest
    chunks: Sequence[TensorChunk]
    rule: Mapping[str, Any]
    lock: Lock | None  # on rank 0, of the folder
    state: CheckpointState  # of the context of `save`; a background save runs in another
    problem: Exception | None = None  # why this rank cannot write

    @property
    def path(self) -> str:
        return str(self.folder.join(self.name))

    def stage(self, ctx: DistContext) -> None:
        """Copy the chunks to host memory; if that fails, `run` raises on every rank."""
        try:
            self.chunks = stage(ctx, self.chunks)
        except Exception as error:  # any error must be reported to the other ranks
            self.chunks, self.problem = [], error

    def release(self) -> None:
        """Unlock the folder for other processes."""
        if self.lock is not None:
            self.lock.release()

    def run(self, ctx: DistContext) -> int:
        """Write this rank's file and commit with the other ranks; the bytes that all wrote."""
        problem, written = self.problem, ({}, [])
        try:
            try:
                draft = self.folder.begin(self.name, self.token)
                written = write_chunks(draft, ctx.rank, self.chunks)
            except Exception as error:  # as above
                problem = problem or error
            with _as_checkpoint_error(self.path):
                rows, lines = _collect((platform.node(), written), problem, ctx)
                if self.lock is not None and not lines:
                    try:
                        self._commit(ctx, self.lock, rows)
                    except Exception as error:  # as above
                        lines = [f"  rank 0: {error_text(error)}"]
                if self.lock is not None and lines:
                    self._remove_draft()
                self.release()  # before another rank returns from `save`
                size = sum(file.size for _, (files, _) in rows for file in files.values())
                lines, size = ops.broadcast_object((lines, size), ctx)
        finally:
            self.release()
        if lines:
            self._remove_draft()  # on each rank, as each machine may have a folder of its own
            head = f"{self.path} was not saved. Earlier checkpoints are intact."
            raise CheckpointError("\n".join([head, *lines]), code="FX606")
        return size

    def _remove_draft(self) -> None:
        with suppress(OSError, CheckpointError):  # the next save removes what is left
            for name in self.folder.leftovers():
                if self.token in name:
                    _remove(self.folder, name)

    def _commit(self, ctx: DistContext, lock: Lock, rows: Sequence[tuple[str, Written]]) -> None:
        """Commit on rank 0, and prune.

        Args:
            rows: The machine of each rank, and what it wrote.
        """
        checkpoints = list_checkpoints(self.folder)
        order = 1 + max((info.order or 0 for info in checkpoints), default=0)
        manifest = self._manifest(ctx, [written for _, written in rows], order)
        raw = dump_manifest(manifest)
        if len(raw) > LARGEST:
            raise CheckpointError(
                f"The manifest has {len(raw)} bytes; the limit is {LARGEST}. Plain values in extra "
                f"are part of it: save large ones as tensors, bytes by torch.frombuffer."
            )
        self._check_shared(rows)
        lock.check()
        self.folder.commit(self.name, self.token, raw)
        new = CheckpointInfo(name=self.name, order=order, metric=manifest.metric)
        # Of these, the last is the new one.
        for name in to_prune([*checkpoints, new], process_of(this_process()), **self.rule):
            # Looked up each time, since the run may go back while this is written.
            if self.folder.join(name).key() != self.state.restored_from:
                _remove(self.folder, name)

    def _manifest(self, ctx: DistContext, written: Sequence[Written], order: int) -> Manifest:
        sizes = {"world_size": ctx.world_size, "mesh": ctx.mesh.sizes}
        return Manifest(
            versions={"fxtrain": __version__, "torch": torch.__version__},
            topology={**sizes, "order": order, "saver": this_process()},
            tensors=written_tensors(written, own=False),
            own=tuple([written_tensors([of_rank], own=True) for of_rank in written]),
            files={name: file for files, _ in written for name, file in files.items()},
            **self.fields,
        )

    def _check_shared(self, rows: Sequence[tuple[str, Written]]) -> None:
        """Raise if rank 0 does not see the files of all ranks: each machine has its own folder."""
        draft, deadline = self.folder.begin(self.name, self.token), time.monotonic()
        deadline += _VISIBLE_AFTER_S
        while True:
            sizes: Mapping[str, int] = {}
            with suppress(FileNotFoundError):
                sizes = draft.files()
            absent = [
                f"rank {rank} on {host}"
                for rank, (host, (files, _)) in enumerate(rows)
                for name, file in files.items()
                if sizes.get(name) != file.size
            ]
            if not absent:
                return
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{self.folder} is not the same folder on every machine: rank 0 on "
                    f"{platform.node()} does not see the files of {', '.join(absent)}. Use a "
                    f"folder on a file system that all machines mount, or the URL of an object "
                    f"store."
                )
            time.sleep(_POLL_INTERVAL_S)


def _remove(folder: Storage, name: str) -> None:
    try:
        folder.remove(name)
    except Exception as error:  # any of a store's client; what was committed is intact
        _LOG.warning("%s cannot be removed: %s", folder.join(name), error)
