"""Metrics as lines on standard output."""

import sys
from typing import Literal

import attrs

from fxtrain._display import counted
from fxtrain._record import at_least, record
from fxtrain.errors import escape_unprintable
from fxtrain.trackers.tracker import Entry, Start, Tracker


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
class TerminalLines:
    """Lines on standard output, each of which begins with a prefix."""

    config: Terminal
    prefix: str
    written: float = float("-inf")  # when the last line of metrics was, in seconds since 1970
    waiting: str = ""  # a line that followed too soon; shown at the end if it is the last one


def _open(config: Terminal, start: Start) -> TerminalLines:
    return TerminalLines(config=config, prefix=f"[{start.rank}] " if start.group else "")


def _say(lines: TerminalLines, line: str) -> None:
    sys.stdout.write(f"{lines.prefix}{escape_unprintable(line)}\n")
    sys.stdout.flush()


def _write(lines: TerminalLines, entry: Entry) -> None:
    name, value = entry.name, entry.value
    places = {"update": entry.step, "rows": entry.rows, "epoch": entry.epoch}
    place = "  ".join(f"{axis} {number}" for axis, number in places.items() if number is not None)
    match entry.kind:
        case "log":
            digits = lines.config.digits
            line = "  ".join([place, *(f"{name} {x:.{digits}g}" for name, x in value.items())])
            if entry.time - lines.written < lines.config.every_s:
                lines.waiting = line
                return
            lines.waiting, lines.written = "", entry.time
            _say(lines, line)
        case "image":
            height, width, _ = value.shape
            _say(lines, f"{place}  {name}: an image of {width} by {height} pixels")
        case "table":
            size, columns = counted(len(value["rows"]), "row"), ", ".join(value["columns"])
            _say(lines, f"{place}  {name}: a table of {size}: {columns}")
        case _:
            _say(lines, f"{place}  {name}: {value}")


def _close(lines: TerminalLines, failed: bool) -> None:  # noqa: FBT001 - the contract of a tracker
    if lines.waiting:
        _say(lines, lines.waiting)


TERMINAL = Tracker(
    name="Terminal",
    config=Terminal,
    kinds=("log", "text", "image", "table", "artifact"),
    open=_open,
    write=_write,
    close=_close,
)
