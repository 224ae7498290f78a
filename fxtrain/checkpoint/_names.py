"""Checkpoints in a folder: their names, their order, and which of them to keep."""

import logging
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import attrs

from fxtrain._errors import CheckpointError
from fxtrain.checkpoint._manifest import MANIFEST, Manifest, load_manifest
from fxtrain.checkpoint._place import Place, place_of
from fxtrain.checkpoint._read import file_problems

__all__ = ["Keep", "before", "checkpoint_at", "checkpoints", "latest", "new_name"]
__all__ += ["read_manifest", "to_prune"]

_NAME = re.compile(r"update-(\d{10,18})(?:\.(\d{1,9}))?")
_LARGEST = 1 << 30
_LOG = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Keep:
    """Which checkpoints of a folder stay; the newest always does.

    Attributes:
        last: How many of the newest; None keeps all, or one where another rule is given.
        every: Also those whose number of updates is a multiple of this.
        best: Also this many with the best metric.
        mode: Whether the best metric is the smallest or the largest.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    mode: Literal["min", "max"] = "min"


def latest(path: Any) -> str | None:
    """The newest whole checkpoint in a folder: that of the most optimizer updates.

    A checkpoint that is not whole is passed over, with a warning in the log: its manifest does
    not hold together, or a file is missing or cut. `verify` looks at every byte.

    Args:
        path: A folder into which `save` writes, or an fsspec URL.

    Returns:
        The path of the checkpoint; None if there is none.

    Example:
        >>> import fxtrain as fx, tempfile
        >>> fx.latest(tempfile.mkdtemp()) is None
        True
    """
    return _newest(place_of(path), math.inf)


def before(path: Any, update: int) -> str | None:
    """The newest whole checkpoint of fewer optimizer updates; None if there is none."""
    return _newest(place_of(path), update)


def checkpoint_at(path: Any) -> Place:
    """A checkpoint itself, or the latest where the path is the folder of a run.

    Raises:
        CheckpointError: there is none.
    """
    place = place_of(path)
    try:
        newest = str(place) if MANIFEST in place.files() else latest(path)
    except OSError as error:
        raise CheckpointError(f"There is no checkpoint at {path}: {error}") from error
    if newest is None:
        raise CheckpointError(f"There is no whole checkpoint in {place}.")
    return place_of(newest)


def _newest(folder: Place, limit: float) -> str | None:
    for name in reversed(checkpoints(folder)):
        if _order(name)[0] >= limit:
            continue
        inside = folder.join(name)
        try:
            problems = file_problems(inside.files(), read_manifest(inside))
        except (CheckpointError, OSError) as error:
            problems = [str(error)]
        if not problems:
            return str(inside)
        _LOG.warning("%s is passed over: %s", inside, "; ".join(problems))
    return None


def checkpoints(folder: Place) -> list[str]:
    """Names of the checkpoints in a folder, oldest first."""
    return sorted((name for name in folder.folders() if _NAME.fullmatch(name)), key=_order)


def new_name(folder: Place, updates: int) -> str:
    """A name that is not taken: a second checkpoint of one update gets a number."""
    name = f"update-{updates:010d}"
    taken = [_order(one)[1] for one in checkpoints(folder) if _order(one)[0] == updates]
    return f"{name}.{max(taken) + 1}" if taken else name


def read_manifest(place: Place) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it does not hold together.
    """
    try:
        raw = place.read(MANIFEST, _LARGEST)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{place} is no checkpoint: it has no {MANIFEST}. Pass a folder into which fx.save "
            f"writes, or one of its update-… folders."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{place}/{MANIFEST} cannot be read: {error}.") from error
    try:
        return load_manifest(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error}") from error.__cause__


def to_prune(folder: Place, keep: Keep) -> list[str]:
    """Names of the checkpoints that are no longer kept, oldest first."""
    names = checkpoints(folder)
    newest: dict[int, str] = {_order(name)[0]: name for name in names}
    superseded = [name for name in names if newest[_order(name)[0]] != name]
    if keep == Keep(mode=keep.mode):
        return superseded
    current = list(newest.values())
    kept = {*current[-(keep.last or 1) :]}
    if keep.every is not None:
        kept |= {name for name in current if _order(name)[0] % keep.every == 0}
    if keep.best is not None:
        kept |= set(_best(folder, current, keep))
    return [name for name in names if name in superseded or name not in kept]


def _best(folder: Place, names: Sequence[str], keep: Keep) -> list[str]:
    found = [(_metric(folder.join(name)), name) for name in names]
    # Among equals the newer one.
    ranked = sorted(
        ((metric, name) for metric, name in reversed(found) if metric is not None),
        key=lambda pair: pair[0] if keep.mode == "min" else -pair[0],
    )
    return [name for _, name in ranked[: keep.best]]


def _metric(place: Place) -> float | None:
    try:
        return read_manifest(place).metric
    except CheckpointError:
        return None  # a damaged checkpoint is not the best


def _order(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)
