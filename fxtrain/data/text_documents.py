"""Documents of text in files: JSON lines, Parquet, and plain text."""

import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from fxtrain._optional import optional
from fxtrain.errors import DataError

# Bytes of a part: about 2,000 parts, within these limits.
_SMALLEST, _LARGEST = 1 << 20, 64 << 20
_LINES = (".jsonl", ".json")
_ZIPPED = tuple(f"{name}.gz" for name in _LINES)


class Piece(NamedTuple):
    """Documents of a file.

    Attributes:
        path: The file.
        start: The first byte; of Parquet, the row group.
        stop: The byte after the last one. Of JSON lines, those that begin between the two.
    """

    path: str
    start: int
    stop: int


def parts_of(inputs: Iterable[str]) -> list[tuple[int, list[Piece]]]:
    """(bytes, pieces) of parts of the inputs, of 1 to 64 MiB where files can be split.

    They depend on the inputs alone.

    Raises:
        DataError: a file is missing, or there is none.
    """
    parts: list[tuple[int, list[Piece]]] = []
    small: list[Piece] = []
    room = 0
    sizes = [(path, os.path.getsize(path)) for path in _files(inputs)]
    most = min(max(_SMALLEST, sum(size for _, size in sizes) // 2000), _LARGEST)
    for path, whole in sizes:
        for size, piece in _pieces(path, whole, most):
            if size > room:
                small, room = [], most
                parts.append((0, small))
            small.append(piece)
            room -= size
            parts[-1] = (parts[-1][0] + size, small)
    if not parts:
        raise DataError("tokens: the inputs are empty. Pass files with text.")
    return parts


def texts_of(pieces: Iterable[Piece], field: str) -> Iterator[str]:
    """The documents of pieces, in order.

    Raises:
        DataError: a file is broken, or has no text in this field; with the line.
    """
    for piece in pieces:
        if piece.path.endswith(".parquet"):
            yield from _rows(piece, field)
        elif piece.path.endswith((*_LINES, *_ZIPPED)):
            yield from _lines(piece, field)
        else:
            try:
                with open(piece.path, "rb") as file:
                    yield file.read().decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"tokens: {piece.path} is not UTF-8 text: {error}. Convert it, or leave it out."
                ) from error


def _files(inputs: Iterable[str]) -> Iterator[str]:
    for name in inputs:
        if os.path.isdir(name):
            raise DataError(
                f"tokens: {name} is a folder. Pass a pattern of its files, such as {name}/**/*.txt."
            )
        paths = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
        if not paths:
            raise DataError(f"tokens: no file {name}. Check the path or the pattern.")
        yield from (path for path in paths if not os.path.isdir(path))


def _pieces(path: str, size: int, most: int) -> Iterator[tuple[int, Piece]]:
    """(bytes, piece) of a file."""
    if path.endswith(".parquet"):
        groups = _parquet(path).num_row_groups
        for number in range(groups):
            yield size // groups, Piece(path, number, number + 1)
        return
    step = most if path.endswith(_LINES) else max(1, size)
    for start in range(0, size, step):
        yield min(step, size - start), Piece(path, start, min(start + step, size))


def _parquet(path: str) -> Any:
    module: Any = optional("pyarrow.parquet", extra="arrow", needed_by=f"reading {path}")
    arrow: Any = optional("pyarrow", extra="arrow", needed_by=f"reading {path}")
    try:
        return module.ParquetFile(path)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"tokens: {path} is no Parquet file that can be read: {error}") from error


def _rows(piece: Piece, field: str) -> Iterator[str]:
    file = _parquet(piece.path)
    names = file.schema_arrow.names
    if field not in names:
        raise DataError(
            f'tokens: {piece.path} has no column "{field}"; it has {", ".join(names)}. Choose the '
            f"column of the text."
        )
    column = file.read_row_group(piece.start, columns=[field]).column(0)
    for number, value in enumerate(column):
        try:
            yield _checked(value.as_py(), field)
        except _WrongLine as error:
            where = f"{piece.path}, row group {piece.start}, row {number}"
            raise DataError(f"tokens: {where} {error}") from error


def _lines(piece: Piece, field: str) -> Iterator[str]:
    """The documents whose lines begin in a piece."""
    path, at, stop = piece
    zipped = path.endswith(_ZIPPED)
    number = 0
    try:
        with gzip.open(path) if zipped else open(path, "rb") as file:
            if at:
                # The line with the byte before belongs to the piece before.
                file.seek(at - 1)
                at += len(file.readline()) - 1
            for number, line in enumerate(file, 1):
                if not zipped and at >= stop:
                    return
                if not line.isspace():
                    try:
                        yield _text_of_line(line, field)
                    except _WrongLine as error:
                        line_number = number if zipped else _line_number(path, at)
                        raise DataError(f"tokens: {path}, line {line_number} {error}") from error
                at += len(line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"tokens: {path} cannot be unzipped after line {number}: {error}"
        ) from error


def _text_of_line(line: bytes, field: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise _WrongLine(f"is no JSON: {error}. Correct it, or delete it.") from error
    if not isinstance(row, dict) or field not in row:
        kind = f"an object with {', '.join(row)}" if isinstance(row, dict) else "no object"
        raise _WrongLine(f'has no field "{field}"; it is {kind}. Choose the field of the text.')
    return _checked(row[field], field)


def _checked(text: Any, field: str) -> str:
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        raise _WrongLine(f'has {kind} in "{field}", not text. Choose another field, or delete it.')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _WrongLine(f'has half a surrogate pair in "{field}": {error}. Delete it.') from error
    return text


class _WrongLine(Exception):
    """What is wrong with a line or a row, without its place."""


def _line_number(path: str, at: int) -> int:
    """The number of the line that begins at a byte, from 1."""
    number = 1
    with open(path, "rb") as file:
        while at > 0 and (data := file.read(min(at, 1 << 20))):
            number, at = number + data.count(b"\n"), at - len(data)
    return number
