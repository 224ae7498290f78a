"""Metrics as lines of JSON in a file: the tracker that needs no package, and reading its runs."""

import io
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import attrs
from torch import Tensor

from fxtrain._display import brief
from fxtrain._reading import StrPath, lines_of, open_file, path_problem, write_file
from fxtrain._record import record
from fxtrain.errors import PlanError
from fxtrain.state import Position
from fxtrain.trackers.tracker import Entry, Start, Tracker


@record
class JsonLines:
    """A file of JSON lines in the run's folder; needs no package.

    Attributes:
        file: Its name.
    """

    kind: Literal["json_lines"] = attrs.field(default="json_lines", init=False)
    file: str = attrs.field(default="metrics.jsonl")


# How every line begins, so that a long file can be truncated without parsing it.
_HEAD = re.compile(rb'\{"step":(\d+)(?:,"rows":(\d+))?[,}]')
_COLORS = {1: 0, 3: 2, 4: 6}  # PNG's numbers of gray, RGB and RGBA, by channels
_LONGEST_NAME = 200  # of a file, in bytes
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@attrs.frozen(kw_only=True, eq=False)
class JsonLinesFile:
    """An open file of lines, and what it was opened with."""

    path: Path
    file: io.FileIO
    start: Start


def _open(config: JsonLines, start: Start) -> JsonLinesFile:
    path = start.folder / config.file
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        _cut(path, start.position)
    return JsonLinesFile(path=path, file=io.FileIO(path, "ab"), start=start)


def _cut(path: Path, position: Position) -> None:
    """Remove lines after a position, which will be logged again, and an incomplete last one."""
    with path.open("rb") as file:
        if all(_stays(line, position) for line in file):
            return
        file.seek(0)
        replace_file(path, (line for line in file if _stays(line, position)))


def _stays(line: bytes, position: Position) -> bool:
    if not line.endswith(b"\n"):
        return False
    head = _HEAD.match(line)
    if head is None:
        return True
    step, rows = int(head[1]), int(head[2] or 0)
    # A position that was created by hand may only have its updates.
    return step <= position.updates and (rows <= position.samples or not position.samples)


def replace_file(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file of a locked folder completely or not at all, over an earlier draft of it."""
    draft = path.with_name(f".{path.name}-draft")
    try:
        with draft.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _write(lines: JsonLinesFile, entry: Entry) -> None:
    place = {"step": entry.step, "rows": entry.rows, "epoch": entry.epoch, "time": entry.time}
    known = {name: value for name, value in place.items() if value is not None}
    text = _encode({**known, **_content(lines, entry)})
    data = memoryview(f"{text}\n".encode())
    end = lines.file.seek(0, os.SEEK_END)
    try:
        while data:
            data = data[lines.file.write(data) :]
    except OSError:
        lines.file.truncate(end)  # half a line would corrupt the next one
        raise


def _content(lines: JsonLinesFile, entry: Entry) -> dict[str, Any]:
    """What a line has beside its place."""
    match entry.kind:
        case "params":
            about = {"id": lines.start.group or lines.start.id, "name": lines.start.name}
            return {"start": {**about, "params": entry.value}}
        case "log":
            # JSON has no non-finite numbers.
            values = {name: x if math.isfinite(x) else str(x) for name, x in entry.value.items()}
            return {"values": values}
        case "image":
            images = lines.start.folder / "images"
            images.mkdir(parents=True, exist_ok=True)
            path = images / f"{quote(entry.name, safe='')[:_LONGEST_NAME]}-{entry.step}.png"
            write_file(path, _png(entry.value))
            return {"image": {entry.name: os.path.relpath(path, lines.path.parent)}}
        case "artifact":
            return {"artifact": {entry.name: str(entry.value)}}
        case _:
            return {entry.kind: {entry.name: entry.value}}


def _close(lines: JsonLinesFile, failed: bool) -> None:  # noqa: FBT001 - the contract of a tracker
    try:
        os.fsync(lines.file.fileno())
    finally:
        lines.file.close()


def _png(image: Tensor) -> bytes:
    """A PNG file; uint8 in rows, with 1, 3 or 4 channels."""
    height, width, channels = image.shape
    pixels = bytes(image.flatten().tolist())
    row = width * channels
    # A zero before each row means that its bytes are not filtered.
    lines = b"".join(b"\0" + pixels[start : start + row] for start in range(0, len(pixels), row))
    head = struct.pack(">IIBBBBB", width, height, 8, _COLORS[channels], 0, 0, 0)
    parts = (_part(b"IHDR", head), _part(b"IDAT", zlib.compress(lines)), _part(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _part(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


JSON_LINES = Tracker(
    name="JsonLines",
    config=JsonLines,
    open=_open,
    write=_write,
    close=_close,
)


@attrs.frozen(kw_only=True, eq=False)
class RunLog:
    """The entries of a run.

    Attributes:
        id: Id of the run.
        starts: Each start of the run, with `step` and `params`: the first, and one for each time it
            was resumed.
        entries: All other lines in order: `step`, `rows`, `epoch`, `time`, and one of
            `values`, `text`, `image`, `table` and `artifact`, by name.
        damaged: Number of invalid lines that were skipped.
    """

    id: str
    starts: tuple[dict[str, Any], ...] = attrs.field(repr=brief)
    entries: tuple[dict[str, Any], ...] = attrs.field(repr=brief)
    damaged: int = 0

    def curve(self, name: str, over: str = "step") -> list[tuple[float, float]]:
        """The values of one metric.

        Args:
            over: The other axis: step, rows or time.
        """
        return [
            (entry[over], float(entry["values"][name]))
            for entry in self.entries
            if name in entry.get("values", ())
        ]


def folder_of(path: Any) -> Path:
    """The folder of a run on this machine; a PlanError if it is not a path."""
    if problem := path_problem(path):
        raise PlanError(f"track: {problem}.")
    text = os.fspath(path)
    if "://" in text:
        raise PlanError(
            f"track({text!r}): trackers write local files first. Choose a folder of this machine; "
            f"checkpoints may be elsewhere."
        )
    return Path(text)


def read_run(path: StrPath, *, file: str = "metrics.jsonl") -> RunLog:
    """Read the run in a folder.

    Args:
        file: File name in the tracker's config.

    Raises:
        PlanError: the folder has no run, or not this file. If all ranks tracked, those of rank 3
            are in the folder `rank3`.

    Example:
        >>> import fxtrain as fx, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     with fx.track(folder, ctx, settings={"lr": 0.1}) as run:
        ...         run.log({"loss": float("nan")}, 1)
        >>> log = read_run(folder)
        >>> log.curve("loss"), log.starts[0]["params"]["lr"]
        ([(1, nan)], 0.1)
    """
    folder = folder_of(path)
    try:
        with open_file(folder / file) as lines:
            entries = [_read(line) for line in lines_of(lines)]
    except OSError as error:
        raise PlanError(f"read_run({str(path)!r}): {error}.") from error
    valid = [entry for entry in entries if entry is not None]
    starts = tuple(
        {**entry, **entry["start"]} for entry in valid if isinstance(entry.get("start"), dict)
    )
    if not starts:
        raise PlanError(f"read_run({str(path)!r}): no line of this file starts a run.")
    return RunLog(
        id=str(starts[-1].get("id", "")),
        starts=starts,
        entries=tuple(entry for entry in valid if "start" not in entry),
        damaged=len(entries) - len(valid),
    )


def _read(line: bytes | None) -> dict[str, Any] | None:
    try:
        data = None if line is None else json.loads(line)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and type(data.get("step")) is int else None
