"""The progress of a run, on standard error.

It is a tracker, so that a background thread reads what is logged, and training waits for nothing.
"""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fxtrain.trackers.tracker import Entry, Start, Tracker

_SHOWN = ("loss", "rows_per_s", "tokens_per_s", "memory_gib")
_UNITS = {"rows_per_s": "rows/s", "tokens_per_s": "tokens/s", "memory_gib": "GiB"}


def progress(
    total: int | None, *, every_s: float = 10.0, console: Console | None = None
) -> Tracker:
    """A tracker that shows updates, loss, speed, memory and the time left on standard error.

    In a notebook, that is one output of the cell. Where there is no terminal, it writes a line
    every `every_s`. `total` is of the whole run.
    """
    screen = console or Console(stderr=True)

    def begin(_: None, start: Start) -> tuple[Callable[[Entry], None], Callable[[], None]]:
        before, began_s = start.position.updates, time.monotonic()
        last_s, latest = began_s, dict[str, float]()

        def left(entry: Entry) -> str:
            """The time left if the rest of the run is as fast as it was since it was opened."""
            done = entry.step - before
            if total is None or done <= 0:
                return ""
            left_s = (time.monotonic() - began_s) / done * (total - entry.step)
            return f"{timedelta(seconds=round(left_s))} left"

        def update_bar(entry: Entry) -> None:
            latest.update(entry.value)  # so that an evaluation stays in view
            seen = f"{_text(latest)}  {left(entry)}"
            bar.update(bar.task_ids[0], completed=entry.step, seen=seen)

        def print_line(entry: Entry) -> None:
            nonlocal last_s
            latest.update(entry.value)
            now_s = time.monotonic()
            if now_s - last_s < every_s:
                return
            last_s = now_s
            updates = f"update {entry.step}" + ("" if total is None else f" of {total}")
            text = "  ".join(part for part in (updates, _text(latest), left(entry)) if part)
            screen.print(text, highlight=False, soft_wrap=True)

        if not (screen.is_terminal or screen.is_jupyter):
            return print_line, lambda: None
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[seen]}"))
        bar = Progress(*columns, console=screen)
        bar.add_task("updates", total=total, completed=before, seen="")
        if screen.is_jupyter:
            # One output of the cell, which is replaced. `Live` takes ipywidgets for that, and adds
            # an output for each refresh without them.
            output = import_module("IPython.display").display(bar, display_id=True)

            def update_output(entry: Entry) -> None:
                update_bar(entry)
                output.update(bar)

            return update_output, lambda: None
        bar.start()
        return update_bar, bar.stop

    return Tracker(
        name="progress",
        open=begin,
        # A bar has no place for anything else.
        write=lambda shown, entry: shown[0](entry) if entry.kind == "log" else None,
        close=lambda shown, failed: shown[1](),
    )


def _text(values: Mapping[str, float]) -> str:
    shown = [name for name in values if name in _SHOWN or name.split("/")[0] == "eval"]
    return "  ".join(
        f"{values[name]:.4g} {_UNITS[name]}" if name in _UNITS else f"{name} {values[name]:.4g}"
        for name in shown
    )
