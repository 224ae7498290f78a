"""What `fit` returns and shows: the iterator of its reports, and how far the run is.

Progress is a tracker, so that a background thread reads what is logged, and training waits for
nothing.
"""

import atexit
import contextlib
import functools
import gc
import inspect
import sys
import time
import weakref
from collections.abc import Generator, Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

import attrs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fxtrain._reading import StrPath
from fxtrain.ops.logs import log
from fxtrain.state import DistContext, Report
from fxtrain.trackers import Entry, Start, Tracker

_SHOWN = ("loss", "rows_per_s", "tokens_per_s", "memory_gib")
_UNITS = {"rows_per_s": "rows/s", "tokens_per_s": "tokens/s", "memory_gib": "GiB"}


class _ScriptEnded(BaseException):
    """The script ended, and its run is still open."""


class Reports(Iterator[Report]):
    """The reports of a run; closing it ends the run, and saves it.

    A `for` statement closes an iterator that nothing else refers to. One with a name is closed by
    its `with` block, or with its context. One that the end of the script finds open is not saved:
    groups are closing then, and no thread starts any more.
    """

    def __init__(self, ctx: DistContext, reports: Generator[Report], path: StrPath) -> None:
        self._ctx, self._reports, self._path = ctx, reports, path
        ctx.comm.state.open_runs.add(self)
        at_exit = functools.partial(_abandon, weakref.ref(self))
        atexit.register(at_exit)
        weakref.finalize(self, atexit.unregister, at_exit).atexit = False

    def __next__(self) -> Report:
        return next(self._reports)

    def __enter__(self) -> "Reports":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the run after its update, and save it; nothing if it has ended, or is in a step."""
        if inspect.getgeneratorstate(self._reports) != inspect.GEN_RUNNING:
            self._reports.close()

    def abandon(self) -> None:
        """End the run as it is, at the end of the script."""
        if inspect.getgeneratorstate(self._reports) == inspect.GEN_SUSPENDED:
            log(self._ctx).warning(
                "fit: the run in %s is still open at the end of the script, so what it trained "
                "since its last checkpoint is not saved. Use `with fx.fit(...) as reports:`.",
                self._path,
            )
            with contextlib.suppress(_ScriptEnded):
                self._reports.throw(_ScriptEnded())


def _abandon(reference: weakref.ref[Reports]) -> None:
    if (reports := reference()) is not None:
        reports.abandon()


def body_failed(closing: GeneratorExit, handled: BaseException | None) -> bool:
    """Whether the body of a loop ended with an error, not by `break`; called by its iterator.

    Python closes an iterator in both cases and does not say why. An error that unwinds the frame
    of the loop has a traceback that stands where the frame does.

    Args:
        closing: What the iterator received.
        handled: The error that was being handled where the loop began, if any.
    """
    if closing.__context__ not in (None, handled):  # closed by a `with` block, or at the end
        return True
    frame: Any = sys._getframe(2)
    return any(
        type(one) is TracebackType and one.tb_lasti == frame.f_lasti
        for one in gc.get_referrers(frame)
    )


@attrs.frozen(kw_only=True, eq=False)
class _Shown:
    """What is on the screen, and when it was written."""

    bar: Progress | None
    start: int
    began_s: float
    last_s: list[float]


def progress(
    total: int | None, *, every_s: float = 10.0, console: Console | None = None
) -> Tracker:
    """A tracker that shows updates, loss, speed, memory and the time left on standard error.

    Args:
        total: Updates of the whole run; None if unknown.
        every_s: Seconds between two lines where there is no terminal.
        console: Where to write; by default standard error.
    """
    screen = console or Console(stderr=True)

    def begin(_: None, start: Start) -> _Shown:
        done = start.position.updates
        now = time.monotonic()
        bar = _bar(screen, total, done) if screen.is_terminal else None
        return _Shown(bar=bar, start=done, began_s=now, last_s=[now])

    def write(shown: _Shown, entry: Entry) -> None:
        if entry.kind != "log":
            return  # a bar has no place for it
        if shown.bar is not None:
            bar, seen = shown.bar, _text(entry.value)
            bar.update(bar.task_ids[0], completed=entry.step, seen=seen)
        elif time.monotonic() - shown.last_s[0] >= every_s:
            shown.last_s[0] = time.monotonic()
            screen.print(_line(shown, entry, total), highlight=False, soft_wrap=True)

    return Tracker(
        name="progress",
        open=begin,
        write=write,
        close=lambda shown, failed: None if shown.bar is None else shown.bar.stop(),
    )


def _bar(screen: Console, total: int | None, done: int) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[seen]}"))
    bar = Progress(*columns, TimeRemainingColumn(), console=screen)
    bar.add_task("updates", total=total, completed=done, seen="")
    bar.start()
    return bar


def _line(shown: _Shown, entry: Entry, total: int | None) -> str:
    done = entry.step - shown.start
    parts = [f"update {entry.step}" + ("" if total is None else f" of {total}")]
    parts.append(_text(entry.value))
    if total is not None and done > 0:
        left_s = (time.monotonic() - shown.began_s) / done * (total - entry.step)
        parts.append(f"{timedelta(seconds=round(left_s))} left")
    return "  ".join(part for part in parts if part)


def _text(values: Mapping[str, float]) -> str:
    shown = [name for name in values if name in _SHOWN or name.startswith("eval")]
    return "  ".join(_one(name, values[name]) for name in shown)


def _one(name: str, value: float) -> str:
    return f"{value:.4g} {_UNITS[name]}" if name in _UNITS else f"{name} {value:.4g}"
