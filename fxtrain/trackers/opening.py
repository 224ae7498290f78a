"""Opens a run: the same decision on every rank, and trackers on the ranks that track."""

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import torch

from fxtrain import ops
from fxtrain._reading import StrPath
from fxtrain._record import shown
from fxtrain._version import __version__
from fxtrain.checkpoint.folder_lock import Lock
from fxtrain.errors import FxError, PlanError
from fxtrain.ops.same_errors import gather_or_raise
from fxtrain.state import DistContext, Plan, Position, fingerprint, unstructure
from fxtrain.state.context import check_connected
from fxtrain.trackers.entries import Logged
from fxtrain.trackers.json_lines import JsonLines
from fxtrain.trackers.run import Run
from fxtrain.trackers.run_folder import Identity, claim, folder_of, lock_folder, write_identity
from fxtrain.trackers.table import find, targets
from fxtrain.trackers.tracker import Entry, Start, Target, Tracker
from fxtrain.trackers.writer import Patience, Warn, Writer, start_writer

_LOG = logging.getLogger("fxtrain.trackers")
_DEEPEST = 20
_LONGEST = 1000  # characters of one value


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
    return _track(
        ctx,
        lambda: _checked(path, to, plan, settings, name, resume, position, ranks),
        patience,
        None,
    )


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
        gather_or_raise(None, problem, ctx)
    except BaseException:
        if lock is not None:
            lock.release()
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
    return _track(
        ctx,
        lambda: _checked(path, to, plan, settings, None, resume, position, "main"),
        Patience(),
        lock,
    )


@attrs.frozen(kw_only=True, eq=False)
class _Request:
    """The arguments of `track`."""

    folder: Path
    rows: Mapping[str, tuple[Tracker, Any]]  # by their keys in `identities`
    plan: Plan | None
    settings: Mapping[str, Any]
    name: str
    resume: Mapping[str, Any] | Literal["folder"] | None
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
) -> _Request:
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
    return _Request(
        folder=folder,
        rows=_rows(to),
        plan=plan,
        settings=settings or {},
        name=name or folder.resolve().name or "run",
        resume=resume,
        position=position or Position(),
        everyone=ranks == "all",
    )


def _rows(to: Iterable[Any]) -> dict[str, tuple[Tracker, Any]]:
    rows: dict[str, tuple[Tracker, Any]] = {}
    for target in targets(to):
        tracker, config = (target, None) if isinstance(target, Tracker) else (find(target), target)
        kind = key = str(getattr(config, "kind", tracker.name))
        count = 1
        while key in rows:
            count += 1
            key = f"{kind}-{count}"
        rows[key] = (tracker, config)
    return rows


def _track(
    ctx: DistContext, check: Callable[[], _Request], patience: Patience, lock: Lock | None
) -> Run:
    """Open a run; what a step of it finds wrong on one rank is raised on all."""
    writers: dict[str, Writer] = {}
    request, identity, problem = None, None, None
    try:
        try:
            request = check()
            lock = lock or lock_folder(request.folder, ctx)
            identity = _claimed(request, ctx)
        except FxError as error:
            problem = error
        identity = gather_or_raise(identity, problem, ctx)[0]
        assert request is not None  # otherwise there was a problem
        if not ctx.comm.simulated and (ctx.is_main or request.everyone):
            problem = _open(writers, request, identity, ctx, patience)
        run = _run(request, identity, ctx, writers, problem, patience, lock)
    except BaseException:
        for writer in writers.values():
            writer.end(failed=True)
            writer.wait(time.monotonic() + patience.close_s, failed=True)
        if lock is not None:
            lock.release()
        raise
    # Registered after the libraries' own functions, so that it runs before them.
    atexit.register(run.close)
    return run


def _claimed(request: _Request, ctx: DistContext) -> Identity | None:
    """Which run this is, decided by rank 0; a dry run has none."""
    if ctx.comm.simulated:
        return Identity(id="0" * 32)
    return claim(request.folder, request.resume) if ctx.is_main else None


def _open(
    writers: dict[str, Writer],
    request: _Request,
    identity: Identity,
    ctx: DistContext,
    patience: Patience,
) -> FxError | None:
    """Open every tracker that can be opened; returns why the run is refused, if it is."""
    warn = Warn()
    try:
        with ops.fork_rng(ctx):
            for key, (tracker, config) in request.rows.items():
                start = _start(request, identity, ctx, key)
                try:
                    native = tracker.open(config, start)
                    called = str(tracker.identity(native))
                except FxError:
                    raise
                except Exception as error:  # any error of the library: training continues
                    warn(
                        f"open {key}",
                        f"{tracker.name} could not be opened: {type(error).__name__}: {error}. "
                        f"Training continues without it, and the other trackers are not affected.",
                    )
                    continue
                writers[key] = start_writer(tracker, native, called, start, patience)
                if "params" in tracker.kinds:
                    writers[key].put(Logged("params", functools.partial(_params, start), warn))
    except FxError as error:
        return error
    except Exception as error:  # any error: the other ranks must receive it
        return PlanError(f"track: {type(error).__name__}: {error}")
    return None


def _params(start: Start) -> Entry:
    at = start.position
    return Entry(
        kind="params", value=start.params, step=at.updates, rows=at.samples, time=start.time
    )


def _start(request: _Request, identity: Identity, ctx: DistContext, key: str) -> Start:
    rank, run, plan = ctx.rank, identity.id, request.plan
    context = {
        "world_size": ctx.world_size,
        "num_nodes": ctx.num_nodes,
        "local_world_size": ctx.local_world_size,
        "device": ctx.device.type,
        "launcher": ctx.launcher,
        "mesh": ctx.mesh.sizes,
        "fxtrain": __version__,
        "torch": str(torch.__version__),
        "rank": rank,
    }
    tables: dict[str, Any] = {"context": context}
    if plan is not None:
        tables = {"plan": {**unstructure(plan), "fingerprint": fingerprint(plan)}, **tables}
    digest = hashlib.blake2b(f"{run}/{rank}".encode(), digest_size=16).hexdigest()
    return Start(
        id=digest if rank else run,
        run=run,
        name=f"{request.name}-rank{rank}" if rank else request.name,
        folder=request.folder,
        rank=rank,
        everyone=request.everyone,
        identity=identity.of_rank(rank).get(key, ""),
        position=request.position,
        params={**flat(request.settings), **flat(tables)},
        ctx=ctx,
        plan=request.plan,
        settings=request.settings,
        time=time.time(),
    )


def _run(
    request: _Request,
    identity: Identity,
    ctx: DistContext,
    writers: Mapping[str, Writer],
    problem: FxError | None,
    patience: Patience,
    lock: Lock | None,
) -> Run:
    """Create the handle once all ranks know their trackers' ids of the run."""
    called = {key: writer.identity for key, writer in writers.items()}
    kinds = [
        tracker.name if config is None else type(config).__name__
        for tracker, config in request.rows.values()
    ]
    of_ranks = gather_or_raise(({**identity.of_rank(ctx.rank), **called}, kinds), problem, ctx)
    kinds = of_ranks[0][1]  # "all" may be fewer on another machine
    identities = [ids for ids, _ in of_ranks[: None if request.everyone else 1]]
    if ctx.is_main and not ctx.comm.simulated:
        try:
            write_identity(request.folder, Identity(id=identity.id, identities=tuple(identities)))
        except OSError as error:
            _LOG.warning(
                "%s: cannot record which run this folder belongs to: %s. Training "
                "continues; free disk space before the run is resumed.",
                request.folder,
                error,
            )
    return Run(
        id=identity.id,
        path=str(request.folder),
        state={"identities": identities, "kinds": kinds},
        writers=tuple(writers.values()),
        patience=patience,
        calls=request.position.updates,
        lock=lock,
    )


def flat(values: Any, path: str = "") -> dict[str, Any]:
    """Nested settings as one table: names joined by dots, values None, bool, int, float or text.

    Lists and all other values become text, truncated to 1000 characters.

    Example:
        >>> flat({"model": {"width": 64, "blocks": (1, 2)}, "note": None})
        {'model.width': 64, 'model.blocks': '[1, 2]', 'note': None}
    """
    return dict(_flat(values, path, 0))


def _flat(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if attrs.has(type(value)) and not isinstance(value, type):
        value = unstructure(value)
    if isinstance(value, Mapping) and (value or not path) and depth < _DEEPEST:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key), depth + 1)
    else:
        yield path, _plain(value)


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, tuple | list):
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            value = json.dumps(value, default=str)
    return str(value)[:_LONGEST]
