"""Loaders that are split by rank before `fx.shard` splits them: refused on every rank."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

import fxtrain as fx
from fxtrain.errors import CollectiveError, DataError, FxError
from tests._slow import slow_after
from tests.data._streams import Numbers

N = 24


class _OfRank(Sampler):
    """Every rank's own units, without a word about it."""

    def __init__(self, units):
        self.units = units

    def __iter__(self):
        return iter(self.units)

    def __len__(self):
        return len(self.units)


class _Distributed(_OfRank):
    """As in timm and transformers."""

    def __init__(self, rank, ranks):
        super().__init__(range(rank, N, ranks))
        self.rank, self.num_replicas = rank, ranks


class _OwnSeed(_OfRank):
    """Shuffles by a generator of its own, which has another seed on each rank."""

    def __init__(self, rank):
        super().__init__(random.Random(rank).sample(range(N), N))


class _Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class _SplitByNode(Numbers):
    """A stream of Hugging Face after `split_dataset_by_node`."""

    class _Config:
        def __init__(self, rank, world_size):
            self.rank, self.world_size = rank, world_size

    def __init__(self, rank, ranks):
        super().__init__(N)
        self._distributed = self._Config(rank, ranks)


class _Table(Dataset):
    """A map-style dataset of Hugging Face, which is a slice of a table on each rank."""

    def __init__(self, rows):
        self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return self.rows[row]

    def with_format(self, kind):
        assert kind == "arrow"
        return _Slices(self.rows)


class _Slices:
    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, part):
        return _Slices(self.rows[part])

    def to_pydict(self):
        return {"x": self.rows}


class _TableStream(_Stream):
    def with_format(self, kind):
        raise AssertionError("a stream is not read as a table")


_Table.__module__ = "datasets.arrow_dataset"
_TableStream.__module__ = "datasets.iterable_dataset"


def _images(rows):
    """Rows with a part that no digest knows."""
    return [
        {"image": torch.full((2, 2), float(row)), "of": object(), "name": str(row)} for row in rows
    ]


SPLIT = {
    "units of a rank": lambda r, w: (list(range(N)), {"sampler": _OfRank(range(r, N, w))}),
    "more units on a rank": lambda r, w: (list(range(N)), {"sampler": _OfRank(range(r, N - 1, w))}),
    "a generator of its own": lambda r, w: (list(range(N)), {"sampler": _OwnSeed(r)}),
    "batches of a rank": lambda r, w: (
        list(range(N)),
        {"batch_sampler": _OfRank([[i, i + 1] for i in range(2 * r, N, 2 * w)])},
    ),
    "a stream that reads the rank": lambda r, w: (_Stream(range(r, N, w)), {}),
    "a stream with more on a rank": lambda r, w: (_Stream(range(N - r)[r:]), {}),
    "a stream that is empty on a rank": lambda r, w: (_Stream(range(N if r else 0)), {}),
    "a stream of images": lambda r, w: (_Stream(_images(range(r, N, w))), {"collate_fn": list}),
    "ready batches": lambda r, w: (
        _Stream([torch.arange(3) + i for i in range(r, N, w)]),
        {"batch_size": None},
    ),
    "a subset": lambda r, w: (Subset(list(range(N)), range(r, N, w)), {}),
    "a subset of a subset": lambda r, w: (
        Subset(Subset(list(range(N)), range(r, N, w)), range(N // w)),
        {"shuffle": True},
    ),
    "a slice of a table": lambda r, w: (_Table(range(N)[r * N // w :][: N // w]), {}),
}
ANNOUNCED = {
    "a sampler with a rank": lambda r, w: (list(range(N)), {"sampler": _Distributed(r, w)}),
    "split_dataset_by_node": lambda r, w: (_SplitByNode(r, w), {}),
}
WHOLE = {
    "a subset": lambda r, w: (Subset(list(range(N)), range(0, N, 2)), {"shuffle": True}),
    "a table": lambda r, w: (_Table(range(N)), {}),
    "a stream of a table": lambda r, w: (_TableStream(range(N)), {}),
    "images": lambda r, w: (_Stream(_images(range(N))), {"collate_fn": list}),
    "global generators": lambda r, w: (list(range(N)), {"sampler": _Shuffles(N)}),
    "a stream of random numbers": lambda r, w: (_Random(), {}),
    "one replica": lambda r, w: (list(range(N)), {"sampler": _Distributed(0, 1)}),
}


class _Shuffles(Sampler):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(random.sample(range(self.n), self.n))

    def __len__(self):
        return self.n


class _Random(IterableDataset):
    """Draws from the generators of the process, which differ between ranks."""

    def __iter__(self):
        for _ in range(N):
            yield torch.rand(2)


def _read(ctx, cases, name):
    random.seed(ctx.rank)
    torch.manual_seed(ctx.rank)
    dataset, more = cases[name](ctx.rank, ctx.world_size)
    batching = {} if "batch_sampler" in more else {"batch_size": 2}
    loader = fx.shard(DataLoader(dataset, **(batching | more)), ctx)
    return sum(batch.rows[0] + batch.rows[1] for epoch in loader.epochs(2) for batch in epoch)


def _split(ctx, name):
    return _read(ctx, SPLIT, name)


def _announced(ctx, name):
    return _read(ctx, ANNOUNCED, name)


def _whole(ctx, name):
    return _read(ctx, WHOLE, name)


@pytest.mark.parametrize("name", SPLIT)
def test_what_is_split_by_rank_is_refused_on_every_rank(pair, name):
    for error in pair.outcomes(_split, name):
        assert isinstance(error, CollectiveError), error
        assert 'source="sharded"' in str(error) and "before it was split by rank" in str(error)


@pytest.mark.parametrize("name", slow_after(1, ANNOUNCED))
def test_what_says_that_it_is_split_is_refused_by_name(pair, name):
    for error in pair.outcomes(_announced, name):
        assert isinstance(error, DataError) and 'source="sharded"' in str(error)


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_whole_on_every_rank_is_read_once(pair, name):
    assert pair.run(_whole, name) == [2 * (N // 2 if name == "a subset" else N)] * 2


class _Fails(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return N

    def __getitem__(self, row):
        if self.rank == 1:
            raise OSError("disk")
        return row


def _fails(ctx, source):
    rows = _Fails(ctx.rank)
    data = rows if source == "table" else _Stream(rows[i] for i in range(N))
    return list(fx.shard(DataLoader(data, batch_size=2), ctx))


@pytest.mark.parametrize("source", ["table", "stream"])
def test_a_first_batch_that_one_rank_cannot_read_is_an_error_of_all(pair, source):
    first, second = pair.outcomes(_fails, source)
    assert isinstance(first, FxError) and "OSError: disk" in str(first)
    assert isinstance(second, OSError) and str(second) == "disk"
