"""Read pickles without running code from them.

Pickles of tensors are read with `weights_only=True`, others into inert placeholders.
"""

import contextlib
import io
import os
import pickle
import pickletools
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch

from fxtrain._reading import open_file
from fxtrain.errors import CheckpointError

_ZIP = b"PK\x03\x04"
_MAX_REASON_LENGTH = 500  # characters of torch's message
# Opcodes that no pickle of records uses, and those that store into the memo.
_NEVER = ("BYTEARRAY8", "NEXT_BUFFER", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "INST", "OBJ")
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")


class Placeholder:
    """Replaces an object of a pickle: the name of its class, its arguments and its state."""

    kind = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def fields(self) -> dict[str, Any]:
        """The state, if it has names."""
        return self.state if isinstance(self.state, dict) else {}


def _placeholder_class(kind: str) -> type[Placeholder]:
    """A new class each time, so that nothing a pickle does to it persists."""
    return type(kind, (Placeholder,), {"kind": kind})


def _entry(kind: Any, name: Any) -> Placeholder:
    """An entry of an enumeration, as Python 3.11.0 to 3.11.3 pickle it."""
    if not (isinstance(kind, type) and issubclass(kind, Placeholder)):
        raise pickle.UnpicklingError("it requests builtins.getattr")
    return kind(name)


def load_weights_only(
    file: str | os.PathLike[str] | BinaryIO,
    what: str,
    *,
    mmap: bool = False,
    placeholders: bool = False,
) -> Any:
    """Load a file onto the CPU with `torch.load(weights_only=True)`; else a CheckpointError.

    `file` is a path, mapped if `mmap`, or a file object in memory. With `placeholders`, objects of
    classes that torch does not load are read as placeholders.
    """
    try:
        with _opened(file) as opened:
            _check_sizes(opened)
        known: list[Any] = []
        if placeholders:
            named = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            classes = {name: _placeholder_class(name.rpartition(".")[2]) for name in named}
            classes = {**classes, "builtins.getattr": _entry}
            known = [(replacement, name) for name, replacement in classes.items()]
        with torch.serialization.safe_globals(known):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror or error}.") from error
    except Exception as error:  # a damaged pickle can make torch raise anything
        raise CheckpointError(
            f"{what}: torch.load(weights_only=True{', mmap=True' if mmap else ''}) rejects it: "
            f"{_reason(error)} Files that need to run code are never read; convert a file that "
            f"you trust with torch first."
        ) from error


class _Records(pickle.Unpickler):
    """Maps records to placeholders, and rejects everything but torch's dtypes and shapes."""

    def __init__(self, raw: bytes, records: str) -> None:
        super().__init__(io.BytesIO(raw))
        self.records = records

    def find_class(self, module: str, name: str) -> Any:
        if self.records and module.startswith(self.records):
            return _placeholder_class(name)
        if module.split(".")[0] == "pathlib" and name in _PATHS:
            return _placeholder_class(name)
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("builtins", "getattr"):
            return _entry
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda layout: layout
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it requests {module}.{name}")


def load_records(raw: bytes, records: str = "") -> Any:
    """Unpickle plain values, and records of modules that begin with `records` as placeholders.

    Raises if the pickle requests anything else, would allocate more than it has, or is damaged, for
    which the pickle module raises anything.
    """
    # The memo grows to its largest index, and a byte array to its declared length.
    for count, (opcode, argument, offset) in enumerate(pickletools.genops(raw)):
        if opcode.name in _NEVER:
            raise pickle.UnpicklingError(f"it uses {opcode.name} at {offset}")
        if opcode.name in _PUTS and not 0 <= int(argument or 0) <= count:
            raise pickle.UnpicklingError(f"it stores number {argument} at {offset}, out of order")
    return _Records(raw, records).load()


@contextlib.contextmanager
def _opened(file: Any) -> Iterator[BinaryIO]:
    """Open a file for inspection; a file in memory is rewound afterwards."""
    if isinstance(file, str | os.PathLike):
        with open_file(file) as opened:
            yield opened
        return
    try:
        yield file
    finally:
        file.seek(0)


def _check_sizes(file: BinaryIO) -> None:
    """Raise if an archive claims more bytes than it has, before torch allocates them."""
    if file.read(len(_ZIP)) != _ZIP:
        return
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        claimed = sum(entry.file_size for entry in archive.infolist())
    if claimed > size:
        raise zipfile.BadZipFile(f"its entries claim {claimed} bytes, but the file has {size}")


def _reason(error: Exception) -> str:
    """The most informative line of a message."""
    lines = str(error).strip().splitlines()
    relevant = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
    line = (relevant or lines or [""])[0].strip()[:_MAX_REASON_LENGTH].rstrip(".")
    # The message of a KeyError is only the key.
    named = "" if isinstance(error, RuntimeError | ValueError) and line else type(error).__name__
    return f"{': '.join(filter(None, (named, line)))}."
