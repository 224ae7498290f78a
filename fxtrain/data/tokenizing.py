"""Text to files of tokens: in several processes, resumable and atomic."""

import functools
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
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import attrs

from fxtrain._optional import optional
from fxtrain._reading import StrPath, write_file
from fxtrain.data.text_documents import Piece, parts_of, texts_of
from fxtrain.data.token_maps import CODES, HEAD, MAGIC
from fxtrain.errors import DataError
from fxtrain.state.token_files import MegatronTokens, NanoGPTTokens

Format = Literal["megatron", "nanogpt"]
TokenType = Literal["uint16", "int32", "uint32", "int64"]

_BATCH = 256  # documents that are tokenized at a time
_COUNTS = struct.Struct("<3Q")  # documents, tokens, documents without text
_LONGEST = (1 << 31) - 1  # tokens of a sequence in Megatron's index


@attrs.frozen(kw_only=True)
class Tokenizing:
    """What to tokenize, and how; the arguments of `tokenize`."""

    inputs: tuple[str, ...]
    output: str
    tokenizer: str
    format: Format = "megatron"
    field: str = "text"
    end: str | None = None
    dtype: TokenType | None = None
    workers: int = 1

    @property
    def stem(self) -> str:
        """The path of all files of the output, without what follows the dot."""
        return self.output.removesuffix(".bin")

    @property
    def last_file(self) -> str:
        """The file that appears when all others are there."""
        return f"{self.stem}.idx" if self.format == "megatron" else f"{self.stem}.bin"


@attrs.frozen(kw_only=True)
class Progress:
    """What is tokenized so far.

    Attributes:
        done: Bytes of the input.
        total: All of its bytes.
        documents: Documents with text.
        tokens: Their tokens.
        empty: Documents without text, which are left out.
    """

    done: int
    total: int
    documents: int
    tokens: int
    empty: int


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
    paths = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    job = Tokenizing(
        inputs=tuple(os.fspath(path) for path in paths),
        output=os.fspath(output),
        tokenizer=os.fspath(tokenizer),
        format=format,
        field=field,
        end=end,
        dtype=dtype,
        workers=workers,
    )
    for _ in tokenize_parts(job):
        pass
    if job.format == "megatron":
        return MegatronTokens(path=job.stem)
    saved = read_description(job.stem)
    return NanoGPTTokens(path=f"{job.stem}.bin", dtype=saved["dtype"], end=saved["end"])


def tokenize_parts(job: Tokenizing) -> Iterator[Progress]:
    """`tokenize`, with the progress after each part."""
    encoder = _encoder(job)
    parts = parts_of(job.inputs)
    description = _description(job, encoder, parts)
    folder = Path(f"{job.stem}.parts")
    if os.path.exists(job.last_file):
        _check_same(read_description(job.stem), description, job.last_file)
    else:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            made = folder / "made.json"
            if made.exists():
                _check_same(json.loads(made.read_text(encoding="utf-8")), description, str(folder))
            else:
                write_file(made, json.dumps(description))
        except OSError as error:
            raise DataError(f"tokens: cannot write {folder}: {error.strerror}.") from error
        total, sums = sum(size for size, _ in parts), [0, 0, 0, 0]
        files = [folder / f"{number:06d}" for number in range(len(parts))]
        try:
            with closing(_run(job, parts, files)) as run:
                for number, counts in run:
                    sums = [a + b for a, b in zip(sums, (parts[number][0], *counts), strict=True)]
                    done, documents, tokens, empty = sums
                    yield Progress(
                        done=done, total=total, documents=documents, tokens=tokens, empty=empty
                    )
        except DataError:
            # Nothing to continue, so that a corrected command may have other settings.
            if not any(file.exists() for file in files):
                shutil.rmtree(folder)
            raise
        if not sums[2]:
            raise DataError("tokens: the inputs have no text, so no file was written.")
        _join(job, encoder, files, description | {"documents": sums[1], "tokens": sums[2]})
    if folder.exists():
        shutil.rmtree(folder)


def read_description(stem: str) -> dict[str, Any]:
    """How the files of tokens at a path were made; empty if that is not known."""
    try:
        return json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


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
_load = functools.lru_cache(maxsize=1)(Encoder)


def _encoder(job: Tokenizing) -> Encoder:
    encoder = _load(job.tokenizer)
    if job.end is not None and job.end not in encoder.vocabulary:
        raise DataError(
            f"tokens: the tokenizer {job.tokenizer} has no token {job.end!r} to end documents. "
            f"Choose one of its vocabulary."
        )
    numpy = _numpy()
    if job.format == "megatron" and job.dtype not in (None, *CODES.values()):
        raise DataError(
            f"tokens: Megatron's format has no {job.dtype}. Use uint16, int32 or int64."
        )
    if encoder.size - 1 > numpy.iinfo(_dtype(job, encoder)).max:
        raise DataError(
            f"tokens: the vocabulary of {job.tokenizer} has numbers up to {encoder.size - 1}, more "
            f"than {job.dtype} holds. Leave the dtype out, or use int32 or int64."
        )
    return encoder


def _dtype(job: Tokenizing, encoder: Encoder) -> str:
    wide = "int32" if job.format == "megatron" else "uint32"
    return job.dtype or ("uint16" if encoder.size <= 1 << 16 else wide)


def _description(
    job: Tokenizing, encoder: Encoder, parts: list[tuple[int, list[Piece]]]
) -> dict[str, Any]:
    paths = {piece.path for _, pieces in parts for piece in pieces}
    return {
        "format": job.format,
        "dtype": _dtype(job, encoder),
        "tokenizer": encoder.digest,
        "vocabulary": encoder.words_digest,
        "vocabulary_size": encoder.size,
        "end": None if job.end is None else encoder.vocabulary[job.end],
        "field": job.field,
        "inputs": {
            path: [stat.st_size, stat.st_mtime_ns]
            for path, stat in ((path, os.stat(path)) for path in sorted(paths))
        },
        "parts": len(parts),
    }


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


def _run(
    job: Tokenizing, parts: list[tuple[int, list[Piece]]], files: list[Path]
) -> Generator[tuple[int, tuple[int, ...]]]:
    """(part, its counts) as parts are complete; those of an earlier run first."""
    missing: list[int] = []
    for number, file in enumerate(files):
        if file.exists():
            yield number, _read_counts(file)
        else:
            missing.append(number)
    count = min(job.workers, len(missing))
    if count <= 1:
        for number in missing:
            yield number, _tokenize_part(job, parts[number][1], files[number])
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=spawn, initializer=_end_with_parent) as pool:
        running = {
            pool.submit(_tokenize_part, job, parts[number][1], files[number]): number
            for number in missing
        }
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


def _tokenize_part(job: Tokenizing, pieces: list[Piece], to: Path) -> tuple[int, int, int]:
    """Write a part completely: counts, the tokens of each document, and all tokens."""
    numpy = _numpy()
    encoder, sizes, arrays, empty = _encoder(job), [], [], 0
    dtype = numpy.dtype(_dtype(job, encoder)).newbyteorder("<")
    end = [] if job.end is None else [encoder.vocabulary[job.end]]
    texts = texts_of(pieces, job.field)
    while batch := list(itertools.islice(texts, _BATCH)):
        encoded = [encoder.encode(text) for text in batch]
        encoded = [tokens + end for tokens in encoded if tokens]
        empty += len(batch) - len(encoded)
        sizes += map(len, encoded)
        arrays.append(numpy.fromiter(itertools.chain.from_iterable(encoded), dtype).tobytes())
    if max(sizes, default=0) > _LONGEST:
        raise DataError(
            f"tokens: {pieces[0].path} has a document of {max(sizes)} tokens. Split it."
        )
    counts = len(sizes), sum(sizes), empty
    head = _COUNTS.pack(*counts) + numpy.array(sizes, "<i4").tobytes()
    write_file(to, b"".join([head, *arrays]))
    return counts


def _read_counts(path: Path) -> tuple[int, ...]:
    with path.open("rb") as file:
        return _COUNTS.unpack(file.read(_COUNTS.size))


def _join(
    job: Tokenizing, encoder: Encoder, parts: list[Path], description: dict[str, Any]
) -> None:
    """Make the output of the parts; the file that completes it appears last."""
    numpy = _numpy()
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
    write_file(f"{job.stem}.json", json.dumps(description, indent=1))
    os.replace(binary, f"{job.stem}.bin")
    if job.format == "megatron":
        dtype = _dtype(job, encoder)
        code = next(number for number, name in CODES.items() if name == dtype)
        lengths = numpy.concatenate(sizes)
        count = len(lengths)
        ends = lengths.cumsum(dtype="<i8")
        starts = (ends - lengths) * numpy.dtype(dtype).itemsize
        bounds = numpy.arange(count + 1, dtype="<i8")
        head = HEAD.pack(MAGIC, 1, code, count, count + 1)
        arrays = (array.tobytes() for array in (lengths, starts, bounds))
        write_file(f"{job.stem}.idx", b"".join([head, *arrays]))


def _numpy() -> Any:
    return optional("numpy", extra="text", needed_by="fxtrain tokens")
