"""List the checkpoints in a folder, name new ones, and find the newest."""

import logging
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import attrs

from fxtrain._reading import StrPath
from fxtrain.checkpoint.manifest import (
    HIGHEST,
    MANIFEST,
    Manifest,
    NewerFormatError,
    load_manifest,
)
from fxtrain.checkpoint.owner import Owner
from fxtrain.checkpoint.reading import file_problems
from fxtrain.checkpoint.storage import Storage, UnreadableError, open_storage
from fxtrain.errors import CheckpointError

_NAME = re.compile(r"update-(\d{10,18})(?:\.(\d{1,9}))?")
_LARGEST = 1 << 30
# What folders of Accelerate, DeepSpeed and torch's DCP contain.
_FOREIGN = {".metadata", "zero_to_fp32.py", "optimizer.bin"}
_FOREIGN_STARTS = ("pytorch_model_fsdp_", "random_states_", "mp_rank_", "zero_pp_rank_")
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
    saver: Owner | None = None
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
    folder, sign = open_storage(path), 1 if mode == "min" else -1
    rated = [info for info in reversed(list_checkpoints(folder)) if info.metric is not None]
    return _first_complete(folder, sorted(rated, key=lambda info: sign * (info.metric or 0)))


def before(path: StrPath, update: int) -> str | None:
    """The complete checkpoint with the most optimizer updates below `update`; None if none exists.

    Of several with the same number of updates, the newest.
    """
    folder = open_storage(path)
    earlier = [info for info in list_checkpoints(folder) if info.updates < update]
    # Sorting is stable: the newest of equals stays last.
    return _first_complete(folder, reversed(sorted(earlier, key=lambda info: info.updates)))


def checkpoint_at(path: Any) -> Storage:
    """The checkpoint at a path, or the latest one if the path is the folder of a run.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    storage = open_storage(path)
    try:
        newest = str(storage) if MANIFEST in storage.files() else latest(path)
    except NotADirectoryError as error:
        raise CheckpointError(
            f"{path} is a file, and a checkpoint is a folder that fx.save wrote. Model files are "
            f"read by fx.load_model, checkpoints of other libraries by fxtrain import.",
            code="FX601",
        ) from error
    except OSError as error:
        raise CheckpointError(f"No checkpoint at {path}: {error}", code="FX601") from error
    if newest is None:
        raise CheckpointError(f"No complete checkpoint in {storage}.{_hint(storage)}", code="FX601")
    return open_storage(newest)


def _hint(folder: Storage) -> str:
    """What to do with files of another library in a folder."""
    names = (*folder.files(), *folder.folders())
    if any(name in _FOREIGN or name.startswith(_FOREIGN_STARTS) for name in names):
        return (
            " It contains a checkpoint of Accelerate, DeepSpeed or torch: convert it with "
            "fxtrain import SOURCE FOLDER, or load its weights with fx.load_model."
        )
    return ""


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
    checkpoints = [_inspect(folder, name) for name in checkpoint_names(folder)]
    return sorted(checkpoints, key=lambda info: math.inf if info.order is None else info.order)


def _inspect(folder: Storage, name: str) -> CheckpointInfo:
    inside = folder.join(name)
    try:
        manifest = read_manifest(inside)
        problems = tuple(file_problems(inside.files(), manifest))
    except (UnreadableError, NewerFormatError):
        raise
    except (CheckpointError, OSError) as error:
        return CheckpointInfo(name=name, order=None, problems=(str(error),))
    return CheckpointInfo(
        name=name,
        order=manifest.order,
        saver=manifest.saver,
        metric=manifest.metric,
        problems=problems,
    )


def next_order(checkpoints: Sequence[CheckpointInfo]) -> int:
    """The order of a checkpoint that is newer than all of these."""
    # A manifest from elsewhere may already have the highest order that is readable.
    return min(1 + max((info.order or 0 for info in checkpoints), default=0), HIGHEST)


def checkpoint_names(folder: Storage) -> list[str]:
    """Names of the checkpoints in a folder, sorted by their updates."""
    return sorted((name for name in folder.folders() if _NAME.fullmatch(name)), key=_numbers)


def new_name(folder: Storage, updates: int) -> str:
    """An unused name: a second checkpoint of the same update gets a number."""
    name = f"update-{updates:010d}"
    numbers = map(_numbers, checkpoint_names(folder))
    used = [number for earlier, number in numbers if earlier == updates]
    return f"{name}.{max(used) + 1}" if used else name


def read_manifest(storage: Storage) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
        UnreadableError: it exists, but reading fails.
        NewerFormatError: a newer fxtrain wrote it.
    """
    try:
        raw = storage.read(MANIFEST, _LARGEST)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{storage} is not a checkpoint: it has no {MANIFEST}. Pass a folder that fx.save "
            f"writes to, or one of its update-… folders.",
            code="FX601",
        ) from error
    except OSError as error:
        raise CheckpointError(f"{storage}/{MANIFEST} cannot be read: {error}.") from error
    try:
        return load_manifest(raw)
    except NewerFormatError as error:
        raise NewerFormatError(f"{storage}: {error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{storage}: {error}") from error.__cause__


def _numbers(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)
