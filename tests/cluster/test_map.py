"""ops.map: every item exactly once, in order, at any number of ranks."""

import time

import pytest
import torch

from fxtrain import ops
from fxtrain.errors import CollectiveError, DataError
from fxtrain.ops.transport.exchange import CallState


def _squares(ctx, count, batch, order):
    calls = []

    def one(item):
        calls.append(item)
        return item * item

    def several(items):
        calls.extend(items)
        assert len(items) <= batch
        return [item * item for item in items]

    found = ops.map(one if batch is None else several, range(count), ctx, batch=batch, order=order)
    return found, calls


@pytest.mark.parametrize("order", ["static", "dynamic"])
def test_every_item_once_and_in_order(cluster, order):
    for count in (0, 1, 5, 9):
        for batch in (None, 1, 2):
            runs = cluster.run(_squares, count, batch, order)
            assert all(found == [n * n for n in range(count)] for found, _ in runs)
            assert sorted(item for _, calls in runs for item in calls) == list(range(count))


def _tensors(ctx):
    rows = {"x": torch.arange(10).view(5, 2), "y": torch.arange(5)}
    one = ops.map(lambda row: row["x"] + row["y"], rows, ctx)
    several = ops.map(lambda part: part["x"] + part["y"][:, None], rows, ctx, batch=2)
    wanted = rows["x"] + rows["y"][:, None]
    return torch.equal(torch.stack(one), wanted) and torch.equal(torch.stack(several), wanted)


def test_rows_of_tensors(pair):
    assert pair.run(_tensors) == [True, True]


def _slow_first(ctx):
    """Each rank's items, where the first takes as long as all others."""
    mine, key = [], f"slow first/{ctx.comm.slot(CallState).count}"

    def work(item):
        mine.append(item)
        while item == 0 and ctx.comm.store.add(key, 0) < 11:
            time.sleep(0.001)
        ctx.comm.store.add(key, 1)

    ops.map(work, range(12), ctx, order="dynamic")
    return mine


def test_a_slow_item_does_not_keep_others_waiting(pair):
    assert sorted(pair.run(_slow_first)) == [[0], list(range(1, 12))]


def _failing(ctx, order):
    def work(item):
        if item == 3:
            raise ValueError("no such prompt")
        return item

    try:
        ops.map(work, range(5), ctx, order=order)
    except DataError as error:
        return str(error), ops.map(str, range(2), ctx)
    return None


@pytest.mark.parametrize("order", ["static", "dynamic"])
def test_an_item_that_fails_is_named_on_every_rank(cluster, order):
    runs = cluster.run(_failing, order)
    for text, after in runs:
        assert "map: item 3 failed on rank" in text and "ValueError: no such prompt" in text
        assert after == ["0", "1"]


def _wrong_arguments(ctx):
    problems = []
    for items, fn, options in (
        (range(3), lambda items: items[:0], {"batch": 2}),
        (range(3), str, {"batch": 0}),
        (range(3), str, {"order": "random"}),
        (3, str, {}),
        (range(ctx.rank + 1), str, {}),
    ):
        try:
            ops.map(fn, items, ctx, **options)
        except (DataError, CollectiveError) as error:
            problems.append(str(error))
    return problems


def test_wrong_arguments(pair):
    for problems in pair.run(_wrong_arguments):
        assert len(problems) == 5
        words = ("0 results", "batch=0", "order=", "takes", "items")
        for word, text in zip(words, problems, strict=True):
            assert word in text
