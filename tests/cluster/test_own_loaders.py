"""Loaders that each rank has split by itself: when they end, and where they continue."""

import pytest
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset

import fxtrain as fx
from fxtrain import CollectiveError
from fxtrain.errors import DataError

DECLARED = fx.Data(source="sharded")


def _workers(n):
    """Settings of a loader with workers that start quickly."""
    return {"num_workers": n, "multiprocessing_context": "fork"} if n else {}


# Loaders that are split already


def _own(ctx, lengths, even, index=0, workers=0, kind="table"):
    start, n = 100 * ctx.rank, lengths[ctx.rank]
    dataset = Offset(start, n) if kind == "stream" else Subset(range(1000), range(start, start + n))
    plan = fx.Plan(data=DECLARED, even=even)
    loader = fx.shard(DataLoader(dataset, batch_size=2, **_workers(workers)), ctx, plan)
    found = [b for epoch in loader.at(fx.Position(index=index)).epochs(1) for b in epoch]
    return [(b.data.tolist(), b.position.index, b.rows, b.sizes, b.valid.tolist()) for b in found]


def _refusal(ctx, *args):
    try:
        return _own(ctx, *args)
    except DataError as error:
        return str(error)


class Offset(IterableDataset):
    def __init__(self, start, n):
        self.start, self.n = start, n

    def __iter__(self):
        return iter(range(self.start, self.start + self.n))


@pytest.mark.parametrize("kind", ["table", "stream"])
def test_the_first_rank_that_ends_stops_all(pair, kind):
    first, second = pair.run(_own, [5, 9], "drop", 0, 0, kind)
    assert [row[0] for row in first] == [[0, 1], [2, 3]]
    assert [row[0] for row in second] == [[100, 101], [102, 103]]
    assert [row[1] for row in first] == [4, 8] == [row[1] for row in second]


@pytest.mark.parametrize("kind", ["table", "stream"])
def test_ranks_that_ended_repeat_until_all_have(pair, kind):
    first, second = pair.run(_own, [3, 7], "pad", 0, 0, kind)
    assert [row[0] for row in first] == [[0, 1], [2], [2], [2]]
    assert [row[0] for row in second] == [[100, 101], [102, 103], [104, 105], [106]]
    assert [row[4] for row in first] == [[True] * 2, [True], [False], [False]]
    assert [row[2] for row in first] == [(2, 2), (1, 2), (0, 2), (0, 1)]
    assert [row[3] for row in first] == [(2, 2), (1, 2), (1, 2), (1, 1)]
    assert [row[1] for row in first] == [4, 7, 9, 10] == [row[1] for row in second]


@pytest.mark.parametrize("kind", ["table", "stream"])
@pytest.mark.parametrize("index", [4, 7, 9, 10])
def test_split_data_goes_on_from_a_position(pair, kind, index):
    whole = pair.run(_own, [3, 7], "pad", 0, 0, kind)
    rest = pair.run(_own, [3, 7], "pad", index, 0, kind)
    done = [4, 7, 9, 10].index(index) + 1
    for mine, left in zip(whole, rest, strict=True):
        expected = mine[done:]
        assert [row[1:4] for row in left] == [row[1:4] for row in expected]
        assert [row[0] for row in left if any(row[4])] == [
            row[0] for row in expected if any(row[4])
        ]


def test_split_data_cannot_go_on_between_its_batches(pair):
    for says in pair.run(_refusal, [3, 7], "pad", 5):
        assert "not a boundary between two global batches" in says


def test_one_rank_may_have_loaders_of_its_own_too(clusters):
    (found,) = clusters[1].run(_own, [5], "pad", 0, 1, "stream")
    assert [row[0] for row in found] == [[0, 1], [2, 3], [4]]


def test_a_rank_without_data_is_named_on_every_rank(pair):
    for says in pair.run(_refusal, [3, 0], "pad"):
        assert "ranks [1] of 2" in says
    assert pair.run(_own, [3, 0], "drop") == [[], []]
    assert pair.run(_own, [0, 0], "pad") == [[], []]


@pytest.mark.parametrize("kind", ["table", "stream"])
def test_uneven_ranks_that_ended_count_for_nothing(pair, kind):
    first, second = pair.run(_own, [3, 7], "uneven", 0, 0, kind)
    padded = pair.run(_own, [3, 7], "pad", 0, 0, kind)
    # The same batches, but of size 0.
    for mine, theirs in zip((first, second), padded, strict=True):
        assert [row[:3] + row[4:] for row in mine] == [row[:3] + row[4:] for row in theirs]
        assert [row[3] for row in mine] == [(2, 2), (1, 2), (0, 2), (0, 1)]


def _with_sampler(ctx, workers):
    sampler = DistributedSampler(range(10), ctx.world_size, ctx.rank, shuffle=True)
    loader = DataLoader(range(10), sampler=sampler, batch_size=2, **_workers(workers))
    loader = fx.shard(loader, ctx, fx.Plan(data=DECLARED))
    return [[b.data.tolist() for b in epoch] for epoch in loader.epochs(2)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_distributed_sampler_is_told_its_epoch(pair, workers):
    found = pair.run(_with_sampler, workers)
    for epoch in range(2):
        rows = [row for mine in found for data in mine[epoch] for row in data]
        assert sorted(rows) == list(range(10))
    assert found[0][0] != found[0][1]


class Failing(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 6

    def __getitem__(self, i):
        if i == 3 and self.rank == 1:
            raise OSError("row 3 is gone")
        return i


def _failing(ctx):
    try:
        list(fx.shard(DataLoader(Failing(ctx.rank)), ctx, fx.Plan(data=DECLARED)))
    except (OSError, CollectiveError) as error:
        return type(error).__name__, str(error)


def test_an_error_of_one_rank_is_named_on_the_others(pair):
    first, second = pair.run(_failing)
    assert second == ("OSError", "row 3 is gone")
    assert first[0] == "CollectiveError" and "rank 1: OSError: row 3 is gone" in first[1]
