"""Reads the file of a Chrome trace one event at a time: in bounded memory, whoever wrote it."""

import gzip
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from fxtrain._reading import open_file

__all__ = ["EVENTS", "entries_of"]

EVENTS = "traceEvents"

_CHUNK = 1 << 20  # characters
_LONGEST = 16 << 20  # characters of one event
_LARGEST = 4 << 30  # bytes of a trace
_RATIO = 200  # of an unpacked trace to its file, above 64 MiB; torch's are 10 to 40 times as large
_ALWAYS = 64 << 20
_BLANK = re.compile(r"[ \t\n\r]*")


def entries_of(path: Path) -> Iterator[tuple[str, Any]]:
    """The entries of a trace in order: `traceEvents` once for each event, all others as they are.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: it is not a JSON object, or it is larger than a trace is.
        EOFError, zlib.error: it is compressed and incomplete or damaged.
        RecursionError: it is nested too deeply.
    """
    with open_file(path) as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        unpacked = cast("BinaryIO", gzip.GzipFile(fileobj=file)) if packed else file
        size = os.fstat(file.fileno()).st_size
        with io.TextIOWrapper(unpacked, encoding="utf-8") as text:
            yield from _entries(_Values(text, size))


def _entries(values: "_Values") -> Iterator[tuple[str, Any]]:
    values.expect("{")
    while True:
        name = values.next()
        if type(name) is not str:
            raise ValueError("a name is not text")
        values.expect(":")
        if name == EVENTS and values.peek() == "[":
            for event in values.items():
                yield name, event
        else:
            yield name, values.next()
        if values.expect(",}") == "}":
            return


class _Values:
    """JSON values of a stream, of which one is in memory at a time."""

    def __init__(self, stream: io.TextIOBase, packed_bytes: int) -> None:
        self.stream = stream
        self.most = min(_LARGEST, max(_ALWAYS, _RATIO * packed_bytes))
        self.count = 0
        self.text = ""
        self.at = 0

    def peek(self) -> str:
        """The next character that is not blank."""
        while True:
            self.at = cast("re.Match[str]", _BLANK.match(self.text, self.at)).end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._more():
                raise ValueError("it ends early")

    def expect(self, choices: str) -> str:
        """Read one of some characters."""
        found = self.peek()
        if found not in choices:
            raise ValueError(f"expected {choices[0]!r}, found {found!r}")
        self.at += 1
        return found

    def next(self) -> Any:
        """Read a value."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError:
                if not self._more():
                    raise
                continue
            # A number at the end of a chunk may continue in the next one.
            if end < len(self.text) or not self._more():
                self.at = end
                return value

    def items(self) -> Iterator[Any]:
        """Read the items of a list."""
        self.expect("[")
        if self.peek() == "]":
            self.at += 1
            return
        while True:
            yield self.next()
            if self.expect(",]") == "]":
                return

    def _more(self) -> bool:
        """Read on; whether there was anything."""
        rest = len(self.text) - self.at
        if rest > _LONGEST:
            raise ValueError(f"an entry is longer than {_LONGEST >> 20} MiB")
        # As much as there is, so that a long value is parsed a few times only.
        part = self.stream.read(max(_CHUNK, rest))
        self.count += len(part)
        if self.count > self.most:
            raise ValueError(f"it is larger than {self.most >> 20} MiB unpacked")
        self.text, self.at = self.text[self.at :] + part, 0
        return bool(part)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_no_number)
