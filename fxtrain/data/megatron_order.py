"""Rows of tokens in the order of Megatron-core 0.16: its document, sample and shuffle index.

Megatron-core builds these arrays once and keeps them in files; here each process computes them.
"""

import functools
import math
from typing import Any

import attrs

from fxtrain._optional import optional
from fxtrain.data.token_folders import source_states
from fxtrain.data.token_maps import FileState, opened, read_by_source, separate_documents
from fxtrain.errors import DataError
from fxtrain.state.token_files import Blend, MegatronOrder, MegatronTokens, TokenSource

_OWN_SHUFFLE = 0.80  # a last epoch of less than this is shuffled by itself
_SURPLUS = 0.005  # of the samples of a source in a blend, `mid_level_dataset_surplus`
_PARTS = ("train", "valid", "test")
_ORDERS = 64  # sources whose orders a process keeps


@attrs.frozen(kw_only=True, eq=False)
class MegatronRows:
    """Rows by their number; pickled without the arrays, which each process computes.

    Attributes:
        sources: The sources, and the samples that are asked of each; None is one epoch.
        weights: Of the sources of a blend; empty for a single source.
        length: Tokens of a row.
        seed: Megatron's `--seed`.
        how: The order.
        separate: Whether documents are kept apart.
    """

    sources: tuple[tuple[MegatronTokens, tuple[FileState, ...], int | None], ...]
    weights: tuple[float, ...]
    length: int
    seed: int
    how: MegatronOrder
    separate: bool

    def __len__(self) -> int:
        if self.how.samples is not None:
            return self.how.samples
        return len(self._order(0).shuffled)

    def _order(self, number: int) -> "_Order":
        source, states, samples = self.sources[number]
        return _order(source, states, samples, self.length, self.seed, self.how)

    def check(self) -> None:
        """Compute the order.

        Raises:
            DataError: a source has too few tokens, or a blend asks more of it than Megatron builds.
        """
        if not self.weights:
            self._order(0)
            return
        numpy = _numpy()
        assert self.how.samples is not None
        chosen, _ = _blended(self.weights, self.how.samples)
        for number, asked in enumerate(numpy.bincount(chosen, minlength=len(self.sources))):
            if asked > len(self._order(number).shuffled):
                raise DataError(
                    f"tokens: this blend asks {asked} rows of {self.sources[number][0].path}, and "
                    f"Megatron builds {len(self._order(number).shuffled)}. Ask for more samples."
                )

    def read(self, numbers: Any) -> dict[str, Any]:
        """Rows by number."""
        if not self.weights:
            return self._read(0, numbers)
        assert self.how.samples is not None
        chosen, samples = _blended(self.weights, self.how.samples)
        return read_by_source(
            chosen[numbers].astype("i8"),
            lambda number, here: self._read(number, samples[numbers[here]]),
        )

    def _read(self, number: int, samples: Any) -> dict[str, Any]:
        numpy, length = _numpy(), self.length
        order = self._order(number)
        file = opened(*self.sources[number][:2])
        begins = order.shuffled[samples].astype("i8") * length
        # Of each row, and the token after it: its first sequence, and the one after its last.
        first = numpy.searchsorted(order.ends, begins, side="right")
        last = numpy.searchsorted(order.ends, begins + length, side="right") + 1
        counts = last - first
        row = numpy.repeat(numpy.arange(len(begins)), counts)
        at = numpy.arange(len(row)) + numpy.repeat(first - (counts.cumsum() - counts), counts)
        stops, ids = order.ends[at], order.ids[at]
        pointers = file.pointers[ids] // file.tokens.itemsize
        starts = stops - _sizes(file, ids)
        low = numpy.maximum(starts, begins[row])
        sizes = numpy.minimum(stops, (begins + length + 1)[row]) - low
        tokens = file.gather(pointers + low - starts, sizes).reshape(len(begins), length + 1)
        batch = {"tokens": tokens[:, :-1].astype("i8"), "labels": tokens[:, 1:].astype("i8")}
        if self.separate:
            new = numpy.zeros(tokens.shape, bool)  # where a sequence starts
            inside = (low - begins[row])[sizes > 0]
            new[row[sizes > 0], inside] = True
            separate_documents(batch, new)
        return batch


def megatron_rows(
    source: TokenSource | Blend, length: int, seed: int, how: MegatronOrder, *, separate: bool
) -> MegatronRows:
    """The rows of a source, or of a blend with constant weights.

    Raises:
        DataError: the sources are not Megatron's, or the blend has no number of samples, a schedule
            or a weight of 0.
    """
    parts = source.parts if isinstance(source, Blend) else ()
    given = [part.source for part in parts] if parts else [source]
    sources = [tokens for tokens in given if isinstance(tokens, MegatronTokens)]
    if len(sources) < len(given):
        raise DataError(
            "tokens: the order of Megatron is that of its own files. Pass fx.data.MegatronTokens."
        )
    weights: list[float] = []
    samples: list[int | None] = [how.samples]
    if parts:
        weights = [
            part.weight for part in parts if not isinstance(part.weight, tuple) and part.weight
        ]
        if len(weights) < len(parts) or how.samples is None:
            raise DataError(
                "tokens: a blend of Megatron has constant weights above 0 and a number of samples. "
                "Use fx.data.MegatronOrder(samples=...), or fx.data.Blend without `compatible`."
            )
        weights = _normalized(weights)
        asked = [math.ceil(how.samples * weight) for weight in weights]
        samples = [math.ceil(count * (1 + _SURPLUS)) for count in asked]
        weights = _normalized(weights)
    rows = MegatronRows(
        sources=tuple(
            (tokens, source_states(tokens), count)
            for tokens, count in zip(sources, samples, strict=True)
        ),
        weights=tuple(weights),
        length=length,
        seed=seed,
        how=how,
        separate=separate,
    )
    rows.check()
    return rows


@attrs.frozen(kw_only=True, eq=False)
class _Order:
    """The order of the rows of a source.

    Attributes:
        ids: int32, sequences in the order in which their tokens are concatenated, over all epochs.
        ends: int64, the tokens up to the end of each.
        shuffled: For each row, its number in the concatenated tokens.
    """

    ids: Any
    ends: Any
    shuffled: Any


@functools.lru_cache(maxsize=_ORDERS)
def _order(
    source: MegatronTokens,
    states: tuple[FileState, ...],
    samples: int | None,
    length: int,
    seed: int,
    how: MegatronOrder,
) -> _Order:
    numpy = _numpy()
    file = opened(source, states)
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
    return _Order(
        ids=ids,
        ends=_sizes(file, ids).cumsum(),
        shuffled=numpy.concatenate(shuffled),
    )


@functools.lru_cache(maxsize=4)
def _blended(weights: tuple[float, ...], rows: int) -> tuple[Any, Any]:
    """For each row of a blend, its source, and which of its samples."""
    numpy = _numpy()
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
    numpy = _numpy()
    after = sequences + 1
    final = after == len(file.pointers)
    ends = numpy.where(final, file.tokens.nbytes, file.pointers[after - final])
    return (ends - file.pointers[sequences]) // file.tokens.itemsize


def _normalized(weights: Any) -> list[float]:
    numpy = _numpy()
    weights = numpy.array(weights, "f8")
    return (weights / weights.sum()).tolist()


def _numpy() -> Any:
    return optional("numpy", extra="tokens", needed_by="fx.tokens")
