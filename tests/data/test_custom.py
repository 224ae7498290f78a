"""Samplers and batch samplers that only their authors know."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

import fxtrain as fx
from fxtrain.state import DistContext
from tests._errors import raises_code
from tests._slow import slow_after


def world(n):
    return [DistContext(rank=rank, world_size=n) for rank in range(n)]


def shards(n, plan=fx.Plan(), **kw):  # noqa: B008
    return [fx.shard(DataLoader(torch.arange(100), **kw), ctx, plan) for ctx in world(n)]


def data(loaders):
    return [[batch.data.tolist() for batch in mine] for mine in loaders]


class Fixed(Sampler):
    def __init__(self, *batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_a_global_batch_of_a_batch_sampler_is_shared():
    loaders = shards(2, fx.Plan(batch="global"), batch_sampler=Fixed([0, 1], [2, 3, 4, 5]))
    assert data(loaders) == [[[0], [2, 3]], [[1], [4, 5]]]
    assert [b.position.index for b in loaders[0]] == [1, 2]


def test_a_global_batch_that_does_not_divide_is_an_error_on_every_rank():
    for loader in shards(2, fx.Plan(batch="global"), batch_sampler=Fixed([0, 1], [2, 3, 4])):
        batches = iter(loader)
        with raises_code("FX400", "3 rows"):
            list(batches)


def test_an_order_of_the_sampler_own_is_not_read_twice_in_silence():
    (loader,) = shards(1, batch_size=3, sampler=EarlyShuffle())
    list(loader)
    with pytest.warns(UserWarning, match="second pass"):
        list(loader)
    (fixed,) = shards(1, batch_sampler=Fixed([0], [1]))
    list(fixed)
    list(fixed)


class Endless(Sampler):
    def __iter__(self):
        i = 0
        while True:
            yield i % 100
            i += 1


def test_a_sampler_without_end_can_be_left():
    (loader,) = shards(1, fx.Plan(accumulate=2), batch_size=30, sampler=Endless())
    seen = []
    for epoch in loader.epochs(2):
        for batch in epoch:
            seen.append((batch.data[0].item(), batch.position.samples))
            if batch.position.index >= 120:
                break
    assert [row[1] for row in seen] == [30 * i for i in range(1, 9)]
    assert [row[0] for row in seen] == [0, 30, 60, 90] * 2


def test_keys_need_not_be_numbers():
    names = {"a": torch.tensor(1), "b": torch.tensor(2), "c": torch.tensor(3)}
    loader = DataLoader(names, batch_size=2, sampler=["c", "a", "b"])
    assert data([fx.shard(loader, world(1)[0])]) == [[[3, 1], [2]]]


def test_a_position_beyond_the_sampler_stems_from_other_data():
    (loader,) = shards(1, batch_sampler=Fixed([0], [1]))
    with raises_code("FX401"):
        list(loader.at(fx.Position(index=3)))


def test_a_batch_of_no_rows_is_refused():
    for loader in shards(2, fx.Plan(even="uneven"), batch_sampler=Fixed([0], [1], [], [2])):
        with raises_code("FX400", "empty batch"):
            list(loader)


class Rewinding(Sampler):
    """Its own iterator, which begins again when it is asked after its end."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.next = (self.next + 1) % 6
        if not self.next:
            raise StopIteration
        return self.next


def test_an_epoch_ends_where_the_iterator_of_a_sampler_ends_first():
    assert data(shards(1, batch_size=2, sampler=Rewinding())) == [[[1, 2], [3, 4], [5]]]


class Growing(Sampler):
    """Also a dataset and a stream: four rows, and six more in each later epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4 + 6 * self.epoch

    def __iter__(self):
        return iter(range(len(self)))

    def __getitem__(self, row):
        return row


class GrowingStream(IterableDataset):
    epoch = 0
    set_epoch, __len__, __iter__ = Growing.set_epoch, Growing.__len__, Growing.__iter__


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "make",
    slow_after(
        2,
        [
            lambda: (torch.arange(100), {"sampler": Growing()}),
            lambda: (Growing(), {}),
            lambda: (Growing(), {"shuffle": True}),
            lambda: (GrowingStream(), {}),
        ],
    ),
)
def test_the_number_of_rows_may_depend_on_the_epoch(make, workers):
    def loader():
        dataset, order = make()
        return fx.shard(
            DataLoader(dataset, batch_size=2, num_workers=workers, **order), DistContext()
        )

    lengths, batches = [], []
    for epoch in loader().epochs(2):
        lengths.append(len(epoch))
        batches += epoch
    assert lengths == [2, 5]
    assert sorted(torch.cat([b.data for b in batches[2:]]).tolist()) == list(range(10))
    rest = [batch for epoch in loader().at(batches[4].position).epochs(2) for batch in epoch]
    assert data([rest]) == data([batches[5:]])


def test_an_iteration_within_another_leaves_the_epoch_of_the_dataset_alone():
    class Told(Growing):
        def __getitem__(self, row):
            return 100 * self.epoch + row

    dataset, rows, ctx = Told(), [], DistContext()
    loader, other = (fx.shard(DataLoader(dataset, batch_size=5), ctx) for _ in "ab")
    for batch in loader.at(fx.Position(epoch=1)):
        rows.append(batch.data.tolist())
        assert [b.data.tolist() for b in other] == [[0, 1, 2, 3]]
    assert rows == [[100, 101, 102, 103, 104], [105, 106, 107, 108, 109]]


class EarlyShuffle(Growing):
    """Shuffles where it is told the epoch, by the process's generator."""

    def set_epoch(self, epoch):
        self.order = random.sample(range(8), 8)

    def __iter__(self):
        return iter(self.order)


def test_a_sampler_that_shuffles_when_told_the_epoch_is_the_same_on_all_ranks():
    rows = []
    for rank, loader in enumerate(shards(2, sampler=EarlyShuffle(), batch_size=2)):
        random.seed(rank)
        rows += [row for batch in loader for row in batch.data.tolist()]
    assert sorted(rows) == list(range(8))
