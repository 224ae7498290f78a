"""Best-fit packing: which parts of documents make each row."""

import bisect
from typing import Any, NamedTuple

from fxtrain.data.token_maps import load_numpy


class Packed(NamedTuple):
    """The rows of a window, as pieces of documents."""

    bounds: Any  # int64; the pieces of row r are those from `bounds[r]` to `bounds[r + 1]`
    begins: Any  # int64, the first token of each piece
    sizes: Any  # int64, its tokens
    last: Any  # bool, whether the document ends with it
    cut: int  # documents that fit into a row and are in more than one piece


def pack(borders: Any, length: int, *, last: bool) -> Packed:
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
    return Packed(bounds, begin, size, closes, cut)


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
