"""Sharded loaders with workers and between real ranks."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import fxtrain as fx
from fxtrain import ops
from fxtrain.state import DistContext


class Noisy(Dataset):
    """Rows with random augmentation from all three generators."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        noise = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return torch.tensor([float(index), *noise], dtype=torch.float64)


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.tensor(i) for i in range(23))


class Shuffling(Sampler):
    """A sampler of somebody else's, with a generator of the process."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(torch.randperm(self.n).tolist())


def _ctx(rank=0, world_size=1):
    return DistContext(rank=rank, world_size=world_size)


def _seen(loader):
    return [batch.data.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [1, 2])
def test_augmentation_does_not_depend_on_workers_or_restarts(workers):
    plan = fx.Plan(seed=5)
    one = fx.shard(DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1), _ctx(), plan)
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers)
    many = fx.shard(loader, _ctx(), plan)
    whole = _seen(many)
    assert whole == _seen(one)
    positions = [batch.position for batch in many.at(fx.Position())]
    assert _seen(many.at(positions[1])) == whole[2:]
    epochs = list(many.epochs(2))
    assert _seen(epochs[1]) != whole


def test_streams_in_workers_keep_their_order():
    for workers in (0, 2):
        loader = DataLoader(Stream(), batch_size=3, num_workers=workers)
        ranks = [fx.shard(loader, _ctx(rank, 2)) for rank in range(2)]
        first, second = map(_seen, ranks)
        assert first == [[0, 1, 2], [6, 7, 8], [12, 13, 14], [18, 19, 20]]
        assert second == [[3, 4, 5], [9, 10, 11], [15, 16, 17], [21, 22, 0]]


def test_persistent_workers_and_settings_survive():
    calls = []
    loader = DataLoader(
        TensorDataset(torch.arange(12)),
        batch_size=3,
        shuffle=True,
        num_workers=1,
        persistent_workers=True,
        collate_fn=lambda rows: torch.stack([x for (x,) in rows]) + 100,
        worker_init_fn=calls.append,
    )
    sharded = fx.shard(loader, _ctx())
    epochs = [_seen(epoch) for epoch in sharded.epochs(2)]
    assert epochs[0] != epochs[1]
    assert all(sorted(row for b in e for row in b) == list(range(100, 112)) for e in epochs)
    del sharded


def test_iterating_does_not_touch_the_process_generators():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loader = DataLoader(torch.arange(9), batch_size=2, sampler=Shuffling(9))
    assert len(_seen(fx.shard(loader, _ctx()))) == 5
    assert torch.equal(before, torch.get_rng_state())


SAMPLERS = {
    "random": lambda: RandomSampler(range(10)),
    "replacement": lambda: RandomSampler(range(10), replacement=True, num_samples=17),
    "laps": lambda: RandomSampler(range(10), num_samples=25),
    "subset": lambda: SubsetRandomSampler([1, 3, 5, 7, 9]),
    "weighted": lambda: WeightedRandomSampler([0.0, 1.0, 0.0, 3.0], 40),
    "weighted once": lambda: WeightedRandomSampler([1.0, 1.0, 1.0, 3.0], 3, replacement=False),
    "custom": lambda: Shuffling(10),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_are_functions_of_seed_and_epoch(name):
    loader = DataLoader(torch.arange(10), batch_size=2, sampler=SAMPLERS[name]())

    def rows(world, seed=3, epoch=0):
        ranks = [
            fx.shard(loader, _ctx(r, world), fx.Plan(seed=seed)).at(fx.Position(epoch=epoch))
            for r in range(world)
        ]
        batches = [[b.data[b.valid].tolist() for b in rank] for rank in ranks]
        return [row for step in zip(*batches, strict=True) for part in step for row in part]

    one = rows(1)
    assert len(one) == len(SAMPLERS[name]())
    assert rows(1) == one == rows(3)
    assert rows(1, seed=4) != one or rows(1, seed=5) != one
    assert rows(1, epoch=1) != one or rows(1, epoch=2) != one
    if name == "laps":
        assert sorted(one[:10]) == sorted(one[10:20]) == list(range(10))
    if name == "weighted":
        assert set(one) == {1, 3} and one.count(3) > one.count(1)
    if name == "subset":
        assert sorted(one) == [1, 3, 5, 7, 9]


def test_a_second_shuffled_pass_warns():
    loader = fx.shard(DataLoader(torch.arange(4), batch_size=2, shuffle=True), _ctx())
    list(loader)
    with pytest.warns(UserWarning, match=r"\.epochs"):
        list(loader)
    plain = fx.shard(DataLoader(torch.arange(4), batch_size=2), _ctx())
    assert _seen(plain) == _seen(plain)


def test_no_automatic_batching():
    loader = DataLoader(torch.arange(5), batch_size=None)
    ranks = [fx.shard(loader, _ctx(r, 2)) for r in range(2)]
    assert [[b.data.item() for b in rank] for rank in ranks] == [[0, 2, 4], [1, 3, 0]]


def test_a_break_is_continued_from_where_it_was():
    loader = fx.shard(DataLoader(torch.arange(10), batch_size=2), _ctx(), fx.Plan(accumulate=2))
    updates = []
    for epoch in loader.epochs(2):
        for batch in epoch:
            updates.append((batch.position.epoch, batch.position.updates, batch.position.micro))
            if batch.position.index == 6 and batch.position.epoch == 0:
                break
    assert updates[:3] == [(0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert updates[3] == (1, 2, 0)  # the open window goes on


WRONG = {
    "list": (lambda: fx.shard([1], _ctx()), "torch DataLoader"),
    "twice": (lambda: fx.shard(fx.shard(DataLoader([1]), _ctx()), _ctx()), "sharded already"),
    "ctx": (lambda: fx.shard(DataLoader([1]), None), "not a context"),
    "plan": (lambda: fx.shard(DataLoader([1]), _ctx(), "plan"), "not an fx.Plan"),
    "global": (
        lambda: fx.shard(DataLoader([1], batch_size=7), _ctx(0, 2), fx.Plan(batch="global")),
        "batch_size=6 or 8",
    ),
    "distributed": (
        lambda: fx.shard(
            DataLoader(range(9), sampler=DistributedSampler(range(9), 2, 0)), _ctx(0, 2)
        ),
        "without it",
    ),
    "uneven": (
        lambda: fx.shard(
            DataLoader([1]), _ctx(), fx.Plan(even="uneven", data=fx.Data(source="sharded"))
        ),
        "no rank can see",
    ),
    "at": (lambda: fx.shard(DataLoader([1]), _ctx()).at(3), "takes a Position"),
    "epochs": (lambda: list(fx.shard(DataLoader([1]), _ctx()).epochs(-1)), "0 or more"),
    "no row": (
        lambda: list(fx.shard(DataLoader([1], batch_size=2), _ctx(1, 2), fx.Plan(even="uneven"))),
        "no row",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_sharded_is_refused(name):
    wrong, words = WRONG[name]
    with pytest.raises(fx.DataError, match=words):
        wrong()


class Untouchable(Dataset):
    """Only rank 0 may read."""

    def __init__(self, rank, bad=None):
        self.rank, self.bad = rank, bad

    def __len__(self):
        assert self.rank == 0
        return 11

    def __getitem__(self, index):
        assert self.rank == 0
        if index == self.bad:
            raise ValueError("row is damaged")
        return torch.tensor(index), f"row{index}"


def _dispatch(ctx, even, bad=None):
    plan = fx.Plan(even=even, data=fx.Data(source="dispatch"), accumulate=2)
    data = Untouchable(ctx.rank, bad)
    sampler = range(11)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    return [
        (b.data[0].tolist(), list(b.data[1]), b.position, b.rows)
        for b in fx.shard(loader, ctx, plan)
    ]


@pytest.mark.parametrize("even", ["pad", "drop"])
def test_dispatch_gives_what_sharding_gives(cluster, even):
    results = cluster.run(_dispatch, even)
    plan = fx.Plan(even=even, accumulate=2)
    for rank, got in enumerate(results):
        loader = DataLoader(Untouchable(0), batch_size=2)
        want = fx.shard(loader, _ctx(rank, cluster.n), plan)
        assert got == [(b.data[0].tolist(), list(b.data[1]), b.position, b.rows) for b in want]


def test_an_error_while_rank_0_reads_reaches_everybody(pair):
    first, second = pair.outcomes(_dispatch, "pad", 6)
    assert isinstance(first, ValueError)
    assert isinstance(second, fx.DataError) and "row is damaged" in str(second)


def _own(ctx, even):
    rows = torch.arange(5 if ctx.is_main else 2) + 10 * ctx.rank
    plan = fx.Plan(even=even, data=fx.Data(source="sharded"))
    sharded = fx.shard(DataLoader(rows, batch_size=2), ctx, plan)
    found = []
    gathered = []
    for batch in sharded:
        found.append((batch.data.tolist(), batch.valid.tolist(), batch.position.is_last))
        gathered += ops.gather_valid(batch.data, batch, ctx).tolist()
    return found, gathered


def test_data_that_is_sharded_already_ends_together(pair):
    (a, all_a), (b, all_b) = pair.run(_own, "pad")
    assert [x[0] for x in a] == [[0, 1], [2, 3], [4]]
    assert [x[1] for x in b] == [[True, True], [False, False], [False, False]]
    assert [x[2] for x in a] == [x[2] for x in b] == [False, False, True]
    assert all_a == all_b == [0, 1, 10, 11, 2, 3, 4]
    (a, _), (b, _) = pair.run(_own, "drop")
    assert len(a) == len(b) == 1


def _valid_rows(ctx, n, size):
    names = [f"row{i}" for i in range(n)]
    loader = DataLoader(list(zip(range(n), names, strict=True)), batch_size=size)
    numbers, words, counts, tags = [], [], [], []
    for batch in fx.shard(loader, ctx):
        x, text = batch
        tree = {"x": x * 1.0, "text": list(text), "sum": x.sum(), "tag": f"r{ctx.rank}"}
        got = ops.gather_valid(tree, batch, ctx)
        numbers += got["x"].tolist()
        words += got["text"]
        counts.append(len(got["sum"]))
        tags.append(got["tag"])
    return numbers, words, counts, tags


@pytest.mark.parametrize(("n", "size"), [(7, 3), (8, 2), (1, 4), (13, 5)])
def test_gather_valid_returns_exactly_the_rows(cluster, n, size):
    for numbers, words, counts, tags in cluster.run(_valid_rows, n, size):
        assert numbers == [float(i) for i in range(n)]
        assert words == [f"row{i}" for i in range(n)]
        assert counts == [len(tag) for tag in tags]


def _not_rows(ctx):
    (batch, *_) = fx.shard(DataLoader(torch.arange(8), batch_size=4), ctx)
    ops.gather_valid(torch.ones(3 + ctx.rank), batch, ctx)


def test_gather_valid_refuses_what_is_not_per_row_on_every_rank(pair):
    first, second = pair.outcomes(_not_rows)
    assert isinstance(first, fx.CollectiveError | fx.DataError) and "[3]" in str(first)
    assert isinstance(second, fx.CollectiveError)
