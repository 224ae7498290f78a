"""Rows of a fixed length, cut from files of tokens that stay on disk."""

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fxtrain.data.fetch import collate_nothing
from fxtrain.data.order import BlockSampler
from fxtrain.data.order_texts import KnownRows
from fxtrain.data.sharded_loader import Sharded
from fxtrain.data.sharding import shard
from fxtrain.errors import DataError, PlanError
from fxtrain.ops.plan_agreement import plan_for
from fxtrain.state import DistContext, Plan
from fxtrain.token_files.blends import BlendOrder
from fxtrain.token_files.folders import open_tokens, source_states, source_text
from fxtrain.token_files.maps import (
    NO_LABEL,
    FileState,
    load_numpy,
    read_by_source,
    separate_documents,
)
from fxtrain.token_files.megatron_order import Reader, megatron_rows
from fxtrain.token_files.records import BestFit, Blend, MegatronOrder, NanoGPTTokens, TokenSource

_PADDING = {"tokens": 0, "labels": NO_LABEL, "positions": 0, "documents": -1}
_PLANS = 256  # windows whose plans a process keeps


def tokens(
    source: TokenSource | Blend,
    ctx: DistContext,
    plan: Plan | None = None,
    *,
    length: int,
    batch_size: int,
    shuffle: bool = True,
    documents: bool = False,
    packing: BestFit | None = None,
    compatible: Literal["megatron"] | MegatronOrder | None = None,
    workers: int = 0,
) -> Sharded[dict[str, Tensor]]:
    """Split rows of tokens over the ranks.

    The documents of the source are concatenated and cut into rows of `length` tokens, or packed by
    best fit. Rows are computed from their number: there is no cache and no build, and a start or a
    resume at any row reads the header and a few entries of the index. Order, ranks and cursor are
    those of `fx.shard`.

    Args:
        source: Where the tokens are; mapped into memory, not read whole. Or a blend of sources,
            which needs `loader.state()` beside the position to be resumed, as `fx.fit` saves it.
        ctx: The ranks, as in `fx.shard`.
        plan: As in `fx.shard`.
        length: Tokens of a row.
        batch_size: Rows of a batch, per rank or of all ranks, as the plan says.
        shuffle: Permute the rows, by the seed of the plan and the epoch.
        documents: Keep documents apart: labels end at their ends, and a batch also has
            `positions` and `documents`. By default, as in the training of Megatron and nanoGPT,
            the last token of a document predicts the first of the next one.
        packing: Pack documents into rows by best fit, in place of cutting the concatenated
            documents; keeps them apart, as `documents` does.
        compatible: `MegatronOrder`, or "megatron" for its defaults: the rows of Megatron-core, in
            its order, of its own files. All epochs of a run are part of that order, which
            `shuffle` does not change.
        workers: Processes that read, as `num_workers` of a DataLoader. They cost more than a
            batch of tokens in memory; use them where reads of the disk take long.

    Returns:
        A loader like that of `fx.shard`. `batch.data` has int64 tensors of shape
        `(rows, length)`: `tokens`, and `labels`, the token after each of them or -100 where there
        is none. With `documents`, also int64 `positions`, which restart with every document and
        row, and int32 `documents`, the number of the document in its row, from 0. After the last
        token of the source, the last row is padded: `tokens` and `positions` are 0, `labels` -100
        and `documents` -1. Of a blend, also int64 `source`, of shape `(rows,)`: the number of the
        part that gave the row.

    Effects:
        Maps the files, and those of `fx.shard`.

    Raises:
        DataError: a file is missing or empty, its header and its size disagree, or documents are
            kept apart and their ends are unknown; or those of `fx.shard`.
        PlanError: documents are kept apart under context parallelism.
        MissingPackageError: numpy is not installed.

    Example:
        >>> import array, fxtrain as fx, pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder, fx.detect(env={}, device="cpu") as ctx:
        ...     path = pathlib.Path(folder, "train.bin")
        ...     _ = path.write_bytes(array.array("H", [5, 6, 0, 7, 8, 9, 0]).tobytes())
        ...     source = fx.data.NanoGPTTokens(path=str(path), end=0)
        ...     for batch in fx.tokens(source, ctx, length=4, batch_size=1, shuffle=False):
        ...         batch.data["tokens"].tolist(), batch.data["labels"].tolist()
        ...     loader = fx.tokens(source, ctx, length=7, batch_size=1, documents=True)
        ...     [batch.data["labels"].tolist() for batch in loader]
        ([[5, 6, 0, 7]], [[6, 0, 7, 8]])
        ([[8, 9, 0, 0]], [[9, 0, -100, -100]])
        [[[6, 0, -100, 8, 9, 0, -100]]]
    """
    for name, value, least in (
        ("length", length, 1),
        ("batch_size", batch_size, 1),
        ("workers", workers, 0),
    ):
        if type(value) is not int or value < least:
            raise DataError(f"tokens({name}={value!r}): pass a number, {least} or more.")
    how = MegatronOrder() if compatible == "megatron" else compatible
    _check_types(source, packing, how)
    plan = plan_for("tokens", ctx, plan)
    if (documents or packing) and plan.context and ctx.axis("context").world_size > 1:
        raise PlanError(
            "tokens: documents are kept apart, and the plan splits sequences with CP, whose ring "
            "attention has no mask of documents: tokens would attend to other documents. Use "
            "documents=False without packing, or a mesh without a context axis."
        )
    if how is not None:
        if packing is not None:
            raise DataError(
                "tokens: Megatron has no best-fit packing. Use either compatible or packing."
            )
        parts = [megatron_rows(source, length, plan.seed, how, separate=documents)]
        text = f"{length} tokens in the order {how} of seed {plan.seed}, of {_texts(source)}"
        return shard(_loader(_Rows(parts, text), batch_size, workers), ctx, plan)
    blend = source if isinstance(source, Blend) else None
    sources = [part.source for part in source.parts] if isinstance(source, Blend) else [source]
    parts = [_rows_of(each, length, packing, separate=documents) for each in sources]
    counts, order = [count for count, _ in parts], {}
    cut = f"{length} tokens of " if packing is None else f"{length} tokens packed by {packing} of "
    text = cut + _texts(source)
    block = packing.window_rows * packing.shuffle_windows if packing else max(counts)
    if blend is not None:
        texts = [cut + _texts(part.source) for part in blend.parts]
        order["sampler"] = BlendOrder(blend, counts, texts, shuffle=shuffle, block=block)
    elif packing is not None and shuffle:
        order["sampler"] = BlockSampler(counts[0], block)
    else:
        order["shuffle"] = shuffle
    rows = _Rows(parts, text, blended=blend is not None)
    return shard(_loader(rows, batch_size, workers, **order), ctx, plan)


def _check_types(source: Any, packing: Any, how: Any) -> None:
    if not isinstance(source, TokenSource | Blend):
        raise DataError(
            f"tokens: source is a {type(source).__name__}. Pass fx.data.MegatronTokens(path=...), "
            f"another source of fx.data, or an fx.data.Blend."
        )
    for name, value, kind in (("packing", packing, BestFit), ("compatible", how, MegatronOrder)):
        if not isinstance(value, kind | None):
            raise DataError(f"tokens({name}={value!r}): pass an fx.data.{kind.__name__}, or None.")


def _rows_of(
    source: TokenSource, length: int, packing: BestFit | None, *, separate: bool
) -> tuple[int, Reader]:
    """How many rows a source has, and how to read them."""
    if (separate or packing) and isinstance(source, NanoGPTTokens) and source.end is None:
        raise DataError(
            f"tokens: documents are kept apart, and the ends of those in {source.path} are "
            f"unknown. Pass NanoGPTTokens(end=...), the token that ends a document."
        )
    states = source_states(source)
    count = -(-open_tokens(source, states).size // length)
    if packing is None:
        return count, functools.partial(_read_cut, source, states, length, separate=separate)
    return count, functools.partial(_read_packed, source, states, length, packing)


def _texts(source: TokenSource | Blend) -> str:
    """What the tokens of a source, or of a blend, depend on."""
    if not isinstance(source, Blend):
        return source_text(source, source_states(source))
    parts = [f"{part.name} by {part.weight}: {_texts(part.source)}" for part in source.parts]
    return f"a blend of {', '.join(parts)}"


def _loader(rows: "_Rows", batch_size: int, workers: int, **order: Any) -> DataLoader[Any]:
    return DataLoader(
        rows, batch_size=batch_size, num_workers=workers, collate_fn=collate_nothing, **order
    )


class _Rows(KnownRows):
    """Rows of one source or several, numbered one source after the other.

    A source is the number of its rows, and a function that reads some of them. It is pickled
    without maps, which each process opens.
    """

    def __init__(
        self, parts: Sequence[tuple[int, Reader]], order_text: str, *, blended: bool = False
    ) -> None:
        self.order_text = order_text
        self._reads, self._blended = [read for _, read in parts], blended
        self._starts = list(itertools.accumulate((count for count, _ in parts), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.__getitems__([row]).items()}

    def __getitems__(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """A batch at once: one read of each source that has rows in it."""
        numpy = load_numpy()
        numbers = numpy.array(rows, "i8")
        if self._blended:
            batch = read_by_source(
                numpy.searchsorted(self._starts, numbers, side="right") - 1,
                lambda part, here: self._reads[part](numbers[here] - self._starts[part]),
            )
        else:
            batch = self._reads[0](numbers)
        return {name: torch.from_numpy(value) for name, value in batch.items()}


def _read_cut(
    source: TokenSource, states: tuple[FileState, ...], length: int, numbers: Any, *, separate: bool
) -> dict[str, Any]:
    """Rows of the concatenated documents: one gather, and arithmetic over all of them."""
    numpy = load_numpy()
    file = open_tokens(source, states)
    # A row and the token after it, of which the last row has none.
    sizes = numpy.minimum(file.size - numbers * length, length + 1)
    short = (sizes <= length).any()
    if short or file.tokens is None:
        tokens = numpy.zeros((len(numbers), length + 1), file.dtype)
        inside = numpy.arange(length + 1) < sizes[:, None]
        tokens[inside] = file.gather(numbers * length, sizes)
    else:
        file.check()
        whole, step = (file.size - 1) // length, file.tokens.itemsize
        table = numpy.lib.stride_tricks.as_strided(
            file.tokens, (whole, length + 1), (length * step, step), writeable=False
        )
        tokens = table[numbers]
    batch = {"tokens": tokens[:, :-1].astype("i8"), "labels": tokens[:, 1:].astype("i8")}
    if separate:
        first = numpy.zeros(tokens.shape, bool)  # where a document starts
        if file.end is None:
            first[file.starts(numbers * length, length + 1)] = True
        else:  # the tokens say where, and are here already
            numpy.equal(tokens[:, :-1], file.end, out=first[:, 1:])
        separate_documents(batch, first)
    if short:
        at = numpy.arange(length)
        batch["labels"][at >= sizes[:, None] - 1] = NO_LABEL
        for name in batch.keys() & _PADDING.keys():
            batch[name][at >= sizes[:, None]] = _PADDING[name]
    return batch


def _read_packed(
    source: TokenSource, states: tuple[FileState, ...], length: int, how: BestFit, numbers: Any
) -> dict[str, Any]:
    """Rows packed by best fit: the pieces of all of them at once."""
    numpy = load_numpy()
    file = open_tokens(source, states)
    plans: list[tuple[Any, ...]] = []
    for row, number in enumerate(numbers.tolist()):
        window, inside = divmod(number, how.window_rows)
        plan = planned(source, states, how.window_rows, length, window)
        pieces = slice(*plan.bounds[inside : inside + 2].tolist())
        begins, sizes, last = plan.begins[pieces], plan.sizes[pieces], plan.last[pieces]
        places = row * length + sizes.cumsum() - sizes
        plans.append((begins, sizes, last, places, numpy.arange(len(sizes))))
    columns = zip(*plans, strict=True)
    begins, sizes, last, places, documents = (numpy.concatenate(column) for column in columns)
    starts = sizes.cumsum() - sizes
    inside = numpy.arange(sizes.sum()) - numpy.repeat(starts, sizes)
    # Each piece and the token after it, of which the last of the source has none.
    more = numpy.minimum(sizes + 1, file.size - begins)
    tokens = file.gather(begins, more)
    at = numpy.repeat(more.cumsum() - more, sizes) + inside
    labels = tokens[numpy.minimum(at + 1, len(tokens) - 1)].astype("i8")
    labels[(starts + sizes - 1)[last]] = NO_LABEL
    flat = {
        "tokens": tokens[at],
        "labels": labels,
        "positions": inside,
        "documents": numpy.repeat(documents, sizes),
    }
    batch, to = {}, numpy.repeat(places, sizes) + inside
    for name, values in flat.items():
        dtype = "i4" if name == "documents" else "i8"
        batch[name] = numpy.full(len(numbers) * length, _PADDING[name], dtype)
        batch[name][to] = values
        batch[name] = batch[name].reshape(len(numbers), length)
    return batch


class PackedDocuments(NamedTuple):
    """The rows of a window, as pieces of documents."""

    bounds: Any  # int64; the pieces of row r are those from `bounds[r]` to `bounds[r + 1]`
    begins: Any  # int64, the first token of each piece
    sizes: Any  # int64, its tokens
    last: Any  # bool, whether the document ends with it
    cut: int  # documents that fit into a row and are in more than one piece


@functools.lru_cache(maxsize=_PLANS)
def planned(
    source: TokenSource, states: tuple[FileState, ...], rows: int, length: int, window: int
) -> PackedDocuments:
    """The rows of a window, packed by best fit."""
    numpy = load_numpy()
    file = open_tokens(source, states)
    begin = window * rows * length
    size = min(rows * length, file.size - begin)
    # With one token more, to see whether a document ends with the window.
    _, places = file.starts(numpy.array([begin]), size + 1)
    starts = places[(places > 0) & (places < size)]
    borders = numpy.concatenate([[0], starts, [size]]) + begin
    ends = begin + size == file.size or bool((places == size).any())
    return pack_documents(borders, length, last=ends)


def pack_documents(borders: Any, length: int, *, last: bool) -> PackedDocuments:
    """Pack the documents of a window into as few rows as their tokens need.

    A document longer than a row is split into whole rows and a rest. Documents and rests are placed
    by decreasing size, each in the row with the least room that is enough. What finds no room is
    cut, to fill the room that is left: with `n` tokens there are always `ceil(n / length)` rows.

    Args:
        borders: int64, the first token of each document, in order, then the end of the window.
            Documents may be empty.
        length: Tokens of a row.
        last: Whether a document ends where the window does.
    """
    numpy = load_numpy()
    sizes = numpy.diff(borders)
    kept = sizes > 0
    starts, sizes = borders[:-1][kept], sizes[kept]
    whole, rest = sizes // length, sizes % length
    full, rows = int(whole.sum()), -(-int(sizes.sum()) // length)
    # Rows of one piece, of documents that are at least as long.
    document = numpy.repeat(numpy.arange(len(sizes)), whole)
    number = numpy.arange(full) - numpy.repeat(whole.cumsum() - whole, whole)
    begins = [starts[document] + number * length]
    pieces = [numpy.full(full, length)]
    where = [numpy.arange(full)]
    chunks = rest.nonzero()[0]
    firsts, rest = (starts + whole * length)[chunks], rest[chunks]
    row, room = _best_fit(rest, rows - full, length)
    placed = row >= 0
    begins.append(firsts[placed])
    pieces.append(rest[placed])
    where.append(row[placed] + full)
    left = (~placed).nonzero()[0]
    if len(left):
        parts = _fill(rest[left], room)
        begins.append(firsts[left][parts[0]] + parts[1])
        pieces.append(parts[2])
        where.append(parts[3] + full)
    begin, size, at = (numpy.concatenate(column) for column in (begins, pieces, where))
    order = numpy.argsort(at, kind="stable")
    begin, size = begin[order], size[order]
    ends = starts + sizes
    closes = ends[numpy.searchsorted(ends, begin, side="right")] == begin + size
    if not last:
        closes &= begin + size < borders[-1]
    cut = 0
    if len(left):
        cut = int((numpy.bincount(parts[0])[whole[chunks][left] == 0] > 1).sum())
    bounds = numpy.searchsorted(at[order], numpy.arange(rows + 1))
    return PackedDocuments(bounds, begin, size, closes, cut)


def _best_fit(sizes: Any, rows: int, length: int) -> tuple[Any, Any]:
    """The row of each chunk, -1 where none has room; and the room left in each row.

    Chunks of the same size are placed together, as many as rows have the same room.
    """
    numpy = load_numpy()
    order = numpy.argsort(-sizes, kind="stable")
    assigned = numpy.full(len(sizes), -1)
    values, counts = numpy.unique(-sizes, return_counts=True)
    by_room: dict[int, list[int]] = {length: list(range(rows - 1, -1, -1))}
    rooms = [length] if rows else []  # the keys, sorted
    chosen: list[int] = []
    places: list[int] = []
    at = 0
    for size, count in zip((-values).tolist(), counts.tolist(), strict=True):
        left, stop = count, at + count
        while left and (index := bisect.bisect_left(rooms, size)) < len(rooms):
            room = rooms[index]
            # An empty row takes as many chunks as fit, before the next one is begun.
            most = -(-left // (length // size)) if room == length else left
            taken = by_room[room][-most:]
            del by_room[room][-most:]
            if not by_room[room]:
                del rooms[index]
            chosen += taken
            places += range(stop - left, stop - left + len(taken))
            left -= len(taken)
            if rest := room - size:
                if not by_room.setdefault(rest, []):
                    bisect.insort(rooms, rest)
                by_room[rest] += taken
        at = stop
    assigned[order[places]] = chosen
    room = numpy.full(rows, length)
    numpy.subtract.at(room, numpy.array(chosen, "i8"), sizes[order[places]])
    return assigned, room


def _fill(sizes: Any, room: Any) -> tuple[Any, Any, Any, Any]:
    """Cut chunks, the longest first, into the rows with the most room.

    Returns:
        For each part: its chunk, where it starts in it, its size, and its row.
    """
    numpy = load_numpy()
    chunks = numpy.argsort(-sizes, kind="stable")
    rows = numpy.argsort(-room, kind="stable")
    ends, limits = sizes[chunks].cumsum(), room[rows].cumsum()
    stops = numpy.unique(numpy.concatenate([ends, limits[limits < ends[-1]]]))
    stops = stops[stops > 0]
    begins = numpy.concatenate([[0], stops[:-1]])
    chunk = numpy.searchsorted(ends, begins, side="right")
    row = numpy.searchsorted(limits, begins, side="right")
    start = begins - (ends[chunk] - sizes[chunks][chunk])
    return chunks[chunk], start, stops - begins, rows[row]
