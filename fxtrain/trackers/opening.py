"""Opens a run: the same decision on every rank, and trackers on the ranks that track."""

import atexit
import contextlib
import hashlib
import json
import logging
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import attrs
import torch

from fxtrain import ops
from fxtrain._optional import installed_entries
from fxtrain._reading import StrPath
from fxtrain._record import record, shown
from fxtrain._version import __version__
from fxtrain.checkpoint.folder_lock import Lock, acquire
from fxtrain.checkpoint.storage import open_storage
from fxtrain.errors import FxError, PlanError
from fxtrain.ops.same_errors import fail_together
from fxtrain.ops.standing import RunFolder
from fxtrain.state import (
    DistContext,
    Plan,
    Position,
    dumps,
    fingerprint,
    read_record,
    structure,
    unstructure,
)
from fxtrain.state.context import check_connected
from fxtrain.state.registry import kind_of
from fxtrain.trackers.json_lines import JSON_LINES, JsonLines, folder_of, replace_file
from fxtrain.trackers.libraries.aim import AIM
from fxtrain.trackers.libraries.clearml import CLEARML
from fxtrain.trackers.libraries.comet import COMET
from fxtrain.trackers.libraries.dvclive import DVCLIVE
from fxtrain.trackers.libraries.mlflow import MLFLOW
from fxtrain.trackers.libraries.swanlab import SWANLAB
from fxtrain.trackers.libraries.tensorboard import TENSORBOARD
from fxtrain.trackers.libraries.trackio import TRACKIO
from fxtrain.trackers.libraries.wandb import WANDB
from fxtrain.trackers.run import Run
from fxtrain.trackers.terminal import TERMINAL
from fxtrain.trackers.tracker import Entry, Start, Target, Tracker
from fxtrain.trackers.writer import OpenedTracker, Writer

_LOG = logging.getLogger("fxtrain.trackers")
_LONGEST = 1000  # characters of one value
FILE = "run.json"
_ID = re.compile("[0-9a-f]{32}")
_HOW = "resume=run.state() from the checkpoint, and position=restored.position"
TRACKERS = (
    JSON_LINES, TERMINAL, TENSORBOARD, WANDB, TRACKIO, COMET, AIM, MLFLOW, CLEARML, DVCLIVE, SWANLAB
)  # fmt: skip
_OWN: dict[type, Tracker] = {entry.config: entry for entry in TRACKERS if entry.config is not None}


def _is_id(_: Any, __: Any, value: str) -> None:
    if not _ID.fullmatch(value):
        raise ValueError("pass the value of run.state().")


@record
class Identity:
    """The identity of a run, and for each rank that tracks, its trackers' own ids of it by kind."""

    id: str = attrs.field(validator=_is_id)
    identities: tuple[Mapping[str, str], ...] = ()
    format: Literal[1] = 1


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
    patience_s: float = 120.0,
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
        ranks: Which ranks track: rank 0, or all, each with its own run in one group. Rank 3 then
            writes into the folder `rank3` in `path`.
        patience_s: Seconds that a call of the run waits, at most, for a tracker that does not
            respond. It is then dropped: the run continues with the others.

    Returns:
        A handle on every rank; use it in a `with` block, or close it.

    Effects:
        Locks the folder until the run is closed, writes into it, and starts a thread, on ranks
        that track. Two exchanges of packets; none at one rank. Random generators
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
    return open_run(
        path,
        ctx,
        to,
        plan=plan,
        settings=settings,
        name=name,
        resume=resume,
        position=position,
        ranks=ranks,
        patience_s=patience_s,
    )


def lock_folder(folder: Path, ctx: DistContext) -> Lock | None:
    """Create and lock the folder of a run, on rank 0; None on other ranks and in a dry run."""
    if ctx.comm.simulated or not ctx.is_main:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = acquire(open_storage(folder), ".lock-run")
    except FxError as error:
        raise PlanError(f"track({str(folder)!r}): {error}") from error
    except OSError as error:
        raise PlanError(f"track: {error}. Choose another folder for the run.") from error
    ctx.comm.slot(RunFolder).path = str(folder.absolute())
    return lock


def claim(folder: Path, resume: Mapping[str, Any] | Literal["folder"] | None) -> Identity:
    """Decide which run this is; a PlanError if the folder belongs to another one."""
    requested = None if resume is None or resume == "folder" else structure(resume, Identity)
    if not (folder / FILE).exists():
        return requested or Identity(id=secrets.token_hex(16))
    known = read_record(folder / FILE, Identity)
    if resume is None:
        raise PlanError(
            f"track({str(folder)!r}): a new run was requested, but this folder belongs to the run "
            f"{known.id}. Choose another folder; or continue that run with {_HOW}; or restart it "
            f"with resume='folder' and position=fx.Position()."
        )
    if requested is not None and requested.id != known.id:
        raise PlanError(
            f"track({str(folder)!r}): resume is the run {requested.id}, but this folder belongs to "
            f"the run {known.id}. Choose the folder of that run, or an empty one."
        )
    return known  # which also has the ids of trackers that were added after the checkpoint


def own(path: Any, ctx: DistContext) -> Lock | None:
    """Lock the folder of a run before it is read; a problem is raised on every rank."""
    with contextlib.ExitStack() as undo:
        lock = None
        with fail_together(ctx):
            lock = lock_folder(folder_of(path), ctx)
            undo.callback(lock.release if lock else lambda: None)
        undo.pop_all()
        return lock


def open_run(
    path: Any,
    ctx: DistContext,
    to: Any,
    *,
    lock: Lock | None = None,
    resume: Any = None,
    ranks: Literal["main", "all"] = "main",
    patience_s: float = 120.0,
    **request: Any,
) -> Run:
    """`track`, with the lock that `own` returned; closing the run releases it."""
    trackers: list[tuple[Tracker, Any]] = []
    start = None
    with contextlib.ExitStack() as undo:
        with fail_together(ctx) as together:
            undo.callback(lambda: None if lock is None else lock.release())
            try:
                start = _start(path, ctx, resume=resume, ranks=ranks, **request)
                trackers = [*targets(to)]
                if not ctx.comm.simulated:
                    lock = lock or lock_folder(start.folder, ctx)
                    together.value = claim(start.folder, resume) if ctx.is_main else None
            except FxError:
                raise
            except Exception as error:  # of a value of the caller
                raise PlanError(f"track: {type(error).__name__}: {error}") from error
        identity = together.values[0] or Identity(id="0" * 32)
        assert start is not None  # otherwise there was a problem
        start = attrs.evolve(start, id=identity.id)
        writer, known = None, dict(enumerate(identity.identities))
        with fail_together(ctx) as together:
            if trackers and not ctx.comm.simulated and (ctx.is_main or ranks == "all"):
                writer = Writer(patience_s)
                undo.callback(writer.close, failed=True)
                local_start = start if ranks == "main" else _of_rank(start, ctx.rank, identity.id)
                ids = _open_all(writer, trackers, local_start, known.get(ctx.rank, {}), ctx)
                together.value = ids or None
        of_ranks = [ids or {} for ids in together.values]
        is_new, opened = not known, of_ranks if ranks == "all" else of_ranks[:1]
        # Those of ranks that this start does not have are for a later one.
        identity = attrs.evolve(identity, identities=(*opened, *identity.identities[len(opened) :]))
        if ctx.is_main and not ctx.comm.simulated:
            try:
                replace_file(start.folder / FILE, [dumps(identity).encode()])
            except OSError as error:
                _LOG.warning("%s. Training continues; it is needed to resume the run.", error)
        run = Run(
            state=unstructure(identity),
            path=str(start.folder),
            writer=writer,
            calls=start.position.updates,
            lock=lock,
            is_new=is_new,
        )
        undo.pop_all()
    # Registered after the libraries' own functions, so that it runs before them.
    atexit.register(run.close)
    return run


def _start(
    path: Any,
    ctx: DistContext,
    *,
    resume: Any,
    plan: Plan | None = None,
    settings: Any = None,
    name: str | None = None,
    position: Any = None,
    ranks: Any,
) -> Start:
    """What the trackers of a run have in common, from checked arguments."""
    folder = folder_of(path)
    if ranks not in ("main", "all"):
        raise PlanError(f"track(ranks={shown(ranks)}): choose 'main' or 'all'.")
    if not isinstance(position, Position | None) or (resume is not None and position is None):
        raise PlanError(
            f"track(position={shown(position)}): pass the position where the run resumes, such as "
            f"restored.position; fx.Position() is the start."
        )
    return Start(
        id="",
        name=name or folder.resolve().name or "run",
        folder=folder,
        position=position or Position(),
        params={**flat(settings or {}), **flat(_tables(ctx, plan))},
    )


def _tables(ctx: DistContext, plan: Plan | None) -> dict[str, Any]:
    """The hyperparameters of every run."""
    context = {
        "world_size": ctx.world_size,
        "num_nodes": ctx.num_nodes,
        "local_world_size": ctx.local_world_size,
        "device": ctx.device.type,
        "launcher": ctx.launcher,
        "mesh": ctx.mesh.sizes,
        "fxtrain": __version__,
        "torch": str(torch.__version__),
        "rank": ctx.rank,
    }
    if plan is None:
        return {"context": context}
    return {"plan": {**unstructure(plan), "fingerprint": fingerprint(plan)}, "context": context}


def _of_rank(start: Start, rank: int, run: str) -> Start:
    """The run of one of the ranks that all track."""
    if not rank:
        return attrs.evolve(start, group=run)
    return attrs.evolve(
        start,
        id=hashlib.blake2b(f"{run}/{rank}".encode(), digest_size=16).hexdigest(),
        name=f"{start.name}-rank{rank}",
        folder=start.folder / f"rank{rank}",
        rank=rank,
        group=run,
    )


def _open_all(
    writer: Writer,
    trackers: Sequence[tuple[Tracker, Any]],
    start: Start,
    known: Mapping[str, str],
    ctx: DistContext,
) -> dict[str, str]:
    """Open every tracker that can be opened.

    Returns the libraries' ids of the run by kind, as `known` from when it was opened before. A
    tracker that refuses the run, such as for a missing package, raises.
    """
    ids = {**known}
    params = Entry(
        kind="params",
        value=start.params,
        step=start.position.updates,
        rows=start.position.samples,
        time=time.time(),
    )
    counts: Counter[str] = Counter()
    for tracker, config in trackers:
        kind = str(getattr(config, "kind", tracker.name))
        counts[kind] += 1
        key = kind if counts[kind] == 1 else f"{kind}-{counts[kind]}"
        local_start = attrs.evolve(start, identity=ids.get(key, ""))
        try:
            start.folder.mkdir(parents=True, exist_ok=True)
            with ops.fork_rng(ctx):
                native = tracker.open(config, local_start)
                ids[key] = str(tracker.identity(native))
        except FxError:
            raise
        except Exception as error:  # any error of the library: training continues
            writer.warn(
                f"open {key}",
                f"{tracker.name} could not be opened: {type(error).__name__}: {error}. Training "
                f"continues without it, and the other trackers are not affected.",
            )
            continue
        writer.add(OpenedTracker(tracker=tracker, native=native, start=local_start), params)
    return ids


def flat(values: Any, path: str = "") -> dict[str, Any]:
    """Nested settings as one table: names joined by dots, values None, bool, int, float or text.

    Lists and all other values become text, truncated to 1000 characters.

    Example:
        >>> flat({"model": {"width": 64, "blocks": (1, 2)}, "note": None})
        {'model.width': 64, 'model.blocks': '[1, 2]', 'note': None}
    """
    if attrs.has(type(values)):
        values = unstructure(values)
    if not isinstance(values, Mapping) or (path and not values):
        return {path: _plain(values)}
    table: dict[str, Any] = {}
    for key, value in values.items():
        table |= flat(value, f"{path}.{key}" if path else str(key))
    return table


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, tuple | list):
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            value = json.dumps(value, default=str)
    return str(value)[:_LONGEST]


def trackers() -> dict[type, Tracker]:
    """Every tracker by its config type: fxtrain's own, then those of installed packages.

    A package adds one with an entry point in the group `fxtrain.trackers` that loads a
    `fxtrain.trackers.Tracker`.

    Raises:
        PlanError: an entry point loads something else, two trackers share a config type, or one
            has none.
    """
    group = "fxtrain.trackers"
    of_config = attrgetter("config")
    added = installed_entries(taken=_OWN, group=group, kind=Tracker, key=of_config, error=PlanError)
    for entry in (entry for entry in added.values() if entry.config is None):
        raise PlanError(
            f"The tracker {entry.name} of an installed package has no config, by which "
            f"fx.track finds it. Set Tracker(config=...) in its package."
        )
    return _OWN | added


def targets(to: Any) -> Iterator[tuple[Tracker, Any]]:
    """Trackers with their configs, from what `fx.track` takes."""
    for target in (to,) if isinstance(to, str) or not isinstance(to, Iterable) else to:
        if target == "all":
            yield from (
                (entry, entry.config()) for entry in TRACKERS if entry.config and _is_there(entry)
            )
        elif isinstance(target, Tracker):
            yield target, None
        else:
            yield _found(target)


def _is_there(entry: Tracker) -> bool:
    spec = find_spec(entry.package) if entry.package else None
    # A folder without modules, such as the one that wandb writes, has no origin.
    return not entry.package or (spec is not None and spec.origin is not None)


def _found(target: Any) -> tuple[Tracker, Any]:
    table = _OWN if type(target) in _OWN else trackers()  # packages are asked only if needed
    kinds = {str(kind_of(config)): config for config in table}
    config = kinds[target]() if isinstance(target, str) and target in kinds else target
    if type(config) in table:
        return table[type(config)], config
    word = target if isinstance(target, str) else getattr(target, "__name__", "")
    near = get_close_matches(word.lower(), kinds, n=1)
    raise PlanError(
        f"track: no tracker is registered for {shown(target)}. Choose configs such as "
        f'fx.TensorBoard(), kinds such as "tensorboard", "all", or a fxtrain.trackers.Tracker; the '
        f"kinds are {', '.join(sorted(kinds))}."
        + "".join(f" Did you mean fx.{kinds[kind].__name__}(...)?" for kind in near)
    )
