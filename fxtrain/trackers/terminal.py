"""Metrics as lines on standard output."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
from torch import Tensor

from fxtrain._display import counted
from fxtrain._record import at_least, record
from fxtrain.errors import escape_unprintable
from fxtrain.trackers.tracker import At, Start, Tracker


@record
class Terminal:
    """Lines on standard output at intervals.

    Attributes:
        every_s: Minimum seconds between two lines of metrics; metrics in between are not lines.
        digits: Significant digits of a number.
    """

    kind: Literal["terminal"] = attrs.field(default="terminal", init=False)
    every_s: float = attrs.field(default=1.0, validator=at_least(0))
    digits: int = attrs.field(default=4, validator=at_least(1))


@attrs.define(kw_only=True, eq=False)
class Lines:
    """Lines on standard output.

    Attributes:
        config: How often, and with how many digits.
        prefix: Begins each line.
        written: When the last line of metrics was written, in seconds since 1970.
        waiting: A line that followed too soon; shown at the end if it is the last one.
    """

    config: Terminal
    prefix: str
    written: float = float("-inf")
    waiting: str = ""


def _open(config: Terminal, start: Start) -> Lines:
    return Lines(config=config, prefix=f"[{start.rank}] " if start.everyone else "")


def _say(lines: Lines, line: str) -> None:
    sys.stdout.write(f"{lines.prefix}{escape_unprintable(line)}\n")
    sys.stdout.flush()


def _log(lines: Lines, values: Mapping[str, float], at: At) -> None:
    numbers = [f"{name} {value:.{lines.config.digits}g}" for name, value in values.items()]
    line = "  ".join([_place(at), *numbers])
    if at.time - lines.written < lines.config.every_s:
        lines.waiting = line
        return
    lines.waiting, lines.written = "", at.time
    _say(lines, line)


def _place(at: At) -> str:
    parts = {"update": at.step, "rows": at.rows, "epoch": at.epoch}
    return "  ".join(f"{name} {number}" for name, number in parts.items() if number is not None)


def _text(lines: Lines, name: str, text: str, at: At) -> None:
    _say(lines, f"{_place(at)}  {name}: {text}")


def _image(lines: Lines, name: str, image: Tensor, at: At) -> None:
    height, width, _ = image.shape
    _say(lines, f"{_place(at)}  {name}: an image of {width} by {height} pixels")


def _table(
    lines: Lines, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], at: At
) -> None:
    _say(
        lines, f"{_place(at)}  {name}: a table of {counted(len(rows), 'row')}: {', '.join(columns)}"
    )


def _artifact(lines: Lines, name: str, path: Path, at: At) -> None:
    _say(lines, f"{_place(at)}  {name}: {path}")


def _close(lines: Lines, failed: bool) -> None:  # noqa: FBT001 - the contract of a tracker
    if lines.waiting:
        _say(lines, lines.waiting)


TERMINAL = Tracker(
    name="Terminal",
    config=Terminal,
    open=_open,
    log=_log,
    text=_text,
    image=_image,
    table=_table,
    artifact=_artifact,
    close=_close,
)
