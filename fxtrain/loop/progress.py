"""How far a run is: a bar in a terminal, a line now and then elsewhere.

It is a tracker, so that a background thread reads what is logged, and training waits for nothing.
"""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import attrs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fxtrain.trackers import At, Start, Tracker

_SHOWN = ("loss", "rows_per_s", "tokens_per_s", "memory_gib")
_UNITS = {"rows_per_s": "rows/s", "tokens_per_s": "tokens/s", "memory_gib": "GiB"}


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

    def log(shown: _Shown, values: Mapping[str, float], at: At) -> None:
        if shown.bar is not None:
            shown.bar.update(shown.bar.task_ids[0], completed=at.step, seen=_text(values))
        elif time.monotonic() - shown.last_s[0] >= every_s:
            shown.last_s[0] = time.monotonic()
            screen.print(_line(shown, values, at, total), highlight=False, soft_wrap=True)

    return Tracker(
        name="progress",
        open=begin,
        log=log,
        text=_nothing,
        image=_nothing,
        table=_nothing,
        artifact=_nothing,
        close=lambda shown, failed: None if shown.bar is None else shown.bar.stop(),
    )


def _bar(screen: Console, total: int | None, done: int) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[seen]}"))
    bar = Progress(*columns, TimeRemainingColumn(), console=screen)
    bar.add_task("updates", total=total, completed=done, seen="")
    bar.start()
    return bar


def _line(shown: _Shown, values: Mapping[str, float], at: At, total: int | None) -> str:
    done = at.step - shown.start
    parts = [f"update {at.step}" + ("" if total is None else f" of {total}"), _text(values)]
    if total is not None and done > 0:
        left_s = (time.monotonic() - shown.began_s) / done * (total - at.step)
        parts.append(f"{timedelta(seconds=round(left_s))} left")
    return "  ".join(part for part in parts if part)


def _text(values: Mapping[str, float]) -> str:
    shown = [name for name in values if name in _SHOWN or name.startswith("eval")]
    return "  ".join(_one(name, values[name]) for name in shown)


def _one(name: str, value: float) -> str:
    return f"{value:.4g} {_UNITS[name]}" if name in _UNITS else f"{name} {value:.4g}"


_nothing: Callable[..., None] = lambda *_: None  # noqa: E731 - what a bar has no place for
