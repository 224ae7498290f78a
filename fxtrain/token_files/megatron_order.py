"""Rows of tokens in the order of Megatron-core 0.16: its document, sample and shuffle index.

Megatron-core builds these arrays once and keeps them in files; here each process computes them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from fxtrain.errors import DataError
from fxtrain.token_files.folders import open_tokens, source_states
from fxtrain.token_files.maps import FileState, load_numpy, read_by_source, separate_documents
from fxtrain.token_files.records import Blend, MegatronOrder, MegatronTokens, TokenSource

_OWN_SHUFFLE = 0.80  # a last epoch of less than this is shuffled by itself
_SURPLUS = 0.005  # of the samples of a source in a blend, `mid_level_dataset_surplus`
_PARTS = ("train", "valid", "test")
_ORDERS = 64  # sources whose orders a process keeps

# Numbers of rows → their values by name.
Reader = Callable[[Any], dict[str, Any]]


class _Asked(NamedTuple):
    """What is asked of a source."""

    source: MegatronTokens  # the source, and its files as they were
    states: tuple[FileState, ...]
    samples: int | None  # rows; None is one epoch
    length: int  # tokens of a row
    seed: int  # Megatron's `--seed`
    how: MegatronOrder


def megatron_rows(
    source: TokenSource | Blend, length: int, seed: int, how: MegatronOrder, *, separate: bool
) -> tuple[int, Reader]:
    """The rows of a source, or of a blend with constant weights: how many, and how to read them.

    Raises:
        DataError: the sources are not Megatron's, or have too few tokens; or the blend has no
            number of samples, a schedule or a weight of 0, or asks for more than Megatron builds.
    """
    numpy = load_numpy()
    parts = source.parts if isinstance(source, Blend) else ()
    given = [part.source for part in parts] if parts else [source]
    sources = [tokens for tokens in given if isinstance(tokens, MegatronTokens)]
    if len(sources) < len(given):
        raise DataError(
            "tokens: the order of Megatron is that of its own files. Pass fx.data.MegatronTokens."
        )

    def ask(tokens: MegatronTokens, samples: int | None) -> _Asked:
        return _Asked(tokens, source_states(tokens), samples, length, seed, how)

    if not parts:
        asked = ask(sources[0], how.samples)
        *_, shuffled = _order(asked)
        return how.samples or len(shuffled), functools.partial(_read, asked, separate=separate)
    weights = [part.weight for part in parts if not isinstance(part.weight, tuple) and part.weight]
    if len(weights) < len(parts) or how.samples is None:
        raise DataError(
            "tokens: a blend of Megatron has constant weights above 0 and a number of samples. "
            "Use fx.data.MegatronOrder(samples=...), or fx.data.Blend without `compatible`."
        )
    weights = _normalized(weights)
    counts = [math.ceil(math.ceil(how.samples * weight) * (1 + _SURPLUS)) for weight in weights]
    asked = [ask(tokens, count) for tokens, count in zip(sources, counts, strict=True)]
    weights = tuple(_normalized(weights))
    chosen, _ = _blended(weights, how.samples)
    for each, count in zip(asked, numpy.bincount(chosen, minlength=len(asked)), strict=True):
        *_, shuffled = _order(each)
        if count > len(shuffled):
            raise DataError(
                f"tokens: this blend asks {count} rows of {each.source.path}, and Megatron builds "
                f"{len(shuffled)}. Ask for more samples."
            )
    return how.samples, functools.partial(
        _read_blend, weights, how.samples, asked, separate=separate
    )


def _read_blend(
    weights: tuple[float, ...], rows: int, asked: list[_Asked], numbers: Any, *, separate: bool
) -> dict[str, Any]:
    chosen, samples = _blended(weights, rows)
    return read_by_source(
        chosen[numbers].astype("i8"),
        lambda source, here: _read(asked[source], samples[numbers[here]], separate=separate),
    )


def _read(asked: _Asked, samples: Any, *, separate: bool) -> dict[str, Any]:
    """Rows of a source by number."""
    numpy, length = load_numpy(), asked.length
    ids, ends, shuffled = _order(asked)
    file: Any = open_tokens(asked.source, asked.states)
    file.check()
    begins = shuffled[samples].astype("i8") * length
    # Of each row, and the token after it: its first sequence, and the one after its last.
    first = numpy.searchsorted(ends, begins, side="right")
    last = numpy.searchsorted(ends, begins + length, side="right") + 1
    counts = last - first
    row = numpy.repeat(numpy.arange(len(begins)), counts)
    at = numpy.arange(len(row)) + numpy.repeat(first - (counts.cumsum() - counts), counts)
    stops, sequence = ends[at], ids[at]
    pointers = file.pointers[sequence] // file.tokens.itemsize
    starts = stops - _sizes(file, sequence)
    low = numpy.maximum(starts, begins[row])
    sizes = numpy.minimum(stops, (begins + length + 1)[row]) - low
    tokens = file.gather(pointers + low - starts, sizes).reshape(len(begins), length + 1)
    batch = {"tokens": tokens[:, :-1].astype("i8"), "labels": tokens[:, 1:].astype("i8")}
    if separate:
        new = numpy.zeros(tokens.shape, bool)  # where a sequence starts
        inside = (low - begins[row])[sizes > 0]
        new[row[sizes > 0], inside] = True
        separate_documents(batch, new)
    return batch


@functools.lru_cache(maxsize=_ORDERS)
def _order(asked: _Asked) -> tuple[Any, Any, Any]:
    """The order of the rows of a source.

    Returns:
        int32 sequences in the order in which their tokens are concatenated, over all epochs;
        int64, the tokens up to the end of each; and for each row, its number in these tokens.
    """
    numpy, (source, states, samples, length, seed, how) = load_numpy(), asked
    file: Any = open_tokens(source, states)
    sequences = len(file.pointers)
    shares = _normalized(how.split)
    number = _PARTS.index(how.part)
    low = sum(shares[:number])
    high = low + shares[number] if number < len(shares) else low
    begin, stop = round(low * sequences), round(high * sequences)
    documents = numpy.arange(begin, stop, dtype="i4")
    tokens = int(_sizes(file, documents).sum())
    of_epoch = (tokens - 1) // length
    if of_epoch < 1:
        raise DataError(
            f"tokens: the {how.part} part of {source.path} has {stop - begin} sequences with "
            f"{tokens} tokens, fewer than a row of {length}. Use shorter rows, or another split."
        )
    epochs = 1 if samples is None else max(1, -(-(samples * length + 1) // tokens))
    before_last = ((epochs - 1) * tokens - 1) // length
    rows = (epochs * tokens - 1) // length
    apart = (
        epochs > 1 and samples is not None and samples - before_last < int(_OWN_SHUFFLE * of_epoch)
    )
    random = numpy.random.RandomState(seed)
    ids = [numpy.tile(documents, epochs - apart)]
    if apart:
        ids.append(documents.copy())
    shuffled = [numpy.arange(rows, dtype="u4" if rows < 1 << 32 else "i8")]
    if apart:
        shuffled = [shuffled[0][:before_last], shuffled[0][before_last:]]
    for array in (*ids, *shuffled):
        random.shuffle(array)
    ids = numpy.concatenate(ids)
    return ids, _sizes(file, ids).cumsum(), numpy.concatenate(shuffled)


@functools.lru_cache(maxsize=4)
def _blended(weights: tuple[float, ...], rows: int) -> tuple[Any, Any]:
    """For each row of a blend, its source, and which of its samples."""
    numpy = load_numpy()
    chosen = numpy.empty(rows, "i2")
    read = [0.0] * len(weights)
    sources = range(len(weights))
    for row in range(rows):
        at = max(row, 1)
        behind = [weights[source] * at - read[source] for source in sources]
        source = behind.index(max(behind))
        chosen[row] = source
        read[source] += 1.0
    samples = numpy.empty(rows, "i8")
    for source in sources:
        here = chosen == source
        samples[here] = numpy.arange(here.sum())
    return chosen, samples


def _sizes(file: Any, sequences: Any) -> Any:
    """Tokens of sequences, int64."""
    numpy = load_numpy()
    after = sequences + 1
    final = after == len(file.pointers)
    ends = numpy.where(final, file.tokens.nbytes, file.pointers[after - final])
    return (ends - file.pointers[sequences]) // file.tokens.itemsize


def _normalized(weights: Any) -> list[float]:
    numpy = load_numpy()
    weights = numpy.array(weights, "f8")
    return (weights / weights.sum()).tolist()
