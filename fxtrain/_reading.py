"""Paths that a user passes: validating them, reading files up to a size, writing files whole."""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

StrPath = str | os.PathLike[str]

LONGEST_LINE = 16 << 20  # bytes of a line of a tracked run; a longer one is damaged

_MAX_TEXT_BYTES = 16 << 20  # bytes of a settings file


def path_problem(path: Any) -> str:
    """Why a value cannot be a path; empty if it can.

    Example:
        >>> from fxtrain._reading import path_problem
        >>> path_problem("runs/a"), path_problem(3)
        ('', 'a path is a string or a pathlib.Path, found int')
    """
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str):
        return f"a path is a string or a pathlib.Path, found {type(path).__name__}"
    if not text:
        return 'expected a path, found an empty string; the current folder is "."'
    if "\0" in text:
        return f"{text[:80]!r} contains a null character, which no path may"
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return f"{text[:80]!a} contains characters that no path of this system may"
    return ""


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading, or raise an OSError.

    Reading a pipe would wait for a writer, and a device has no end: both are refused before they
    are opened.
    """
    if problem := path_problem(path):
        raise OSError(errno.EINVAL, f"This is not a path: {problem}", str(path))
    check_regular(os.stat(path).st_mode, path)
    # Non-blocking, in case a pipe has replaced the file in the meantime.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        check_regular(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_file(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The bytes of a regular file; an OSError, as in `open_file`, if it has over `max_bytes`."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read() if size <= max_bytes else b""
    size = max(size, len(data))  # some system files report size 0
    if size > max_bytes:
        raise OSError(errno.EFBIG, f"It has {size} bytes; the limit is {max_bytes}", str(path))
    return data


def read_text(path: str | os.PathLike[str], max_bytes: int = _MAX_TEXT_BYTES) -> str:
    """The text of a regular file; an OSError, as in `read_file`, if it is not UTF-8."""
    data = read_file(path, max_bytes)
    try:
        return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"It is not UTF-8 text ({error})", str(path)) from None


def lines_of(file: BinaryIO, longest: int = LONGEST_LINE) -> Iterator[bytes | None]:
    """The lines of a file; None for one of more than `longest` bytes, which is not kept."""
    while line := file.readline(longest + 1):
        if len(line) <= longest:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(longest)
        yield None


def write_file(path: StrPath, data: bytes | str) -> None:
    """Write a file completely or not at all; an earlier one stays if this fails with an OSError."""
    raw, target = data.encode() if isinstance(data, str) else data, Path(path).resolve()
    is_special = target.exists() and not target.is_file()  # such as /dev/stdout
    draft = target.with_name(f".fxtrain-draft-{secrets.token_hex(4)}")
    try:
        if is_special:
            target.write_bytes(raw)
            return
        try:
            with draft.open("wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_regular(mode: int, path: str | os.PathLike[str]) -> None:
    """Raise an OSError unless the mode of a path, from `os.stat`, is that of a regular file."""
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "It is a folder, not a file", str(path))
    raise OSError(errno.EINVAL, "It is a pipe, a socket or a device, not a regular file", str(path))
