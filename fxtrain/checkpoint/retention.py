"""Decide which checkpoints of a folder are kept after a save."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import attrs

from fxtrain.checkpoint.folders import CheckpointInfo
from fxtrain.checkpoint.owner import Owner, is_running
from fxtrain.errors import CheckpointError

# Commits by other processes after which a process on another machine is considered ended.
_SILENT_CHECKPOINTS = 3


@attrs.frozen(kw_only=True)
class RetentionRule:
    """Which checkpoints of a folder are kept; the newest always is.

    Attributes:
        last: How many of the newest; None keeps all, or one if another rule is given.
        every: Also those whose number of updates is a multiple of this.
        best: Also this many with the best metric.
        mode: Whether the best metric is the smallest or the largest.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    mode: Literal["min", "max"] = "min"


def retention_rule(last: Any, every: Any, best: Any, mode: Any, metric: Any) -> RetentionRule:
    """The retention rule for the arguments of `save`.

    Raises:
        CheckpointError: an argument is invalid.
    """
    for name, value in (("keep_last", last), ("keep_every", every), ("keep_best", best)):
        if value is not None and (type(value) is not int or value < 1):
            raise CheckpointError(f"save({name}={value!r}): pass a positive integer.")
    if mode not in ("min", "max"):
        raise CheckpointError(f"save(best={mode!r}): choose 'min' or 'max'.")
    if metric is not None and (type(metric) not in (int, float) or not math.isfinite(metric)):
        raise CheckpointError(
            f"save(metric={metric!r}): pass a finite number, such as loss.item(), that is the "
            f"same on every rank."
        )
    if best is not None and metric is None:
        raise CheckpointError("save(keep_best=...) needs a number to compare: pass metric=.")
    return RetentionRule(last=last, every=every, best=best, mode=mode)


def to_prune(checkpoints: Sequence[CheckpointInfo], keep: RetentionRule, saver: Owner) -> list[str]:
    """Names of the checkpoints to remove, oldest first; never the newest.

    Args:
        checkpoints: All checkpoints of the folder; the last was just committed.
        keep: The rule.
        saver: The process that saves. Checkpoints of other running processes are ignored.
    """
    others = _running(checkpoints, saver)
    # A damaged manifest does not name its saver, which may be one of the others.
    pool = [
        info
        for info in checkpoints
        if info.saver not in others and not (others and info.order is None)
    ]
    complete = [info for info in pool if not info.problems]
    newest = {info.updates: info for info in complete}
    current = [info for info in complete if newest[info.updates] is info]
    superseded = {info.name for info in complete} - {info.name for info in current}
    if keep == RetentionRule(mode=keep.mode):
        gone = superseded
    else:
        kept = {info.name for info in current[-(keep.last or 1) :]}
        if keep.every is not None:
            kept |= {info.name for info in current if info.updates % keep.every == 0}
        if keep.best is not None:
            kept |= _best(current, keep)
        gone = {info.name for info in pool} - kept
    return [info.name for info in checkpoints[:-1] if info.name in gone]


def _best(checkpoints: Sequence[CheckpointInfo], keep: RetentionRule) -> set[str]:
    # Of equals, the newer.
    ranked = sorted(
        ((info.metric, info.name) for info in reversed(checkpoints) if info.metric is not None),
        key=lambda pair: pair[0] if keep.mode == "min" else -pair[0],
    )
    return {name for _, name in ranked[: keep.best]}


def _running(checkpoints: Sequence[CheckpointInfo], saver: Owner) -> set[Owner]:
    """Other processes that have saved into the folder and may save again."""
    last: dict[Owner, int] = {}
    for info in checkpoints:
        if info.saver is not None and info.saver != saver:
            last[info.saver] = max(info.order or 0, last.get(info.saver, 0))
    running: set[Owner] = set()
    for owner, order in last.items():
        runs = is_running(owner)
        if runs is None:  # on another machine
            runs = (checkpoints[-1].order or 0) - order < _SILENT_CHECKPOINTS
        if runs:
            running.add(owner)
    return running
