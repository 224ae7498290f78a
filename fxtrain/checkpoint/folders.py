"""The checkpoints in a folder: names, order, and which are kept after a save."""

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs

from fxtrain._reading import StrPath
from fxtrain.checkpoint.folder_lock import Process, is_running
from fxtrain.checkpoint.manifest import Manifest, NewerFormatError, load_manifest
from fxtrain.checkpoint.reading import file_problems
from fxtrain.checkpoint.storage import MANIFEST, Storage, UnreadableError, open_storage
from fxtrain.errors import CheckpointError

_NAME = re.compile(r"update-(\d{10,18})(?:\.(\d{1,9}))?")
LARGEST = 1 << 30  # bytes of a manifest
_LOG = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class CheckpointInfo:
    """A checkpoint in a folder, described by its manifest and the sizes of its files.

    Attributes:
        name: Name of its folder.
        order: Commit order: the newest has the highest number. None if its manifest is
            damaged.
        saver: The process that committed it, if known.
        metric: The number that `keep_best` compares.
        problems: Why it is incomplete; empty if it is complete.
    """

    name: str
    order: int | None
    saver: Process | None = None
    metric: float | None = None
    problems: tuple[str, ...] = ()

    @property
    def updates(self) -> int:
        """Optimizer updates so far."""
        return _numbers(self.name)[0]


def latest(path: StrPath) -> str | None:
    """The newest complete checkpoint in a folder: the one committed last.

    If a run resumed from an earlier update, this is the newest checkpoint saved since, not the
    one with the most updates. The order does not depend on clocks: each checkpoint gets a
    higher number than all that were in the folder when it was committed.

    Incomplete checkpoints (invalid manifest, missing or truncated file) are skipped with a
    warning in the log, as long as there is a complete one. `verify` checks every byte.

    Args:
        path: A folder into which `save` writes, or an fsspec URL.

    Returns:
        The path of the checkpoint; None if the folder has none.

    Raises:
        CheckpointError: the folder has checkpoints and none is complete, so that a run which
            continues would begin again; or one cannot be read (permission, too many open
            files, a failing disk) or was written by a newer fxtrain: it may be the newest.

    Example:
        >>> import fxtrain as fx, tempfile
        >>> fx.latest(tempfile.mkdtemp()) is None
        True
    """
    folder = open_storage(path)
    checkpoints = list_checkpoints(folder)
    newest = _first_complete(folder, reversed(checkpoints))
    if newest is None and checkpoints:
        lines = [f"  {info.name}: {'; '.join(info.problems)}" for info in checkpoints]
        raise CheckpointError(
            "\n".join(
                [
                    f"No checkpoint in {folder} is complete:",
                    *lines,
                    "Copy the missing files from where they were written, or remove these "
                    "checkpoints to start the run from its beginning.",
                ]
            ),
            code="FX602",
        )
    return newest


def best(path: StrPath, mode: Literal["min", "max"] = "min") -> str | None:
    """The complete checkpoint with the best metric in a folder; of equal ones, the newest.

    The metric is that of `save(metric=...)`, which `keep_best` compares.

    Args:
        path: A folder into which `save` writes, or an fsspec URL.
        mode: Whether the smallest or the largest metric is the best.

    Returns:
        The path of the checkpoint; None if none has a metric.

    Raises:
        CheckpointError: `mode` is another word, or a checkpoint cannot be read, as in `latest`.

    Example:
        >>> import fxtrain as fx, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(1, 1), ctx)
        ...     for updates, loss in enumerate([3.0, 1.0, 2.0]):
        ...         position = fx.Position(updates=updates)
        ...         _ = fx.save(folder, ctx, model, position=position, metric=loss)
        >>> fx.checkpoint.best(folder).split("/")[-1]
        'update-0000000001'
    """
    if mode not in ("min", "max"):
        raise CheckpointError(f"best(mode={mode!r}): choose 'min' or 'max'.")
    folder = open_storage(path)
    return _first_complete(folder, _rated(list_checkpoints(folder), mode))


def _rated(checkpoints: Sequence[CheckpointInfo], mode: str) -> list[CheckpointInfo]:
    """Those with a metric, best first; of equals, the newer first, as sorting is stable."""
    sign = 1 if mode == "min" else -1
    rated = [info for info in reversed(checkpoints) if info.metric is not None]
    return sorted(rated, key=lambda info: sign * (info.metric or 0))


def before(path: StrPath, update: int) -> str | None:
    """The complete checkpoint with the most optimizer updates below `update`; None if none exists.

    Of several with the same number of updates, the newest.
    """
    folder = open_storage(path)
    earlier = [info for info in list_checkpoints(folder) if info.updates < update]
    # Sorting is stable: the newest of equals stays last.
    return _first_complete(folder, reversed(sorted(earlier, key=lambda info: info.updates)))


def committed_before(path: StrPath, name: str) -> str | None:
    """The newest complete checkpoint that was committed before another one of the folder."""
    folder = open_storage(path)
    checkpoints = list_checkpoints(folder)
    names = [info.name for info in checkpoints]
    return _first_complete(folder, reversed(checkpoints[: names.index(name)]))


def find_checkpoint(path: Any) -> tuple[Storage, Manifest]:
    """The checkpoint at a path, or the latest one if the path is the folder of a run.

    Raises:
        CheckpointError: there is none, it is damaged, or it cannot be read.
    """
    storage = open_storage(path)
    try:
        if MANIFEST in storage.files():
            return storage, read_manifest(storage)
        newest = latest(path)
    except OSError as error:
        why = "no such folder" if isinstance(error, FileNotFoundError) else error.strerror
        raise CheckpointError(
            f"No checkpoint at {path}: {why}. Pass a folder into which fx.save or fx.fit wrote.",
            code="FX601",
        ) from error
    if newest is None:
        raise CheckpointError(
            f"No complete checkpoint in {storage}. fxtrain import converts checkpoints of other "
            f"libraries, and fx.load_model reads model files.",
            code="FX601",
        )
    storage = open_storage(newest)
    return storage, read_manifest(storage)


def _first_complete(folder: Storage, checkpoints: Iterable[CheckpointInfo]) -> str | None:
    for info in checkpoints:
        path = folder.join(info.name)
        if not info.problems:
            return str(path)
        _LOG.warning("%s is skipped: %s", path, "; ".join(info.problems))
    return None


def list_checkpoints(folder: Storage) -> list[CheckpointInfo]:
    """All checkpoints of a folder, newest last, then those with damaged manifests.

    Raises:
        CheckpointError: one cannot be read, or has a newer format.
    """
    checkpoints: list[CheckpointInfo] = []
    for name in checkpoint_names(folder):
        inside = folder.join(name)
        order, saver, metric = None, None, None
        try:
            manifest = read_manifest(inside, summary=True)
            order, saver, metric = manifest.order, manifest.saver, manifest.metric
            problems = file_problems(inside.files(), manifest)
        except (UnreadableError, NewerFormatError):
            raise
        except (CheckpointError, OSError) as error:
            if name not in folder.folders():  # a save has removed it, after it committed another
                return list_checkpoints(folder)
            problems = [str(error)]
        checkpoints.append(
            CheckpointInfo(
                name=name, order=order, saver=saver, metric=metric, problems=tuple(problems)
            )
        )
    return sorted(checkpoints, key=lambda info: math.inf if info.order is None else info.order)


def checkpoint_names(folder: Storage) -> list[str]:
    """Names of the checkpoints in a folder, sorted by their updates."""
    return sorted((name for name in folder.folders() if _NAME.fullmatch(name)), key=_numbers)


def new_name(folder: Storage, updates: int) -> str:
    """An unused name: a second checkpoint of the same update gets a number."""
    name = f"update-{updates:010d}"
    numbers = map(_numbers, checkpoint_names(folder))
    used = [number for earlier, number in numbers if earlier == updates]
    return f"{name}.{max(used) + 1}" if used else name


def read_manifest(storage: Storage, *, summary: bool = False) -> Manifest:
    """The manifest of a checkpoint.

    Args:
        summary: As for `load_manifest`.

    Raises:
        CheckpointError: there is none, or it is damaged.
        UnreadableError: it exists, but reading fails.
        NewerFormatError: a newer fxtrain wrote it.
    """
    try:
        return load_manifest(storage.read(MANIFEST, LARGEST), summary=summary)
    except OSError as error:
        raise CheckpointError(
            f"{storage} is not a checkpoint: {MANIFEST} cannot be opened ({error}). Pass a folder "
            f"that fx.save writes to, or one of its update-… folders.",
            code="FX601",
        ) from error
    except UnreadableError:
        raise
    except CheckpointError as error:
        raise type(error)(f"{storage}: {error}") from None


def _numbers(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def check_rule(rule: Mapping[str, Any], metric: Any) -> None:
    """Raise if an argument of `save` that says which checkpoints are kept is invalid."""
    for name, value in rule.items():
        if name == "best" and value not in ("min", "max"):
            raise CheckpointError(f"save(best={value!r}): choose 'min' or 'max'.")
        if name != "best" and value is not None and (type(value) is not int or value < 1):
            raise CheckpointError(f"save({name}={value!r}): pass a positive integer.")
    if metric is not None and (type(metric) not in (int, float) or not math.isfinite(metric)):
        raise CheckpointError(
            f"save(metric={metric!r}): pass a finite number, such as loss.item(), that is the "
            f"same on every rank."
        )
    if rule["keep_best"] is not None and metric is None:
        raise CheckpointError("save(keep_best=...) needs a number to compare: pass metric=.")


# Commits by other processes after which a process on another machine is considered ended.
_SILENT_CHECKPOINTS = 3


def to_prune(
    checkpoints: Sequence[CheckpointInfo],
    saver: Process,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: int | None = None,
    best: Literal["min", "max"] = "min",
) -> list[str]:
    """Names of the checkpoints that the rule of `save` removes, oldest first; never the newest.

    Args:
        checkpoints: All checkpoints of the folder; the last was just committed.
        saver: The process that saves. Checkpoints of other running processes are ignored.
    """
    orders = {i.saver: i.order or 0 for i in checkpoints if i.saver not in (None, saver)}
    newest_order = checkpoints[-1].order or 0
    others: set[Any] = set()
    for owner, order in orders.items():
        runs = owner is not None and is_running(*owner)
        if runs or (runs is None and newest_order - order < _SILENT_CHECKPOINTS):
            others.add(owner)
    # A damaged manifest does not name its saver, which may be one of the others.
    spared = {i.name for i in checkpoints if i.saver in others or (others and i.order is None)}
    pool = [info for info in checkpoints if info.name not in spared]
    complete = [info for info in pool if not info.problems]
    newest = {info.updates: info for info in complete}  # replaces earlier ones of the same update
    current = [info for info in complete if newest[info.updates] is info]
    if keep_last is keep_every is keep_best is None:
        kept = {info.name for info in pool if info.problems or info in current}
    else:
        kept = {info.name for info in current[-(keep_last or 1) :]}
        kept |= {info.name for info in current if keep_every and not info.updates % keep_every}
        kept |= {info.name for info in _rated(current, best)[: keep_best or 0]}
    return [info.name for info in checkpoints[:-1] if info.name not in kept | spared]
