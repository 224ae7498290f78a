"""Sets of moments, as sorted lists of disjoint spans of nanoseconds."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

__all__ = ["Span", "clip", "length", "subtract", "union"]

Span = tuple[int, int]  # begin and end, in ns


def union(spans: Iterable[Span]) -> list[Span]:
    """The moments that are in any span.

    Example:
        >>> union([(5, 7), (0, 2), (1, 3), (7, 8), (9, 9)])
        [(0, 3), (5, 8)]
    """
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if begin >= end:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def subtract(spans: Sequence[Span], taken: Sequence[Span]) -> list[Span]:
    """The moments of one set that are not in another; both disjoint and sorted.

    Example:
        >>> subtract([(0, 10), (20, 30)], [(2, 4), (8, 22)])
        [(0, 2), (4, 8), (22, 30)]
    """
    left: list[Span] = []
    at = 0
    for begin, end in spans:
        while at < len(taken) and taken[at][1] <= begin:
            at += 1
        index = at
        while index < len(taken) and taken[index][0] < end:
            if begin < taken[index][0]:
                left.append((begin, taken[index][0]))
            begin = max(begin, taken[index][1])
            index += 1
        if begin < end:
            left.append((begin, end))
    return left


def clip(spans: Sequence[Span], window: Span) -> list[Span]:
    """The part of a disjoint, sorted set inside a window.

    Example:
        >>> clip([(0, 3), (5, 8), (9, 12)], (2, 10))
        [(2, 3), (5, 8), (9, 10)]
    """
    begin, end = window
    first = bisect_right(spans, begin, key=lambda span: span[1])
    last = bisect_left(spans, end, first, key=lambda span: span[0])
    return [(max(begin, one[0]), min(end, one[1])) for one in spans[first:last]]


def length(spans: Iterable[Span]) -> int:
    """How long disjoint spans last together, in ns.

    Example:
        >>> length([(0, 3), (5, 8)])
        6
    """
    return sum(end - begin for begin, end in spans)
