"""Files of tokens, mapped into memory and checked against their headers."""

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from fxtrain._optional import optional
from fxtrain._reading import check_regular, open_file, read_text
from fxtrain.errors import DataError
from fxtrain.token_files.records import MegatronTokens, NanoGPTTokens

MAGIC = b"MMIDIDX\0\0"
# The codes of integer types in `.idx` files.
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
HEAD = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, document bounds
NO_LABEL = -100  # `ignore_index` of torch's cross-entropy
_FAN = 16  # parts into which a step of a search divides what is left
_ENDS, _LEAST = 1 << 20, 1 << 12  # bytes of each end of all files, and at least of one, in a digest
_PROBES = 64  # sequences that a start compares with their successors

# A file, and what distinguishes it from another one at its path: inode, bytes, time of change.
FileState = tuple[str, int, int, int]


@attrs.frozen(kw_only=True, eq=False)
class MappedTokens:
    """Maps of a source, as numpy arrays."""

    path: str  # the file that says where documents end, in messages
    tokens: Any  # all of them; None where documents lie apart
    # Those: the bytes of the file, the first byte of each document, and the type of a token.
    apart: Any = None
    maps: tuple["TokenMap", ...] = ()  # of the files, which may shrink while they are read
    end: int | None = None  # the token that ends a document
    ends: Any = None  # int64; for every document, the tokens up to its end
    # For every sequence, its first byte. Not aligned, so numpy copies all of it for anything
    # but indexing.
    pointers: Any = None
    # For every document, its first sequence; then the number of sequences. Likewise.
    bounds: Any = None

    @property
    def size(self) -> int:
        """How many tokens there are."""
        if self.tokens is not None:
            return len(self.tokens)
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def dtype(self) -> Any:
        """Their type, as numpy has it."""
        return self.apart[2] if self.tokens is None else self.tokens.dtype

    def check(self) -> None:
        """Check that the files still have their bytes: reading others would end the process.

        Raises:
            DataError: one has shrunk.
        """
        for each in self.maps:
            each.check()

    def gather(self, begins: Any, sizes: Any) -> Any:
        """The tokens of several ranges, one after the other.

        Raises:
            DataError: the index names tokens that do not exist, or a file has shrunk.
        """
        self.check()
        numpy = load_numpy()
        places = numpy.repeat(begins - (sizes.cumsum() - sizes), sizes)
        places += numpy.arange(len(places))
        if len(places) and not 0 <= places.min() <= places.max() < self.size:
            raise damaged(self.path, f"names tokens beyond the {self.size} that there are")
        if self.tokens is not None:
            return self.tokens[places]
        data, first_bytes, dtype = self.apart
        documents = numpy.searchsorted(self.ends, places, side="right")
        at = first_bytes[documents] + (places - self._first_tokens(documents)) * dtype.itemsize
        return data[at[:, None] + numpy.arange(dtype.itemsize)].view(dtype)[:, 0]

    def starts(self, begins: Any, length: int) -> tuple[Any, Any]:
        """Where documents start in ranges of tokens.

        Args:
            begins: int64, the first token of each range.
            length: Tokens of a range.

        Returns:
            For each document that starts in one: the number of the range, and the place there.

        Raises:
            DataError: documents are not in order, or refer to sequences that do not exist.
        """
        self.check()
        numpy = load_numpy()
        stops = numpy.minimum(begins + length, self.size)
        if self.bounds is None and self.ends is None:
            return self._starts_after_ends(begins, stops)
        low, high = self._search(numpy.stack([begins, stops]))
        counts = (high - low).clip(0)
        index = numpy.repeat(numpy.arange(len(begins)), counts)
        inside = numpy.arange(len(index)) - numpy.repeat(counts.cumsum() - counts, counts)
        places = self._first_tokens(low[index] + inside) - begins[index]
        disorder = (places[1:] < places[:-1]) & (index[1:] == index[:-1])
        if (high < low).any() or (places < 0).any() or (places >= length).any() or disorder.any():
            raise damaged(self.path, "has documents that are not in order")
        return index, places

    def _starts_after_ends(self, begins: Any, stops: Any) -> tuple[Any, Any]:
        numpy = load_numpy()
        if self.end is None:
            first = (begins == 0).nonzero()[0]
            return first, 0 * first
        indices, places = [begins[:0]], [begins[:0]]
        for number, (begin, stop) in enumerate(zip(begins, stops, strict=True)):
            before = max(0, begin - 1)
            starts = (self.tokens[before : stop - 1] == self.end).nonzero()[0] + before + 1
            if begin == 0:
                starts = numpy.concatenate([[0], starts])
            indices.append(numpy.full(len(starts), number))
            places.append(starts - begin)
        return numpy.concatenate(indices), numpy.concatenate(places)

    def _search(self, targets: Any) -> Any:
        """How many documents start before each token; all of them searched together."""
        numpy = load_numpy()
        if self.ends is not None:
            return (targets > 0) + numpy.searchsorted(self.ends[:-1], targets)
        low, size = targets * 0, len(self.bounds)
        last, fans = size - 1, numpy.arange(1, _FAN)
        while size > 1:
            size = -(-size // _FAN)
            probes = (low[..., None] + size * fans - 1).clip(None, last)
            before = self._first_tokens(probes) < targets[..., None]
            low = low + size * before.sum(-1)
        return low

    def _first_tokens(self, documents: Any) -> Any:
        """The first token of each document."""
        if self.ends is not None:
            return (documents > 0) * self.ends[documents - (documents > 0)]
        sequences = self.bounds[documents]
        wrong = (sequences < 0) | (sequences > len(self.pointers))
        if wrong.any():
            raise damaged(
                self.path,
                f"starts a document at sequence {sequences[wrong][0]} of {len(self.pointers)}",
            )
        beyond = sequences == len(self.pointers)  # documents without tokens, at the end
        starts = self.pointers[sequences - beyond] // self.tokens.itemsize
        return ~beyond * starts + beyond * len(self.tokens)


def file_state(path: str) -> FileState:
    """What a file is now.

    Raises:
        DataError: it is missing, or no regular file.
    """
    try:
        stat = os.stat(path)
        check_regular(stat.st_mode, path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return path, stat.st_ino, stat.st_size, stat.st_mtime_ns


def check_unchanged(states: tuple[FileState, ...], path: str) -> None:
    """Check that a file is still the one that a source had.

    Raises:
        DataError: it was replaced, or its size or time of change differ.
    """
    for state in states:
        # An object store may give a file another inode each time.
        if state[0] == path and file_state(path)[2:] != state[2:]:
            raise DataError(
                f"tokens: {path} has changed since fx.tokens was called, so its rows are others. "
                f"Write new files to another path, or call fx.tokens again."
            )


def ends_digest(paths: Sequence[str]) -> str:
    """A digest of the sizes of files, and of their first and last bytes.

    Raises:
        DataError: one cannot be read.
    """
    digest, budget = hashlib.blake2b(digest_size=8), max(_LEAST, _ENDS // max(1, len(paths)))
    for path in paths:
        try:
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(size.to_bytes(8, "little") + file.read(budget))
                file.seek(max(0, size - budget))
                digest.update(file.read(budget))
        except OSError as error:
            raise _unreadable(path, error) from error
    return f"#{digest.hexdigest()}"


def read_description(stem: str) -> dict[str, Any]:
    """How `tokenize` made the files at a path; empty if it did not."""
    try:
        saved = json.loads(read_text(f"{stem}.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return saved if isinstance(saved, dict) and "vocabulary_size" in saved else {}


def open_nanogpt(source: NanoGPTTokens) -> MappedTokens:
    """The map of a file without a header; compared with what `tokenize` wrote beside it."""
    stem = source.path.removesuffix(".bin")
    saved = read_description(stem)
    for name, given in (("dtype", source.dtype), ("end", source.end)):
        if given is not None and saved.get(name, given) != given:
            raise DataError(
                f"tokens: NanoGPTTokens({name}={given!r}): {source.path} was made with "
                f"{name}={saved[name]!r}, says {stem}.json. Use that."
            )
    tokens, data = mapped_tokens(source.path, source.dtype)
    return MappedTokens(path=source.path, tokens=tokens, maps=(data,), end=source.end)


def open_megatron(source: MegatronTokens) -> MappedTokens:
    """The maps of an index and its tokens; checks its header and a few sequences."""
    numpy, path = load_numpy(), f"{source.path}.idx"
    file = map_token_file(path)
    index = file.data
    if len(index) < HEAD.size:
        raise damaged(path, f"has {len(index)} bytes, fewer than its header")
    magic, version, code, sequences, bounds = HEAD.unpack_from(index)
    if magic != MAGIC or version != 1 or code not in CODES:
        raise damaged(path, "is not an index of integers of version 1")
    size = HEAD.size + 12 * sequences + 8 * bounds
    # Multimodal data has one more byte for each sequence.
    if not sequences or not bounds or len(index) not in (size, size + sequences):
        raise damaged(
            path, f"has {len(index)} bytes; {sequences} sequences, {bounds} bounds need {size}"
        )
    lengths = numpy.frombuffer(index, "<i4", sequences, HEAD.size)
    pointers = numpy.frombuffer(index, "<i8", sequences, HEAD.size + 4 * sequences)
    starts = numpy.frombuffer(index, "<i8", bounds, HEAD.size + 12 * sequences)
    tokens, data = mapped_tokens(f"{source.path}.bin", CODES[code])
    expected = int(pointers[-1]) + int(lengths[-1]) * tokens.itemsize
    if expected != tokens.nbytes:
        raise damaged(path, f"describes {expected} bytes of tokens, not those of its .bin file")
    probes = numpy.linspace(0, sequences - 1, min(_PROBES, sequences)).astype("i8")[:-1]
    ends = pointers[probes] + lengths[probes].astype("i8") * tokens.itemsize
    if (starts[0], starts[-1]) != (0, sequences):
        raise damaged(path, f"has documents from sequence {starts[0]} to {starts[-1]}")
    if pointers[0] or (wrong := ends != pointers[probes + 1]).any():
        number = probes[wrong][0] + 1 if not pointers[0] else 0
        raise damaged(path, f"has a sequence, {number}, that does not follow the one before")
    maps = file, data
    return MappedTokens(path=path, tokens=tokens, maps=maps, pointers=pointers, bounds=starts)


def load_numpy() -> Any:
    """The package numpy."""
    return optional("numpy", extra="tokens", needed_by="fx.tokens")


def damaged(path: str, problem: str) -> DataError:
    """The error of a file that is not what its header says."""
    return DataError(f"tokens: {path} {problem}. Check the format, or create the file again.")


@attrs.frozen(eq=False)
class TokenMap:
    """A file that is mapped."""

    path: str
    data: mmap.mmap

    def check(self) -> None:
        """Check that the file still has the bytes that are mapped.

        Raises:
            DataError: it has shrunk: reading what is gone would end the process by SIGBUS.
        """
        if (size := self.data.size()) < len(self.data):
            raise DataError(
                f"tokens: {self.path} had {len(self.data)} bytes when it was opened, and has "
                f"{size}: it was truncated while it is read. Write new files to another path."
            )


def mapped_tokens(path: str, dtype: str) -> tuple[Any, TokenMap]:
    """A file of little-endian integers without a header, mapped; and its map."""
    numpy, file = load_numpy(), map_token_file(path)
    if len(file.data) % numpy.dtype(dtype).itemsize:
        raise damaged(path, f"has {len(file.data)} bytes, which is no number of {dtype}")
    return numpy.frombuffer(file.data, numpy.dtype(dtype).newbyteorder("<")), file


def map_token_file(path: str) -> TokenMap:
    """A regular file that is not empty, mapped.

    Raises:
        DataError: it is missing, empty or no regular file.
    """
    try:
        with open_file(path) as file:
            if not os.fstat(file.fileno()).st_size:
                raise damaged(path, "is empty")
            return TokenMap(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise _unreadable(path, error) from error


# What code raises that reads an index as if it were whole.
_MISREAD = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@contextmanager
def one_error(path: str) -> Iterator[None]:
    """Name the file in any error of reading what it describes.

    Raises:
        DataError: in place of an error that an index causes which is not what it says.
    """
    try:
        yield
    except DataError:  # a ValueError that names the file already
        raise
    except OSError as error:
        raise _unreadable(path, error) from error
    except (*_MISREAD, MemoryError, struct.error) as error:
        reason = ascii(error)[:200]  # it may show what is in the file
        raise damaged(path, f"is not what its header or index says ({reason})") from error


def _unreadable(path: str, error: OSError | ValueError) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return DataError(f"tokens: cannot read {path!r}: {reason}. Check the path.")


def separate_documents(batch: dict[str, Any], starts: Any) -> None:
    """End labels with their documents, and add positions and numbers of documents.

    Args:
        batch: int64 `labels`, shape (rows, length).
        starts: bool, shape (rows, length + 1): where a document starts; changed.
    """
    numpy = load_numpy()
    batch["labels"][starts[:, 1:]] = NO_LABEL
    starts = starts[:, :-1]
    starts[:, 0] = False
    at = numpy.arange(starts.shape[1])
    batch["positions"] = at - numpy.maximum.accumulate(at * starts, axis=1)
    batch["documents"] = starts.cumsum(1, dtype="i4")


def read_by_source(chosen: Any, read: Callable[[int, Any], dict[str, Any]]) -> dict[str, Any]:
    """Rows of several sources, with one read of each that has rows.

    Args:
        chosen: int64, the source of each row.
        read: (source, which of the rows, as a mask) → their values by name.
    """
    numpy = load_numpy()
    batch: dict[str, Any] = {"source": chosen}
    for source in set(chosen.tolist()):
        here = chosen == source
        for name, values in read(source, here).items():
            shape = (len(chosen), *values.shape[1:])
            batch.setdefault(name, numpy.empty(shape, values.dtype))[here] = values
    return batch
