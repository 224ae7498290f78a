"""Data on real ranks: agreement, dispatch from rank 0, loaders that are split already."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import fxtrain as fx
from fxtrain import CollectiveError, ops
from fxtrain.errors import DataError
from tests._slow import slow_after
from tests.data._streams import Numbers

DISPATCH = fx.Data(source="dispatch")
DECLARED = fx.Data(source="sharded")


def _all(batches):
    return [(b.data.tolist(), b.position, b.rows, b.sizes, b.valid.tolist()) for b in batches]


def _workers(n):
    """Settings of a loader with workers that start quickly."""
    return {"num_workers": n, "multiprocessing_context": "fork"} if n else {}


class Locked(Dataset):
    """Nobody but rank 0 may look."""

    def __init__(self, n, rank):
        self.n, self.rank = n, rank

    def __len__(self):
        assert self.rank == 0
        return self.n

    def __getitem__(self, i):
        assert self.rank == 0
        return i


# Every rank reads its own rows


def _read(ctx, lengths, kw):
    loader = fx.shard(DataLoader(torch.arange(lengths[ctx.rank]), **kw), ctx, fx.Plan())
    return [batch.data.tolist() for epoch in loader.epochs(2) for batch in epoch]


def test_ranks_with_equal_data_agree(cluster):
    found = cluster.run(_read, [8] * cluster.n, {"batch_size": 2, "shuffle": True})
    for epoch in range(2):
        steps = len(found[0]) // 2
        batches = [data for mine in found for data in mine[epoch * steps : (epoch + 1) * steps]]
        assert sorted(row for data in batches for row in data) == list(range(8))


def test_ranks_whose_data_differs_say_so_on_every_rank(pair):
    for outcome in pair.outcomes(_read, [8, 6], {"batch_size": 2}):
        assert isinstance(outcome, CollectiveError)
        assert "iterating" in str(outcome)
        assert "rows: 8" in str(outcome) and "rows: 6" in str(outcome)


def _shuffled_on_one(ctx):
    next(iter(fx.shard(DataLoader(torch.arange(8), shuffle=ctx.rank == 1), ctx)))


def test_a_loader_that_shuffles_on_one_rank_only_is_refused(pair):
    for outcome in pair.outcomes(_shuffled_on_one):
        assert isinstance(outcome, CollectiveError)
        assert "RandomSampler" in str(outcome) and "SequentialSampler" in str(outcome)


def _read_from(ctx, indices):
    loader = fx.shard(DataLoader(torch.arange(8)), ctx)
    return list(loader.at(fx.Position(index=indices[ctx.rank])))


def test_ranks_whose_cursors_differ_say_so_on_every_rank(pair):
    for outcome in pair.outcomes(_read_from, [2, 4]):
        assert isinstance(outcome, CollectiveError)
        assert "index=2" in str(outcome) and "index=4" in str(outcome)


# Rank 0 reads


def _dispatched(ctx, make, n, even, index=0, accumulate=1, workers=0):
    plan = fx.Plan(data=DISPATCH, even=even, accumulate=accumulate)
    loader = fx.shard(make(ctx, n, workers), ctx, plan)
    loader = loader.at(fx.Position(index=index))
    try:
        length = len(loader)
    except TypeError:
        length = None
    return _all(loader), length


def _direct(ctx, make, n, even, index=0, accumulate=1, workers=0):
    plan = fx.Plan(even=even, accumulate=accumulate)
    batches = _all(fx.shard(make(None, n, workers), ctx, plan).at(fx.Position(index=index)))
    return batches, len(batches)


def _table(ctx, n, workers=0):
    dataset = range(n) if ctx is None else Locked(n, ctx.rank)
    return DataLoader(dataset, batch_size=2, **_workers(workers))


def _stream(ctx, n, workers=0):
    dataset = Numbers(n) if ctx is None or ctx.rank == 0 else None
    return DataLoader(dataset or Locked(n, 1), batch_size=2, **_workers(workers))


def _batches(ctx, n, workers=0):
    sampler = [list(range(i, min(n, i + i % 3 + 1))) for i in range(n)]
    dataset = range(n) if ctx is None else Locked(n, ctx.rank)
    return DataLoader(dataset, batch_sampler=sampler, **_workers(workers))


@pytest.mark.parametrize("even", slow_after(1, ["pad", "drop", "uneven"]))
@pytest.mark.parametrize("make", [_table, _stream, _batches])
def test_dispatch_gives_what_reading_gives(cluster, make, even):
    for n, index in ((9, 0), (9, 4), (0, 0), (1, 0), (16, 0)):
        sent = cluster.run(_dispatched, make, n, even, index, 2)
        read = cluster.run(_direct, make, n, even, index, 2)
        assert [mine[0] for mine in sent] == [mine[0] for mine in read]
        if make is not _stream:
            assert [mine[1] for mine in sent] == [mine[1] for mine in read]


@pytest.mark.parametrize("make", [_table, _stream])
def test_workers_of_rank_0_read_for_all(pair, make):
    sent = pair.run(_dispatched, make, 9, "pad", 0, 1, 1)
    read = pair.run(_direct, make, 9, "pad")
    assert [mine[0] for mine in sent] == [mine[0] for mine in read]


def _epochs_dispatched(ctx):
    loader = fx.shard(_table(ctx, 5), ctx, fx.Plan(data=DISPATCH))
    found = []
    for epoch in loader.epochs(3):
        if epoch.position.epoch == 1:
            continue
        for batch in epoch:
            found.append(batch.position)
            break
    return found


def test_epochs_of_dispatched_data_stand_alike_on_all_ranks(cluster):
    found = cluster.run(_epochs_dispatched)
    assert all(mine == found[0] for mine in found)
    assert [p.samples for p in found[0]] == [min(5, 2 * cluster.n), 2 * min(5, 2 * cluster.n)]


class Breaks(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == 5:
            raise OSError("row 5 is gone")
        return i


def _broken(ctx):
    seen = []
    try:
        loader = fx.shard(DataLoader(Breaks()), ctx, fx.Plan(data=DISPATCH))
        seen.extend(batch.data.tolist() for batch in loader)
    except (OSError, DataError) as error:
        return seen, type(error).__name__, str(error)


def test_an_error_of_rank_0_reaches_every_rank(pair):
    first, second = pair.run(_broken)
    assert first == ([[0], [2]], "OSError", "row 5 is gone")
    assert second[:2] == ([[1], [3]], "DataError")
    assert "Rank 0" in second[2] and "OSError: row 5 is gone" in second[2]


def _cannot_share(ctx):
    try:
        fx.shard(DataLoader(range(8), batch_size=3), ctx, fx.Plan(batch="global", data=DISPATCH))
    except DataError as error:
        return str(error)


def test_a_loader_that_rank_0_cannot_share_is_an_error_everywhere(pair):
    first, second = pair.run(_cannot_share)
    assert "is not divisible by 2 ranks" in first and "is not divisible by" in second


# Results of all ranks


def _gathered_own(ctx):
    rows = torch.arange(5 if ctx.is_main else 2) + 10 * ctx.rank
    loader = fx.shard(DataLoader(rows, batch_size=2), ctx, fx.Plan(data=DECLARED))
    return [ops.gather_valid(batch.data, batch, ctx).tolist() for batch in loader]


def test_gather_valid_leaves_out_what_was_repeated(pair):
    for found in pair.run(_gathered_own):
        assert found == [[0, 1, 10, 11], [2, 3], [4]]


def _gathered_uneven(ctx, n, size, source, lengths):
    """What a loop gathers in which some ranks have no row at the end."""
    plan = fx.Plan(even="uneven", data=fx.Data(source=source))
    own = lengths[ctx.rank] if source == "sharded" else n
    rows = [(100 * ctx.rank * (source == "sharded") + i, f"row{i}") for i in range(own)]
    found = []
    for batch in fx.shard(DataLoader(rows, batch_size=size), ctx, plan):
        x, text = batch
        tree = {"x": x * 1.0, "text": list(text), "sum": x.sum(), "tag": ctx.rank}
        got = ops.gather_valid(tree, batch, ctx)
        assert len(got["tag"]) == len(got["sum"]) == sum(rows > 0 for rows in batch.rows)
        found.append((got["x"].tolist(), got["text"], batch.position))
    return found


@pytest.mark.parametrize("source", ["shard", "dispatch", "sharded"])
def test_gather_valid_takes_no_row_of_a_rank_without_any(cluster, source):
    for n, size in ((1, 2), (5, 3), (9, 2)):
        lengths = [n, *range(1, cluster.n)]
        found = cluster.run(_gathered_uneven, n, size, source, lengths)
        assert all(mine == found[0] for mine in found)
        rows = [row for x, _, _ in found[0] for row in x]
        texts = [text for _, text, _ in found[0] for text in text]
        if source == "sharded":
            wanted = [100.0 * rank + i for rank, n in enumerate(lengths) for i in range(n)]
            assert sorted(rows) == wanted
        else:
            assert rows == list(range(n)) and texts == [f"row{i}" for i in range(n)]


def _not_rows(ctx):
    (batch, *_) = fx.shard(DataLoader(torch.arange(8), batch_size=4), ctx)
    ops.gather_valid(torch.ones(3 + ctx.rank), batch, ctx)


def test_gather_valid_refuses_what_is_not_per_row_on_every_rank(pair):
    first, second = pair.outcomes(_not_rows)
    assert isinstance(first, CollectiveError | DataError) and "[3]" in str(first)
    assert isinstance(second, CollectiveError)
