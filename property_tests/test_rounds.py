"""Laws of the schedules of messages: all ranks hear of all others in ⌈log2 N⌉ rounds."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fxtrain.ops.transport.rounds import (
    collect_rounds,
    combine_rounds,
    count_rounds,
    gather_rounds,
    reduce_rounds,
    spread_rounds,
)

MANY = 4096
ranks_and_one = st.integers(1, MANY).flatmap(
    lambda ranks: st.tuples(st.just(ranks), st.integers(0, ranks - 1))
)


def _played(ranks, schedule, first):
    """What the buffers of all ranks hold after the rounds: by rank, the content of each row.

    A message has rows of its sender as they were before the round, and both sides agree on it.
    """
    buffers = [{0: first(rank)} for rank in range(ranks)]
    schedules = [schedule(rank) for rank in range(ranks)]
    for now in zip(*schedules, strict=True):
        sent = {}
        for rank, each in enumerate(now):
            if each.to is not None:
                rows = [buffers[rank].get(row) for row in range(*each.sent)]
                assert rows and None not in rows  # it has what it sends
                sent[rank, each.to] = rows
        for rank, each in enumerate(now):
            if each.source is not None:
                begin, end = each.received
                rows = sent.pop((each.source, rank))
                assert len(rows) == end - begin
                buffers[rank].update(zip(range(begin, end), rows, strict=True))
        assert not sent  # every message is received
    return buffers


def test_a_gather_gives_all_rows_to_every_rank_for_every_number_of_ranks():
    for ranks in range(1, MANY + 1):
        rounds = gather_rounds(0, ranks)
        assert len(rounds) == count_rounds(ranks) == (ranks - 1).bit_length()
        held = 1
        for each in rounds:
            # What rank 0 gets from the rank d places on is what that has: rows 0 to d of its own,
            # which are rows d to 2d of rank 0.
            assert each.received == (held, held + each.sent[1])
            assert each.sent == (0, min(held, ranks - held))
            assert each.source == held % ranks
            assert each.to == -held % ranks
            held = each.received[1]
        assert held == ranks


@given(case=ranks_and_one)
@example(case=(2, 1))
def test_the_rounds_of_a_rank_are_those_of_rank_0_moved_by_it(case):
    ranks, rank = case
    for mine, first in zip(gather_rounds(rank, ranks), gather_rounds(0, ranks), strict=True):
        assert (mine.sent, mine.received) == (first.sent, first.received)
        assert mine.to == (first.to + rank) % ranks
        assert mine.source == (first.source + rank) % ranks


@given(ranks=st.integers(1, 300))
def test_a_gather_orders_rows_by_rank_from_the_own_one_on(ranks):
    buffers = _played(ranks, lambda rank: gather_rounds(rank, ranks), lambda rank: rank)
    for rank, rows in enumerate(buffers):
        assert [rows[row] for row in range(ranks)] == [(rank + row) % ranks for row in range(ranks)]


@given(case=ranks_and_one)
def test_one_rank_gets_the_rows_of_all_and_each_sends_its_own_once(case):
    ranks, root = case
    schedules = [collect_rounds(rank, ranks, root) for rank in range(ranks)]
    assert {len(rounds) for rounds in schedules} == {count_rounds(ranks)}
    buffers = _played(ranks, schedules.__getitem__, lambda rank: rank)
    assert [buffers[root][row] for row in range(ranks)] == [
        (root + row) % ranks for row in range(ranks)
    ]
    sends = [sum(each.to is not None for each in rounds) for rounds in schedules]
    assert sends == [int(rank != root) for rank in range(ranks)]


@given(case=ranks_and_one)
def test_all_ranks_get_the_row_of_one_and_receive_it_once(case):
    ranks, src = case
    schedules = [spread_rounds(rank, ranks, src) for rank in range(ranks)]
    assert {len(rounds) for rounds in schedules} == {count_rounds(ranks)}
    held = {src}
    for now in zip(*schedules, strict=True):
        pairs = [(rank, each.to) for rank, each in enumerate(now) if each.to is not None]
        assert {rank for rank, _ in pairs} <= held
        assert pairs == sorted(
            (each.source, rank) for rank, each in enumerate(now) if each.source is not None
        )
        assert held.isdisjoint({to for _, to in pairs})
        held |= {to for _, to in pairs}
    assert held == {*range(ranks)}


@given(ranks=st.integers(1, 300))
def test_combined_rows_combine_all_ranks(ranks):
    total = count_rounds(ranks)
    held = [{0: {rank}} for rank in range(ranks)]
    for number in range(total):
        rounds = [combine_rounds(rank, ranks)[number] for rank in range(ranks)]
        before = [rows[number] for rows in held]
        for rank, each in enumerate(rounds):
            assert rounds[each.source].to == rank
            assert each.sent == (number, number + 1)
            assert each.received == (total + 1 + number, total + 2 + number)
            held[rank][number + 1] = before[rank] | before[each.source]
    assert all(rows[total] == {*range(ranks)} for rows in held)


def _reduced(ranks, first, combine):
    """What each rank has after the rounds of a reduction, played as messages of one row."""
    schedules = [reduce_rounds(rank, ranks) for rank in range(ranks)]
    total = len(schedules[0])
    held = [{0: first(rank)} for rank in range(ranks)]
    for number in range(total):
        now = [rounds[number] for rounds in schedules]
        sent = {}
        for rank, each in enumerate(now):
            assert each.sent == (number, number + 1)
            if each.to is not None:
                sent[rank, each.to] = held[rank][number]
        for rank, each in enumerate(now):
            row, _ = each.received
            own = held[rank][number]
            if each.source is None:
                held[rank][number + 1] = own
                continue
            other = sent.pop((each.source, rank))
            assert row not in held[rank]
            if row == total:  # the result, in the last round
                assert number == total - 1
                held[rank][total] = other
                continue
            assert row == total + 1 + number
            held[rank][row] = other
            pair = (own, other) if rank < each.source else (other, own)
            held[rank][number + 1] = combine(*pair)
        assert not sent  # every message is received
    return [rows[total] for rows in held]


def test_a_reduction_takes_at_most_one_round_more_for_every_number_of_ranks():
    for ranks in range(1, MANY + 1):
        exact = ranks & (ranks - 1) == 0
        assert len(reduce_rounds(0, ranks)) == count_rounds(ranks) + (not exact)


@given(ranks=st.integers(1, 300))
@example(ranks=1)
@example(ranks=2)
@example(ranks=3)
@example(ranks=256)
@example(ranks=300)
def test_a_reduction_combines_each_rank_once_in_one_order_on_all_of_them(ranks):
    # What is combined, with where the parts were put together.
    trees = _reduced(ranks, lambda rank: (rank,), lambda low, high: (low, high))
    assert len(set(trees)) == 1
    assert _leaves(trees[0]) == [*range(ranks)]


def _leaves(tree):
    if len(tree) == 1:
        return [*tree]
    return [leaf for part in tree for leaf in _leaves(part)]


def test_sums_are_exact_for_integers_and_equal_on_all_ranks_for_any_numbers():
    generator = torch.Generator().manual_seed(0)
    for ranks in range(1, 301):
        assert _reduced(ranks, lambda rank: rank, int.__add__) == [ranks * (ranks - 1) // 2] * ranks
        values = torch.randn(ranks, generator=generator).tolist()
        assert len(set(_reduced(ranks, values.__getitem__, float.__add__))) == 1
