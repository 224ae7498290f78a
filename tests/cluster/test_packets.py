"""Exchanges of packets: payloads of any size, calls that differ, and what an interrupt leaves."""

import signal
import threading
import time

import pytest
import torch

from fxtrain import ops
from fxtrain.ops.transport.exchange import CallState
from fxtrain.ops.transport.pace import Pace
from tests._errors import raises_code


class _Enough(Exception):
    pass


def _as_many(ctx, fn, *args):
    """Call a function where these ranks combine what they have, as many ranks do."""
    state = ctx.comm.slot(CallState)
    before, state.few = state.few, 1
    try:
        return fn(ctx, *args)
    finally:
        state.few = before


def _run(cluster, few, fn, *args):
    return cluster.run(fn, *args) if few else cluster.run(_as_many, fn, *args)


few_or_many = pytest.mark.parametrize("few", [True, False], ids=["few", "many"])


def _interrupted(ctx, who, n):
    """A signal interrupts the gather of one rank, which others join only after that."""
    state, store = ctx.comm.slot(CallState), ctx.comm.store
    key = f"interrupted/{state.count}"

    def stop(*_):
        raise _Enough

    def interrupt():
        while state.in_flight is None:
            time.sleep(0.001)
        signal.raise_signal(signal.SIGALRM)
        store.set(key, "")

    if ctx.rank == who:
        before = signal.signal(signal.SIGALRM, stop)
        thread = threading.Thread(target=interrupt)
        with pytest.raises(_Enough):
            thread.start()
            ops.gather(torch.ones(n), ctx)
        thread.join()
        signal.signal(signal.SIGALRM, before)
    else:
        if ctx.rank == ctx.world_size - 1 or who == ctx.world_size - 1:
            store.wait([key])
        ops.gather(torch.ones(n), ctx)
    return [ops.gather(torch.tensor(10.0 * i + ctx.rank), ctx).tolist() for i in (1, 2, 3)]


def _big(rank, n):
    return torch.arange(n, dtype=torch.float32) + rank


def _payloads(ctx, sizes):
    """Objects of which some do not fit in a packet, of another size on each rank."""
    found = ops.gather_objects(_big(ctx.rank, sizes[ctx.rank]), ctx)
    return [torch.equal(one, _big(rank, n)) for rank, (one, n) in enumerate(zip(found, sizes))]  # noqa: B905


@few_or_many
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_does_not_fit_in_a_packet_follows_it(clusters, ranks, few):
    for sizes in ([1, 5000, 100_000, 3][:ranks], [300_000] * ranks, [2100, 1, 1, 1][:ranks]):
        assert _run(clusters[ranks], few, _payloads, sizes) == [[True] * ranks] * ranks


def _results_kept(ctx):
    """Whether results of small calls are as they were after calls with other values."""

    def results(fill):
        values = torch.full((3, 2), fill + ctx.rank, dtype=torch.uint8)
        tree = {"f": values.float(), "u": values, "name": f"{fill}", "n": values[0, 0].double()}
        return [
            *[ops.gather(each, ctx) for each in (values, values[:0], values[0, 0], tree)],
            *[ops.reduce(values, ctx, op=op) for op in ("max", "sum", "mean")],
            *[ops.broadcast(each, ctx) for each in (values, [values, values.float(), "a"])],
            *ops.gather_objects([values, bytes([fill]) * 100], ctx),
        ]

    first = results(1)
    before = repr(first)
    results(100)
    return before == repr(first)


@few_or_many
@pytest.mark.parametrize("ranks", [2, 4])
def test_results_do_not_share_memory_with_the_packets_of_later_calls(clusters, ranks, few):
    assert _run(clusters[ranks], few, _results_kept) == [True] * ranks


CALLS = {
    "large": lambda ctx: ops.gather(_big(ctx.rank, 30_000), ctx),
    "larger": lambda ctx: ops.gather(_big(ctx.rank, 60_000), ctx),
    "small": lambda ctx: ops.gather(torch.tensor(1.0), ctx),
    "reduce": lambda ctx: ops.reduce(_big(ctx.rank, 30_000), ctx),
    "object": lambda ctx: ops.broadcast_object("x" * 100_000, ctx, src=ctx.world_size - 1),
    "barrier": ops.barrier,
}


def _different(ctx, names):
    for _ in range(2):  # the second time, calls of that kind are known
        with raises_code("FX301") as caught:
            CALLS[names[ctx.rank]](ctx)
    rows = ops.gather(_big(ctx.rank, 30_000), ctx)
    expected = torch.cat([_big(rank, 30_000) for rank in range(ctx.world_size)])
    return torch.equal(rows, expected), str(caught.value)


@few_or_many
@pytest.mark.parametrize("other", sorted(set(CALLS) - {"large"}))
def test_calls_that_differ_fail_on_all_ranks_whatever_follows_their_packets(clusters, other, few):
    for ranks in (2, 4):
        names = ["large", other, other, "large"][:ranks]
        found = _run(clusters[ranks], few, _different, names)
        assert [right for right, _ in found] == [True] * ranks
        assert len({text for _, text in found}) == 1


@few_or_many
@pytest.mark.parametrize("ranks", [2, 4])
def test_calls_after_one_that_was_interrupted_are_not_mixed_up_with_it(clusters, ranks, few):
    for who in range(ranks):
        for n in (1, 10_000) if who in (0, ranks - 1) else (10_000,):
            expected = [[10.0 * i + rank for rank in range(ranks)] for i in (1, 2, 3)]
            assert _run(clusters[ranks], few, _interrupted, who, n) == [expected] * ranks


def _each_kind(ctx):
    """What calls of every kind give, some of which send no payload."""
    rank = ctx.rank
    with raises_code("FX300", "rank 1"):
        ops.any_rank(torch.ones(2) if rank == 1 else False, ctx)
    with raises_code("FX301", "batch size=2"):
        ops.agree(2 if rank == 1 else 3, ctx, name="batch size")
    return [
        [ops.any_rank(flag, ctx) for flag in (False, rank == 1, True)],
        [ops.all_ranks(flag, ctx) for flag in (False, rank != 1, True)],
        [ops.broadcast_object(rank, ctx, src=src) for src in range(ctx.world_size)],
        ops.reduce(torch.tensor([float(rank)]), ctx, op="sum").tolist(),
        ops.gather_objects("x" * rank, ctx),
        ops.agree("the same", ctx),
    ]


@few_or_many
@pytest.mark.parametrize("ranks", [2, 4])
def test_calls_of_every_kind(clusters, ranks, few):
    expected = [
        [False, True, True],
        [False, False, True],
        [*range(ranks)],
        [float(sum(range(ranks)))],
        ["x" * rank for rank in range(ranks)],
        "the same",
    ]
    assert _run(clusters[ranks], few, _each_kind) == [expected] * ranks


def _paces(ctx):
    """Slow ranks that this rank knows after each exchange, and whether its pace is to be sent."""
    slots, pace, seen = ctx.comm.state.slots, Pace(), []
    usual, slots[Pace] = slots[Pace], pace
    pace.micros = 100_000 if ctx.rank == 3 else 10_000
    for fresh in (ctx.rank > 0, True, True):
        pace.fresh = fresh
        ops.barrier(ctx)
        seen.append(([*pace.slow], pace.fresh))
    slots[Pace] = usual
    return seen


def test_many_ranks_send_their_pace_once_each_has_a_new_one(clusters):
    first, *others = clusters[4].run(_as_many, _paces)
    assert first == [([], False), ([], False), ([3], False)]
    assert others == [[([], True), ([], False), ([], False)]] * 3


def _values(ctx, op):
    """Combined values of every kind that a library sums in its own dtype, or in a wider one."""
    rank, whole = ctx.rank, torch.arange(1, 6) + ctx.rank
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8, torch.int16]
    tree = [whole.to(kind) for kind in kinds] + [whole % 2 == 0, 3 * rank + 1, 0.1 * rank - 1]
    tree += [whole.view(5, 1).to(torch.uint64), whole * (1 + 1j)] * (op not in ("max", "min"))
    found = ops.reduce([*tree, torch.empty(0, 2), "kept", None], ctx, op=op)
    # torch does not pickle uint64.
    return [x.long() if getattr(x, "dtype", None) == torch.uint64 else x for x in found]


@pytest.mark.parametrize("ranks", [2, 4])
def test_many_ranks_combine_what_few_do(clusters, ranks):
    for op in ("mean", "sum", "max", "min", "product"):
        few, many = (_run(clusters[ranks], few, _values, op) for few in (True, False))
        for found in many:
            torch.testing.assert_close(found[:-2], many[0][:-2], rtol=0, atol=0)
            torch.testing.assert_close(found[:-2], few[0][:-2])
            assert found[-2:] == ["kept", None]


def _nothing_to_combine(ctx):
    assert ops.reduce(["kept"], ctx) == ["kept"]
    with raises_code("FX300", "median"):
        ops.reduce(torch.ones(1), ctx, op="median")
    return ops.reduce(torch.ones(3000), ctx, op="sum").tolist()


@few_or_many
def test_what_many_ranks_do_not_combine(clusters, few):
    assert _run(clusters[4], few, _nothing_to_combine) == [[4.0] * 3000] * 4
