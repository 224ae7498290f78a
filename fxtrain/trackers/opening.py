"""Opens a run: the same decision on every rank, and trackers on the ranks that track."""

import atexit
import hashlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from fxtrain import ops
from fxtrain._errors import FxError, MissingPackageError, PlanError
from fxtrain._reading import StrPath
from fxtrain.checkpoint.folder_lock import Lock
from fxtrain.state import DistContext, Plan, Position, check_connected, shown
from fxtrain.trackers.entries import Entry
from fxtrain.trackers.hyperparameters import about_context, about_plan, flat
from fxtrain.trackers.json_lines import JsonLines
from fxtrain.trackers.run import Progress, Run
from fxtrain.trackers.run_folder import Identity, claim, folder_of, lock_folder, write_identity
from fxtrain.trackers.table import find, targets
from fxtrain.trackers.tracker import Start, Target, Tracker
from fxtrain.trackers.writer import Patience, Warn, Writer, start_writer

_LOG = logging.getLogger("fxtrain.trackers")
_ERRORS = {"MissingPackageError": MissingPackageError}


def track(
    path: StrPath,
    ctx: DistContext,
    to: Target | Sequence[Target] = (JsonLines(),),  # noqa: B008 - a frozen value
    *,
    plan: Plan | None = None,
    settings: Mapping[str, object] | None = None,
    name: str | None = None,
    resume: Mapping[str, object] | Literal["folder"] | None = None,
    position: Position | None = None,
    ranks: Literal["main", "all"] = "main",
    patience: Patience = Patience(),  # noqa: B008 - a frozen value
) -> Run:
    """Log a run to one tracker or several.

    Args:
        path: Folder of the run on this machine; may be that of its checkpoints.
        ctx: The context.
        to: Configs of trackers, such as `fx.TensorBoard()` or `fx.WandB(project="p")`; their kinds,
            such as "wandb"; "all" for those of fxtrain whose packages are installed; or
            `fxtrain.trackers.Tracker` records of your own.
        plan: Logged as hyperparameters, as the context is.
        settings: Further hyperparameters, nested arbitrarily.
        name: Display name; by default the last part of `path`.
        resume: To continue a run, the value of `run.state()`, for example from a checkpoint.
            "folder" continues the folder's own run, or starts one in an empty folder. None starts
            a new run.
        position: Where the run resumes; required with `resume`. Entries logged after it are
            removed where the tracker supports that, since they will be logged again.
        ranks: Which ranks track: rank 0, or all, each with its own run in one group.
        patience: How long training waits for a tracker that does not answer.

    Returns:
        A handle on every rank; use it in a `with` block, or close it.

    Effects:
        Locks the folder until the run is closed, writes into it, and starts a thread for each
        tracker on ranks that track. Two exchanges of packets; none at one rank. Random generators
        are not affected. A dry run writes nothing.

    Raises:
        PlanError: a tracker is unknown, an argument is invalid, or the folder belongs to another
            run, or a run is open there; on every rank. Nothing in the folder changes then.
        MissingPackageError: the package of a tracker is not installed; on every rank.
        ContextError: the context is closed.

    Example:
        >>> import fxtrain as fx, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     with fx.track(folder, ctx, settings={"lr": 3e-4}) as run:
        ...         run.log({"loss": 0.5}, fx.Position(updates=1, samples=32))
        >>> from fxtrain.trackers import read_run
        >>> read_run(folder).curve("loss")
        [(1, 0.5)]
    """
    check_connected("track", ctx)
    found, lock, problem = None, None, None
    try:
        found = _checked(path, to, plan, settings, name, resume, position, ranks)
        lock = lock_folder(found.folder, ctx)
    except FxError as error:
        problem = error
    return _track(ctx, found, lock, problem, resume, patience)


def own(path: Any, ctx: DistContext) -> Lock | None:
    """Lock the folder of a run before anything in it is read; the lock, on rank 0.

    Raises:
        PlanError: a run is open there, or the folder cannot be written; on every rank.
    """
    lock, problem = None, None
    try:
        lock = lock_folder(folder_of(path), ctx)
    except FxError as error:
        problem = error
    try:
        _agreed(problem, None, ctx)
    except BaseException:
        _release(lock)
        raise
    return lock


def track_in(
    lock: Lock | None,
    path: Any,
    ctx: DistContext,
    to: Any,
    *,
    plan: Plan,
    settings: Any,
    resume: Any,
    position: Position,
) -> Run:
    """As `track`, in a folder that `own` has locked; closing the run releases it."""
    found, problem = None, None
    try:
        found = _checked(path, to, plan, settings, None, resume, position, "main")
    except FxError as error:
        problem = error
    return _track(ctx, found, lock, problem, resume, Patience())


def _track(
    ctx: DistContext,
    found: "_Asked | None",
    lock: Lock | None,
    problem: FxError | None,
    resume: Any,
    patience: Patience,
) -> Run:
    opened: Mapping[str, tuple[Writer, str]] = {}
    known = None
    try:
        try:
            known = None if found is None or problem else _claimed(found, resume, ctx)
        except FxError as error:
            problem = error
        run, identities = _agreed(problem, known, ctx)[0]
        identity = Identity(id=run, identities=tuple(identities))
        assert found is not None
        opened, problem = _opened(found, identity, ctx, patience)
        return _run(found, identity, ctx, opened, problem, patience, lock)
    except BaseException:
        _end([writer for writer, _ in opened.values()], patience)
        _release(lock)
        raise


def _release(lock: Lock | None) -> None:
    if lock is not None:
        lock.release()


@attrs.frozen(kw_only=True, eq=False)
class _Asked:
    folder: Path
    rows: Mapping[str, tuple[Tracker, Any]]  # by their keys in `identities`
    plan: Plan | None
    settings: Mapping[str, Any]
    name: str
    position: Position
    everyone: bool


def _checked(
    path: Any,
    to: Any,
    plan: Any,
    settings: Any,
    name: Any,
    resume: Any,
    position: Any,
    ranks: Any,
) -> _Asked:
    folder = folder_of(path)
    if isinstance(to, str | Mapping) or not isinstance(to, Iterable):
        to = (to,)
    if not isinstance(plan, Plan | None):
        raise PlanError(f"track(plan={shown(plan)}): pass an fx.Plan, or omit it.")
    if not isinstance(settings, Mapping | None) and not attrs.has(type(settings)):
        raise PlanError(f"track(settings={shown(settings)}): pass a mapping, or omit it.")
    if not isinstance(name, str | None):
        raise PlanError(f"track(name={shown(name)}): pass a string, or omit it.")
    if ranks not in ("main", "all"):
        raise PlanError(f"track(ranks={shown(ranks)}): choose 'main' or 'all'.")
    if not isinstance(position, Position | None) or (resume is not None and position is None):
        raise PlanError(
            f"track(position={shown(position)}): pass the position where the run resumes, such as "
            f"restored.position; fx.Position() is the start."
        )
    if not isinstance(resume, Mapping | None) and resume != "folder":
        raise PlanError(
            f"track(resume={shown(resume)}): pass the value of run.state(), such as "
            f"restored.extra['run'], or 'folder', or omit it."
        )
    return _Asked(
        folder=folder,
        rows=_rows(to),
        plan=plan,
        settings=settings or {},
        name=name or folder.resolve().name or "run",
        position=position or Position(),
        everyone=ranks == "all",
    )


def _claimed(
    asked: _Asked, resume: Mapping[str, Any] | Literal["folder"] | None, ctx: DistContext
) -> tuple[str, list[Mapping[str, str]]] | None:
    """Which run this is, decided by rank 0; a dry run has none."""
    if ctx.comm.simulated:
        return "0" * 32, []
    if not ctx.is_main:
        return None
    found = claim(asked.folder, resume)
    return found.id, list(found.identities)


def _opened(
    asked: _Asked, known: Identity, ctx: DistContext, patience: Patience
) -> tuple[dict[str, tuple[Writer, str]], FxError | None]:
    """The trackers of this rank, or why they could not be opened."""
    if ctx.comm.simulated or not (ctx.is_main or asked.everyone):
        return {}, None
    try:
        with ops.fork_rng(ctx):
            return _open_all(asked, known, ctx, patience), None
    except FxError as error:
        return {}, error
    except Exception as error:  # any error: the other ranks must receive it
        return {}, PlanError(f"track: {type(error).__name__}: {error}")


def _rows(to: Iterable[Any]) -> dict[str, tuple[Tracker, Any]]:
    rows: dict[str, tuple[Tracker, Any]] = {}
    for one in targets(to):
        row, config = (one, None) if isinstance(one, Tracker) else (find(one), one)
        kind = key = str(getattr(config, "kind", row.name))
        count = 1
        while key in rows:
            count += 1
            key = f"{kind}-{count}"
        rows[key] = (row, config)
    return rows


def _open_all(
    asked: _Asked, known: Identity, ctx: DistContext, patience: Patience
) -> dict[str, tuple[Writer, str]]:
    """Every tracker that could be opened, and its library's id of the run."""
    opened: dict[str, tuple[Writer, str]] = {}
    warn = Warn()
    try:
        for key, (row, config) in asked.rows.items():
            start = _start(asked, known, ctx, key)
            try:
                native = row.open(config, start)
                called = str(row.identity(native))
            except FxError:
                raise
            except Exception as error:  # any error of the library: training continues
                warn(
                    f"open {key}",
                    f"{row.name} could not be opened: {type(error).__name__}: {error}. Training "
                    f"continues without it, and the other trackers are not affected.",
                )
                continue
            writer = start_writer(row, native, start, patience)
            opened[key] = (writer, called)
            writer.put(Entry("params", lambda start=start: (start,), warn))
    except BaseException:
        _end([writer for writer, _ in opened.values()], patience)
        raise
    return opened


def _end(writers: Sequence[Writer], patience: Patience) -> None:
    """Close trackers that were opened for a run that another tracker or rank has refused."""
    for writer in writers:
        writer.end(failed=True)
        writer.wait(time.monotonic() + patience.close_s, failed=True)


def _start(asked: _Asked, known: Identity, ctx: DistContext, key: str) -> Start:
    rank, run = ctx.rank, known.id
    mine = dict(*known.identities[rank : rank + 1])
    plan = {} if asked.plan is None else {"plan": about_plan(asked.plan)}
    tables = {**plan, "context": {**about_context(ctx), "rank": rank}}
    digest = hashlib.blake2b(f"{run}/{rank}".encode(), digest_size=16).hexdigest()
    return Start(
        id=digest if rank else run,
        run=run,
        name=f"{asked.name}-rank{rank}" if rank else asked.name,
        folder=asked.folder,
        rank=rank,
        everyone=asked.everyone,
        identity=mine.get(key, ""),
        position=asked.position,
        params={**flat(asked.settings), **flat(tables)},
        ctx=ctx,
        plan=asked.plan,
        settings=asked.settings,
        time=time.time(),
    )


def _run(
    asked: _Asked,
    known: Identity,
    ctx: DistContext,
    opened: Mapping[str, tuple[Writer, str]],
    problem: FxError | None,
    patience: Patience,
    lock: Lock | None,
) -> Run:
    """Create the handle once all ranks know their trackers' ids of the run."""
    mine = {
        **dict(*known.identities[ctx.rank : ctx.rank + 1]),
        **{key: called for key, (_, called) in opened.items()},
    }
    kinds = [
        row.name if config is None else type(config).__name__ for row, config in asked.rows.values()
    ]
    of_ranks = _agreed(problem, (mine, kinds), ctx)
    _, kinds = of_ranks[0]  # "all" may be fewer on another machine
    rows: list[Mapping[str, str]] = [row for row, _ in of_ranks[: None if asked.everyone else 1]]
    if ctx.is_main and not ctx.comm.simulated:
        try:
            write_identity(asked.folder, Identity(id=known.id, identities=tuple(rows)))
        except OSError as error:
            _LOG.warning(
                "%s: cannot record which run this folder belongs to: %s. Training "
                "continues; free disk space before the run is resumed.",
                asked.folder,
                error,
            )
    run = Run(
        id=known.id,
        path=str(asked.folder),
        state={"identities": rows, "kinds": kinds},
        writers=tuple(writer for writer, _ in opened.values()),
        patience=patience,
        progress=Progress(calls=asked.position.updates),
        lock=lock,
    )
    # Registered after the libraries' own functions, so that it runs before them.
    atexit.register(run.close)
    return run


def _agreed(problem: FxError | None, value: Any, ctx: DistContext) -> list[Any]:
    """Every rank's value; if any rank has a problem, raise the first one on every rank."""
    words = None if problem is None else (type(problem).__name__, str(problem))
    found = [(words, value)] if ctx.comm.simulated else ops.gather_objects((words, value), ctx)
    for words, _ in found:
        if words is not None:
            kind, text = words
            raise _ERRORS.get(kind, PlanError)(text) from problem
    return [one for _, one in found]
