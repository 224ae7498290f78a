"""Text to files of tokens: in several processes, resumable and atomic."""

import functools
import glob
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import secrets
import shutil
import signal
import struct
import threading
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from fxtrain._optional import optional
from fxtrain._reading import StrPath, write_file
from fxtrain.errors import DataError
from fxtrain.token_files.folders import open_parquet
from fxtrain.token_files.maps import CODES, HEAD, MAGIC, load_numpy, read_description
from fxtrain.token_files.records import MegatronTokens, NanoGPTTokens

Format = Literal["megatron", "nanogpt"]
TokenType = Literal["uint16", "int32", "uint32", "int64"]

_BATCH = 256  # documents that are tokenized at a time
_COUNTS = struct.Struct("<3Q")  # documents, tokens, documents without text
_LONGEST = (1 << 31) - 1  # tokens of a sequence in Megatron's index
# Bytes of a part: about 2,000 parts, within these limits.
_SMALLEST, _LARGEST = 1 << 20, 64 << 20
_LINES = (".jsonl", ".json")
_ZIPPED = tuple(f"{name}.gz" for name in _LINES)

# Documents of a file: its path, the first byte, and the byte after the last one. Of JSON lines,
# those that begin between the two; of Parquet, row groups in place of bytes.
_Piece = tuple[str, int, int]


def tokenize(
    inputs: StrPath | Sequence[StrPath],
    output: StrPath,
    tokenizer: StrPath,
    *,
    format: Format = "megatron",
    field: str = "text",
    end: str | None = None,
    dtype: TokenType | None = None,
    workers: int = 1,
    progress: Callable[[int, int, int, int, int], object] | None = None,
) -> MegatronTokens | NanoGPTTokens:
    """Tokenize text into files that `fx.tokens` reads, as `fxtrain tokens` does.

    The files do not depend on the number of processes. They appear when they are complete; until
    then, what is tokenized is kept in `OUTPUT.parts`, and the same call continues there after a
    kill. If the output of the same call is there already, nothing is done.

    Args:
        inputs: A file, several, or patterns of them, whose files are sorted. `.jsonl` and `.json`
            have an object per line, also with `.gz` at the end; `.parquet` has a document per row.
            Every other file is one document of UTF-8 text.
        output: The path of the files without `.bin` and `.idx`.
        tokenizer: A `tokenizer.json` of tokenizers, or a folder that AutoTokenizer of
            transformers reads.
        format: "megatron" writes `.bin` and `.idx`; "nanogpt" a `.bin` without a header.
        field: The field of JSON lines, or the column of Parquet files, that has the text.
        end: The token that ends each document, such as "<eos>". None adds none.
        dtype: Type of a token in the file. By default uint16, or one of 32 bits for vocabularies
            of more than 65,536.
        workers: Processes. With more than one, a script needs `if __name__ == "__main__":`.
        progress: Called after each part with the bytes of the input that are done, and all of
            them; documents with text, their tokens, and documents without text, which are left
            out.

    Returns:
        The source, for `fx.tokens`.

    Effects:
        Starts processes. Writes the files, and `OUTPUT.json`, which says how they were made.

    Raises:
        DataError: an input is missing, broken or has no text; the vocabulary has no such end token
            or is larger than the dtype; or there is an output, or a part of one, of other inputs or
            settings.
        MissingPackageError: tokenizers, transformers or pyarrow is not installed.

    Example:
        >>> import fxtrain as fx, pathlib, tempfile, tokenizers
        >>> with tempfile.TemporaryDirectory() as name:
        ...     folder = pathlib.Path(name)
        ...     words = tokenizers.models.WordLevel({"<end>": 0, "a": 1, "b": 2})
        ...     tokenizer = tokenizers.Tokenizer(words)
        ...     tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        ...     tokenizer.save(str(folder / "tokenizer.json"))
        ...     lines = [{"text": "a b a"}, {"text": "b"}]
        ...     _ = (folder / "a.jsonl").write_text("\\n".join(map(json.dumps, lines)))
        ...     source = fx.data.tokenize(
        ...         [folder / "a.jsonl"], folder / "a", folder / "tokenizer.json", end="<end>"
        ...     )
        ...     with fx.detect(env={}, device="cpu") as ctx:
        ...         loader = fx.tokens(source, ctx, length=6, batch_size=1, shuffle=False)
        ...         [batch.data["tokens"].tolist() for batch in loader]
        [[[1, 2, 1, 0, 2, 0]]]
    """
    given = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    stem, tokenizer = os.fspath(output).removesuffix(".bin"), os.fspath(tokenizer)
    encoder, end_number = _encoder(tokenizer), None
    stored_type = _token_type(encoder, tokenizer, format, dtype)
    if end is not None and (end_number := encoder.vocabulary.get(end)) is None:
        raise DataError(
            f"tokens: the tokenizer {tokenizer} has no token {end!r} to end documents. "
            f"Choose one of its vocabulary."
        )
    parts = _parts_of(os.fspath(path) for path in given)
    paths = sorted({path for _, pieces in parts for path, *_ in pieces})
    description = {
        "format": format,
        "dtype": stored_type,
        "tokenizer": encoder.digest,
        "vocabulary": encoder.words_digest,
        "vocabulary_size": encoder.size,
        "end": end_number,
        "field": field,
        "inputs": {path: [(stat := os.stat(path)).st_size, stat.st_mtime_ns] for path in paths},
        "parts": len(parts),
    }
    folder = Path(f"{stem}.parts")
    last_file = f"{stem}.idx" if format == "megatron" else f"{stem}.bin"  # of those that appear
    if os.path.exists(last_file):
        _check_same(read_description(stem), description, last_file)
    else:
        _begin(folder, description)
        total, sums = sum(size for size, _ in parts), [0, 0, 0, 0]
        files = [folder / f"{number:06d}" for number in range(len(parts))]
        jobs = [
            (tokenizer, field, end_number, stored_type, pieces, file)
            for (_, pieces), file in zip(parts, files, strict=True)
        ]
        try:
            with closing(_run(jobs, workers)) as run:
                for number, counts in run:
                    sums = [a + b for a, b in zip(sums, (parts[number][0], *counts), strict=True)]
                    if progress is not None:
                        progress(sums[0], total, *sums[1:])
        except DataError:
            # Nothing to continue, so that a corrected command may have other settings.
            if not any(file.exists() for file in files):
                shutil.rmtree(folder)
            raise
        if not sums[2]:
            raise DataError("tokens: the inputs have no text, so no file was written.")
        _join(stem, files, description | {"documents": sums[1], "tokens": sums[2]})
    if folder.exists():
        shutil.rmtree(folder)
    if format == "megatron":
        return MegatronTokens(path=stem)
    return NanoGPTTokens(path=last_file, dtype=description["dtype"], end=end_number)


class Encoder:
    """A tokenizer of tokenizers or transformers.

    Text is text: "<eos>" within it is not the token of that name.

    Attributes:
        vocabulary: Token → number.
        size: One more than the largest number.
        digest: Of the tokenizer.
        words_digest: Of its vocabulary.
    """

    def __init__(self, path: str) -> None:
        if not os.path.exists(path):
            raise DataError(
                f"tokens: no tokenizer at {path}. Pass a tokenizer.json, or a folder that "
                f"transformers reads."
            )
        self._fast: Any = None
        self._slow: Any = None
        if os.path.isdir(path):
            transformers = optional("transformers", extra="models", needed_by=f"the folder {path}")
            try:
                self._slow = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
            except (OSError, ValueError, KeyError) as error:
                raise DataError(f"tokens: {path} is no folder of a tokenizer: {error}") from error
            self._fast = getattr(self._slow, "backend_tokenizer", None)
        else:
            tokenizers = optional("tokenizers", extra="text", needed_by="fxtrain tokens")
            try:
                self._fast = tokenizers.Tokenizer.from_file(path)
            except Exception as error:  # tokenizers raises this class
                raise DataError(f"tokens: {path} is no tokenizer.json: {error}") from error
        settings = ""
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
            self._fast.encode_special_tokens = True
            settings = self._fast.to_str()
        whole = self._slow if self._fast is None else self._fast
        self.vocabulary: dict[str, int] = whole.get_vocab()
        self.size = max(self.vocabulary.values()) + 1
        words = json.dumps(sorted(self.vocabulary.items()))
        self.words_digest = hashlib.sha256(words.encode()).hexdigest()
        self.digest = hashlib.sha256(f"{words}{settings}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, on one core, without special tokens."""
        if self._fast is None:
            return self._slow.encode(text, add_special_tokens=False, split_special_tokens=True)
        # As a batch of one, which does not compute where each token was in the text.
        return self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, with special ones."""
        whole = self._slow if self._fast is None else self._fast
        return whole.decode(tokens, skip_special_tokens=False)


# One for all parts of a process.
_encoder = functools.lru_cache(maxsize=1)(Encoder)


def _token_type(encoder: Encoder, tokenizer: str, format: Format, dtype: TokenType | None) -> str:
    """The type of a token in the file."""
    if format == "megatron" and dtype not in (None, *CODES.values()):
        raise DataError(f"tokens: Megatron's format has no {dtype}. Use uint16, int32 or int64.")
    wide = "int32" if format == "megatron" else "uint32"
    chosen = dtype or ("uint16" if encoder.size <= 1 << 16 else wide)
    if encoder.size - 1 > load_numpy().iinfo(chosen).max:
        raise DataError(
            f"tokens: the vocabulary of {tokenizer} has numbers up to {encoder.size - 1}, more "
            f"than {dtype} holds. Leave the dtype out, or use int32 or int64."
        )
    return chosen


def _begin(folder: Path, description: dict[str, Any]) -> None:
    """Make the folder of the parts, or check that those in it are of the same call."""
    made = folder / "made.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if made.exists():
            _check_same(json.loads(made.read_text(encoding="utf-8")), description, str(folder))
        else:
            write_file(made, json.dumps(description))
    except OSError as error:
        raise DataError(f"tokens: cannot write {folder}: {error.strerror}.") from error


def _check_same(saved: dict[str, Any], description: dict[str, Any], what: str) -> None:
    if not saved:
        raise DataError(
            f"tokens: {what} is there already, and was not made by this command. Choose another "
            f"output."
        )
    if differ := [name for name, value in description.items() if saved.get(name) != value]:
        raise DataError(
            f"tokens: {what} is there already, and was made with another {', '.join(differ)}. "
            f"Delete it, choose another output, or use the same inputs and settings."
        )


def _run(jobs: list[tuple[Any, ...]], workers: int) -> Generator[tuple[int, tuple[int, ...]]]:
    """(part, its counts) as parts are complete; those of an earlier run first.

    Args:
        jobs: The arguments of `_tokenize_part` for each.
    """
    missing: list[int] = []
    for number, (*_, to) in enumerate(jobs):
        if to.exists():
            with to.open("rb") as file:
                yield number, _COUNTS.unpack(file.read(_COUNTS.size))
        else:
            missing.append(number)
    count = min(workers, len(missing))
    if count <= 1:
        for number in missing:
            yield number, _tokenize_part(*jobs[number])
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=spawn, initializer=_end_with_parent) as pool:
        running = {pool.submit(_tokenize_part, *jobs[number]): number for number in missing}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        except BrokenProcessPool:
            raise DataError(
                "tokens: a process ended while it tokenized, which often means that memory ran "
                "out: use fewer workers. The same command continues."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """End this process when the one that started it ends, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which ends the parent
    parent: Any = multiprocessing.parent_process()

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _tokenize_part(
    tokenizer: str, field: str, end: int | None, dtype: str, pieces: list[_Piece], to: Path
) -> tuple[int, int, int]:
    """Write a part completely: counts, the tokens of each document, and all tokens."""
    numpy = load_numpy()
    encoder, sizes, arrays, empty = _encoder(tokenizer), [], [], 0
    little = numpy.dtype(dtype).newbyteorder("<")
    ends = [] if end is None else [end]
    texts = _texts_of(pieces, field)
    while batch := list(itertools.islice(texts, _BATCH)):
        encoded = [encoder.encode(text) for text in batch]
        encoded = [tokens + ends for tokens in encoded if tokens]
        empty += len(batch) - len(encoded)
        sizes += map(len, encoded)
        arrays.append(numpy.fromiter(itertools.chain.from_iterable(encoded), little).tobytes())
    if max(sizes, default=0) > _LONGEST:
        raise DataError(f"tokens: {pieces[0][0]} has a document of {max(sizes)} tokens. Split it.")
    counts = len(sizes), sum(sizes), empty
    head = _COUNTS.pack(*counts) + numpy.array(sizes, "<i4").tobytes()
    write_file(to, b"".join([head, *arrays]))
    return counts


def _join(stem: str, parts: list[Path], description: dict[str, Any]) -> None:
    """Make the output of the parts; the file that completes it appears last."""
    numpy = load_numpy()
    sizes: list[Any] = []
    # Another process may run the same command.
    binary = parts[0].with_name(secrets.token_hex(4))
    with binary.open("wb") as file:
        for part in parts:
            with part.open("rb") as source:
                documents, *_ = _COUNTS.unpack(source.read(_COUNTS.size))
                sizes.append(numpy.frombuffer(source.read(4 * documents), "<i4"))
                shutil.copyfileobj(source, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())
    write_file(f"{stem}.json", json.dumps(description, indent=1))
    os.replace(binary, f"{stem}.bin")
    if description["format"] == "megatron":
        dtype = description["dtype"]
        code = next(number for number, name in CODES.items() if name == dtype)
        lengths = numpy.concatenate(sizes)
        count = len(lengths)
        ends = lengths.cumsum(dtype="<i8")
        starts = (ends - lengths) * numpy.dtype(dtype).itemsize
        bounds = numpy.arange(count + 1, dtype="<i8")
        head = HEAD.pack(MAGIC, 1, code, count, count + 1)
        arrays = (array.tobytes() for array in (lengths, starts, bounds))
        write_file(f"{stem}.idx", b"".join([head, *arrays]))


def _parts_of(inputs: Iterable[str]) -> list[tuple[int, list[_Piece]]]:
    """(bytes, pieces) of parts of the inputs, of 1 to 64 MiB where files can be split.

    They depend on the inputs alone.

    Raises:
        DataError: a file is missing, or there is none.
    """
    parts: list[tuple[int, list[_Piece]]] = []
    small: list[_Piece] = []
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


def _texts_of(pieces: Iterable[_Piece], field: str) -> Iterator[str]:
    """The documents of pieces, in order.

    Raises:
        DataError: a file is broken, or has no text in this field; with the line.
    """
    for path, start, stop in pieces:
        if path.endswith(".parquet"):
            yield from _rows(path, start, field)
        elif path.endswith((*_LINES, *_ZIPPED)):
            yield from _lines(path, start, stop, field)
        else:
            try:
                with open(path, "rb") as file:
                    yield file.read().decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"tokens: {path} is not UTF-8 text: {error}. Convert it, or leave it out."
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


def _pieces(path: str, size: int, most: int) -> Iterator[tuple[int, _Piece]]:
    """(bytes, piece) of a file."""
    if path.endswith(".parquet"):
        groups = open_parquet(path).num_row_groups
        for number in range(groups):
            yield size // groups, (path, number, number + 1)
        return
    step = most if path.endswith(_LINES) else max(1, size)
    for start in range(0, size, step):
        yield min(step, size - start), (path, start, min(start + step, size))


def _rows(path: str, group: int, field: str) -> Iterator[str]:
    file = open_parquet(path)
    names = file.schema_arrow.names
    if field not in names:
        raise DataError(
            f'tokens: {path} has no column "{field}"; it has {", ".join(names)}. Choose the '
            f"column of the text."
        )
    column = file.read_row_group(group, columns=[field]).column(0)
    for number, value in enumerate(column):
        try:
            yield _checked(value.as_py(), field)
        except _WrongLine as error:
            where = f"{path}, row group {group}, row {number}"
            raise DataError(f"tokens: {where} {error}") from error


def _lines(path: str, at: int, stop: int, field: str) -> Iterator[str]:
    """The documents whose lines begin between two bytes."""
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
