"""Metrics as lines on standard output."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
from torch import Tensor

from fxtrain._display import counted
from fxtrain._errors import escape_unprintable
from fxtrain._record import at_least, record
from fxtrain.trackers.tracker import At, Start, Tracker


@record
class Terminal:
    """Lines on standard output at intervals.

    Attributes:
        every_s: Minimum seconds between two lines of metrics; metrics in between are not shown.
        digits: Significant digits of a number.
    """

    kind: Literal["terminal"] = attrs.field(default="terminal", init=False)
    every_s: float = attrs.field(default=1.0, validator=at_least(0))
    digits: int = attrs.field(default=4, validator=at_least(1))


@attrs.frozen(kw_only=True, eq=False)
class Shown:
    """The last line that was written, and when."""

    config: Terminal
    before: str
    last: list[float] = attrs.field(factory=lambda: [float("-inf")])
    waits: list[str] = attrs.field(factory=list)


def _open(config: Terminal, start: Start) -> Shown:
    return Shown(config=config, before=f"[{start.rank}] " if start.everyone else "")


def _say(shown: Shown, line: str) -> None:
    sys.stdout.write(f"{shown.before}{escape_unprintable(line)}\n")
    sys.stdout.flush()


def _log(shown: Shown, values: Mapping[str, float], at: At) -> None:
    numbers = [f"{name} {value:.{shown.config.digits}g}" for name, value in values.items()]
    line = "  ".join([_place(at), *numbers])
    shown.waits.clear()
    if at.time - shown.last[0] < shown.config.every_s:
        shown.waits.append(line)  # it is the last one, unless another follows
        return
    shown.last[0] = at.time
    _say(shown, line)


def _place(at: At) -> str:
    parts = {"update": at.step, "rows": at.rows, "epoch": at.epoch}
    return "  ".join(f"{name} {one}" for name, one in parts.items() if one is not None)


def _text(shown: Shown, name: str, text: str, at: At) -> None:
    _say(shown, f"{_place(at)}  {name}: {text}")


def _image(shown: Shown, name: str, image: Tensor, at: At) -> None:
    height, width, _ = image.shape
    _say(shown, f"{_place(at)}  {name}: an image of {width} by {height} pixels")


def _table(
    shown: Shown, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], at: At
) -> None:
    _say(
        shown, f"{_place(at)}  {name}: a table of {counted(len(rows), 'row')}: {', '.join(columns)}"
    )


def _artifact(shown: Shown, name: str, path: Path, at: At) -> None:
    _say(shown, f"{_place(at)}  {name}: {path}")


def _close(shown: Shown, failed: bool) -> None:  # noqa: FBT001 - the contract of a tracker
    for line in shown.waits:
        _say(shown, line)


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
