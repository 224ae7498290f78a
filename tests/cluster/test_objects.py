"""Objects that fail on their way, and threads that share a context."""

import threading

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import CollectiveError, ops
from fxtrain.ops.transport.pickled import dump, unpickles_anywhere
from fxtrain.testing import count_collectives


class Brittle:
    """Unpickles everywhere but in a process that has been told to fail."""

    failing = False

    def __init__(self, size=0):
        self.ballast = "x" * size

    def __setstate__(self, state):
        if Brittle.failing:
            raise ValueError("boom in unpickling")


def _gather_objects(ctx, value):
    return ops.gather_objects(value, ctx)


def _broadcast_object(ctx, value):
    return ops.broadcast_object(value, ctx)


def _gather(ctx, value):
    return ops.gather({"x": torch.ones(2), "o": value}, ctx)


def _gather_large(ctx, value):
    return ops.gather({"x": torch.ones(9000), "o": value}, ctx)


def _broadcast(ctx, value):
    return ops.broadcast((torch.ones(2), value), ctx)


def _scatter(ctx, value):
    return ops.scatter([(torch.ones(1), value)] * ctx.world_size, ctx)


def _gather_valid(ctx, value):
    (batch,) = fx.shard(DataLoader(torch.arange(ctx.world_size)), ctx)
    return ops.gather_valid([value], batch, ctx)


WAYS = {
    fn.__name__.strip("_"): fn
    for fn in (
        *(_gather_objects, _broadcast_object, _gather, _gather_large, _broadcast),
        *(_scatter, _gather_valid),
    )
}


def _brittle(ctx, way, who, size):
    """What a call does if one rank cannot unpickle, then whether the ranks still join."""
    Brittle.failing = ctx.rank == who
    try:
        WAYS[way](ctx, Brittle(size))
    except CollectiveError as error:
        return str(error), ops.reduce(1, ctx, op="sum")
    finally:
        Brittle.failing = False
    return None, ops.reduce(1, ctx, op="sum")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_an_object_that_one_rank_cannot_unpickle_is_an_error_everywhere(clusters, ranks, way):
    for size in (0, 9000):
        found = clusters[ranks].run(_brittle, way, ranks - 1, size)
        assert len(set(found)) == 1
        assert f"rank {ranks - 1} cannot unpickle" in found[0][0]
        assert "ValueError: boom in unpickling" in found[0][0] and found[0][1] == ranks
        assert clusters[ranks].run(_brittle, way, None, size) == [(None, ranks)] * ranks


def _unpicklable(ctx, way):
    WAYS[way](ctx, (lambda: 0) if ctx.rank == 0 else 1)


@pytest.mark.parametrize("way", WAYS)
def test_an_object_that_does_not_pickle_is_an_error_everywhere(pair, way):
    errors = pair.outcomes(_unpicklable, way)
    assert all(isinstance(error, CollectiveError) for error in errors)
    assert "cannot be sent" in str(errors[0]) and str(errors[0]) == str(errors[1])


class Unreadable(dict):
    def items(self):
        raise OSError("the disk is gone")


def _scatter_unreadable(ctx):
    ops.scatter([Unreadable(a=1)] * 2 if ctx.is_main else None, ctx)


def test_a_tree_that_cannot_be_read_is_an_error_everywhere(pair):
    for error in pair.outcomes(_scatter_unreadable):
        assert isinstance(error, CollectiveError) and "the disk is gone" in str(error)


def _packets(ctx, value):
    with count_collectives() as traffic:
        ops.gather_objects(value, ctx)
    return traffic.counts["send"]


def test_only_what_could_fail_to_unpickle_takes_a_second_exchange(pair):
    plain = {"a": [1, 2.5, "x", None, (True, b"y")], "b": {1, 2}, "c": 1j, "d": torch.float32}
    for value in (plain, fx.Plan(), fx.Position(), torch.Size([1]), {"loss": torch.ones(2, 3)}):
        assert pair.run(_packets, value) == [1, 1]
    for value in (Brittle(), [ValueError("x")], torch.nn.Parameter(torch.ones(1)), _packets):
        assert pair.run(_packets, value) == [2, 2]
    with fx.detect(env={}, device="cpu") as ctx:
        assert unpickles_anywhere(dump(plain, ctx)) and not unpickles_anywhere(dump(Brittle, ctx))


# Threads


def _in_threads(calls):
    """Run each call in a thread, all at once; what each returned or raised."""
    found = {}

    def run(name):
        try:
            found[name] = calls[name]()
        except CollectiveError as error:
            found[name] = str(error)

    threads = [threading.Thread(target=run, args=(name,), name=name) for name in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _many(ctx, mark, op="max"):
    return [ops.reduce(torch.full((4,), mark + i), ctx, op=op)[0].item() for i in range(20)]


CALLS = {
    "gather": lambda ctx: ops.gather(torch.ones(2), ctx),
    "reduce": lambda ctx: ops.reduce(torch.ones(9000), ctx),
    "barrier": ops.barrier,
    "agree": lambda ctx: ops.agree(1, ctx),
    "broadcast": lambda ctx: ops.broadcast(torch.ones(9000), ctx),
    "scatter": lambda ctx: ops.scatter([1] * ctx.world_size, ctx),
    "duplicate": ops.duplicate,
    "axis": lambda ctx: ops.barrier(ctx.axis("data")),
}


def _shared(ctx):
    found = _in_threads({name: lambda call=call: call(ctx) for name, call in CALLS.items()})
    return found, _many(ctx, 0.0)


def test_another_thread_is_refused_on_every_rank_and_the_group_survives(pair):
    for found, rest in pair.run(_shared):
        assert found.keys() == CALLS.keys()
        for name, error in found.items():
            assert f"Thread '{name}' calls a collective at " in error
            assert "ops.duplicate(ctx)" in error and "test_objects.py" in error
        assert rest == [float(i) for i in range(20)]


def _while_working(ctx):
    """Another thread asks while this one works."""
    go = threading.Event()
    refused = []

    def ask():
        while not go.is_set():
            try:
                ops.reduce(torch.full((4,), 1000.0), ctx, op="max")
            except CollectiveError:
                refused.append(1)

    thread = threading.Thread(target=ask)
    thread.start()
    found = _many(ctx, 0.0)
    go.set()
    thread.join()
    return found, bool(refused)


def test_calls_of_the_owner_are_right_while_another_thread_asks(pair):
    assert pair.run(_while_working) == [([float(i) for i in range(20)], True)] * 2


def _later(ctx):
    """One after the other, threads that have ended leave their context to the next."""
    copy = ops.duplicate(ctx)
    found = [
        _in_threads({"one": lambda mark=mark: _many(copy, mark)})["one"][0] for mark in (0.0, 100.0)
    ]
    return found, _many(copy, 5.0)[0]


def test_a_thread_that_has_ended_leaves_its_context_to_the_next(pair):
    assert pair.run(_later) == [([0.0, 100.0], 5.0)] * 2
