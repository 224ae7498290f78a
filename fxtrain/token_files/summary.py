"""What files of tokens hold: documents, their lengths, and how rows would cut them."""

import os
from collections.abc import Iterator
from typing import Any

from fxtrain.errors import DataError
from fxtrain.token_files.folders import open_tokens, source_states
from fxtrain.token_files.maps import load_numpy, read_description
from fxtrain.token_files.records import (
    BestFit,
    ColumnTokens,
    DatatroveTokens,
    MDSTokens,
    MegatronTokens,
    NanoGPTTokens,
    NumPyTokens,
    TokenSource,
)
from fxtrain.token_files.rows import planned
from fxtrain.token_files.tokenizing import Encoder

_BLOCK = 1 << 24  # tokens whose documents are counted at a time
_SAMPLE = 64  # tokens


def find_source(path: str, column: str | None, dtype: Any, end: int | None) -> TokenSource:
    """The source at a path, by the names of its files; `dtype` and `end` where no file says them.

    Raises:
        DataError: no format has such names.
    """
    stem = path.removesuffix(".idx").removesuffix(".bin")
    if os.path.exists(f"{stem}.idx"):
        return MegatronTokens(path=stem)
    if path.endswith(".bin"):
        saved = read_description(stem)
        dtype = dtype or saved.get("dtype", "uint16")
        return NanoGPTTokens(path=path, dtype=dtype, end=saved.get("end") if end is None else end)
    names = os.listdir(path) if os.path.isdir(path) else [path]

    def has(*suffixes: str) -> bool:
        return any(name.endswith(suffixes) for name in names)

    if "index.json" in names:
        return MDSTokens(path=path, column=column or "tokens", dtype=dtype)
    if has(".ds"):
        return DatatroveTokens(path=path, dtype=dtype or "uint16")
    if has(".npy"):
        return NumPyTokens(path=path)
    if has(".parquet", ".arrow"):
        return ColumnTokens(path=path, column=column or "input_ids")
    raise DataError(
        f"tokens: no format of tokens is known by the name {path}. Pass the path of Megatron's "
        f"files, a .bin, .ds, .npy, .parquet or .arrow file, or a folder of them or of MDS shards."
    )


def summarize(source: TokenSource, length: int | None) -> dict[str, Any]:
    """Counts, a histogram of lengths, the first tokens, and shares for rows of a length.

    Returns:
        `documents`, `tokens`, `dtype`; `lengths`, documents by ranges of their tokens; `sample`,
        the first tokens. With a length also `rows`; `padding`, the share of all places; and of all
        documents the shares `longer_than_a_row`, and, of those that fit into a row,
        `cut_by_concatenation` and `cut_by_best_fit`.

    Raises:
        DataError: the files are not what their headers say.
    """
    numpy = load_numpy()
    states = source_states(source)
    file = open_tokens(source, states)
    bins = numpy.zeros(65, "i8")
    concatenated = longer = 0
    for starts, sizes in _documents(file):
        # 0 for no token, 1 for one, 2 for two or three, and so on by powers of two.
        bins += numpy.bincount(numpy.frexp(sizes.astype("f8"))[1], minlength=65)
        if length is not None:
            cut = starts // length != (starts + sizes - 1) // length
            concatenated += int((cut & (sizes > 0) & (sizes <= length)).sum())
            longer += int((sizes > length).sum())
    documents = int(bins.sum())
    used = bins.nonzero()[0].tolist()
    summary: dict[str, Any] = {
        "documents": documents,
        "tokens": file.size,
        "dtype": str(file.dtype),
        "lengths": {_range(k): int(bins[k]) for k in range(used[0], used[-1] + 1)},
        "sample": file.gather(numpy.array([0]), numpy.array([min(file.size, _SAMPLE)])).tolist(),
    }
    if length is not None:
        rows, window = -(-file.size // length), BestFit().window_rows
        packed = [
            planned(source, states, window, length, number) for number in range(-(-rows // window))
        ]
        summary |= {
            "rows": rows,
            "padding": 1 - file.size / (rows * length),
            "longer_than_a_row": longer / documents,
            "cut_by_concatenation": concatenated / documents,
            "cut_by_best_fit": sum(plan.cut for plan in packed) / documents,
        }
    return summary


def decoded(tokenizer: str, path: str, tokens: list[int]) -> str:
    """The text of tokens of a file.

    Raises:
        DataError: the file was made with another tokenizer, or has tokens that are not in its
            vocabulary.
    """
    encoder = Encoder(tokenizer)
    saved = read_description(path.removesuffix(".idx").removesuffix(".bin"))
    if saved and saved["vocabulary"] != encoder.words_digest:
        raise DataError(
            f"tokens: {path} was made with a tokenizer of {saved['vocabulary_size']} tokens, which "
            f"is not {tokenizer} ({encoder.size}). Pass the tokenizer that made it."
        )
    if tokens and max(tokens) >= encoder.size:
        raise DataError(
            f"tokens: {path} has a token {max(tokens)}, and the vocabulary of {tokenizer} ends at "
            f"{encoder.size - 1}. Pass the tokenizer that made it, or another dtype."
        )
    return encoder.decode(tokens)


def _range(number: int) -> str:
    low, high = (1 << number) >> 1, (1 << number) - 1
    return f"{low:,}" if low >= high else f"{low:,} to {high:,}"


def _documents(file: Any) -> Iterator[tuple[Any, Any]]:
    """The first tokens and the sizes of all documents, in blocks."""
    numpy = load_numpy()
    before = numpy.zeros(0, "i8")
    for begin in range(0, file.size, _BLOCK):
        _, places = file.starts(numpy.array([begin]), min(_BLOCK, file.size - begin))
        starts = numpy.concatenate([before, begin + places])
        yield starts[:-1], numpy.diff(starts)
        before = starts[-1:]
    yield before, file.size - before
