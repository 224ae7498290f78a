"""The user's loader: what is kept of it, and what workers do."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

import fxtrain as fx
from fxtrain.data import sources
from fxtrain.state import DistContext
from tests._errors import raises_code
from tests._slow import slow_after


def world(n):
    return [DistContext(rank=rank, world_size=n) for rank in range(n)]


def read(loader, n=1, plan=fx.Plan(), epoch=0):  # noqa: B008
    position = fx.Position(epoch=epoch)
    return [[b.data for b in fx.shard(loader, ctx, plan).at(position)] for ctx in world(n)]


def _lists(found):
    return [[data.tolist() for data in mine] for mine in found]


class Noisy(Dataset):
    """Rows with random numbers from three generators, as augmentation draws them."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return i, random.random(), float(torch.rand(())), float(np.random.rand())


class NoisyAtOnce(Noisy):
    """The same, asked for whole batches."""

    def __getitems__(self, indices):
        return [self[i] for i in indices]


def _same(rows):
    return rows


@pytest.mark.parametrize("kind", slow_after(1, [Noisy, NoisyAtOnce]))
def test_augmentation_depends_on_neither_workers_nor_restarts(kind):
    def epoch(workers, skip=0, number=0, **kw):
        loader = DataLoader(
            kind(12), batch_size=2, num_workers=workers, collate_fn=_same, shuffle=True, **kw
        )
        sharded = fx.shard(loader, DistContext(), fx.Plan(seed=5))
        return [b.data for b in sharded.at(fx.Position(epoch=number, index=skip))]

    one = epoch(1)
    assert epoch(2) == one
    assert epoch(2, skip=4) == one[2:]
    assert epoch(2, number=1) != one
    with_order = sorted(row[0] for batch in one for row in batch)
    assert with_order == list(range(12))
    assert len({row[1] for batch in one for row in batch}) == 12


def test_augmentation_is_that_of_the_place_at_every_world_size():
    loader = DataLoader(Noisy(8), batch_size=2, num_workers=1, collate_fn=_same)
    (alone,), pair = read(loader), read(loader, 2)
    assert [batch for step in zip(*pair, strict=True) for batch in step] == alone


def test_without_reseeding_workers_are_seeded_as_torch_seeds_them():
    loader = DataLoader(Noisy(4), batch_size=2, num_workers=1, collate_fn=_same)
    plan = fx.Plan(data=fx.Data(reseed_workers=False))
    ((a, b),) = read(loader, plan=plan)
    assert read(loader, plan=plan) == [[a, b]]
    assert read(loader, plan=plan, epoch=1) != [[a, b]]
    assert read(loader) != [[a, b]]
    assert read(loader, 2, plan)[0] != read(loader, 2, plan)[1]


def test_in_the_process_itself_generators_are_the_users():
    random.seed(3)
    torch.manual_seed(3)
    np.random.seed(3)
    expected = [Noisy(4)[i] for i in range(4)]
    random.seed(3)
    torch.manual_seed(3)
    np.random.seed(3)
    ((a, b),) = read(DataLoader(Noisy(4), batch_size=2, collate_fn=_same))
    assert a + b == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_iterating_draws_nothing_from_the_process(workers):
    loader = DataLoader(range(6), batch_size=2, shuffle=True, num_workers=workers)
    before = torch.get_rng_state(), random.getstate()
    read(loader, 2)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


def test_a_generator_of_the_loader_is_left_alone():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    loader = DataLoader(range(6), batch_size=2, shuffle=True, generator=generator)
    read(loader)
    assert torch.equal(before, generator.get_state())


class Knows(Dataset):
    """Says in which worker and epoch it is read, and what its worker was told."""

    def __init__(self):
        self.epoch, self.told = None, None

    def __len__(self):
        return 4

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, i):
        info = get_worker_info()
        return i, self.epoch, self.told, None if info is None else info.dataset is self


def tell(worker):
    info = get_worker_info()
    info.dataset.told = (worker, info.num_workers)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_start_as_they_would_without_us(context):
    loader = DataLoader(
        Knows(),
        batch_size=2,
        num_workers=1,
        collate_fn=_same,
        worker_init_fn=tell,
        multiprocessing_context=context,
        persistent_workers=True,
    )
    sharded = fx.shard(loader, DistContext())
    found = [row for epoch in sharded.epochs(2) for batch in epoch for row in batch.data]
    assert found == [(i, epoch, (0, 1), True) for epoch in range(2) for i in range(4)]


def test_in_the_process_itself_the_dataset_is_told_the_epoch_too():
    loader = DataLoader(Knows(), batch_size=2, collate_fn=_same)
    assert read(loader, epoch=7)[0][0][0] == (0, 7, None, None)


def test_persistent_workers_outlive_an_epoch_that_was_broken_off():
    loader = DataLoader(range(40), batch_size=2, num_workers=2, persistent_workers=True)
    sharded = fx.shard(loader, DistContext())
    next(iter(sharded))
    assert [b.data.tolist() for b in sharded] == [[i, i + 1] for i in range(0, 40, 2)]
    rest = sharded.at(fx.Position(index=36))
    assert [b.data.tolist() for b in rest] == [[36, 37], [38, 39]]


def test_every_setting_is_kept(monkeypatch):
    made = []
    real = sources.rebuild
    monkeypatch.setattr(
        sources, "rebuild", lambda *a, **kw: made.append(real(*a, **kw)) or made[-1]
    )
    loader = DataLoader(
        range(8),
        batch_size=2,
        num_workers=2,
        prefetch_factor=3,
        pin_memory=True,
        timeout=17,
        multiprocessing_context="spawn",
        persistent_workers=True,
    )
    fx.shard(loader, DistContext())
    (over,) = made
    for name in ("num_workers", "prefetch_factor", "pin_memory", "timeout", "persistent_workers"):
        assert getattr(over, name) == getattr(loader, name)
    assert over.multiprocessing_context.get_start_method() == "spawn"
    made.clear()
    fx.shard(DataLoader(range(8), collate_fn=_same, in_order=False), DistContext())
    assert made[0].collate_fn is _same and not made[0].in_order


def test_batches_out_of_order_are_refused():
    loader = DataLoader(range(8), num_workers=1, in_order=False)
    with raises_code("FX400", "in_order=True"):
        fx.shard(loader, DistContext())


class Doubling(DataLoader):
    def __iter__(self):
        return (2 * batch for batch in super().__iter__())


class Named(DataLoader):
    """Like those that only choose a collate function."""

    def __init__(self, dataset, **kw):
        super().__init__(dataset, collate_fn=sum, **kw)


def test_a_subclass_is_refused_only_where_it_would_be_bypassed():
    with raises_code("FX400", "DataLoader.__iter__"):
        fx.shard(Doubling(range(3)), DistContext())
    assert read(Named(range(4), batch_size=2)) == [[1, 5]]


def test_torchdatas_stateful_loader_is_read_as_a_plain_one():
    kind = type("StatefulDataLoader", (DataLoader,), {"__iter__": None})
    kind.__module__ = "torchdata.stateful_dataloader.stateful_dataloader"
    assert _lists(read(kind(range(3), batch_size=2))) == [[[0, 1], [2]]]


def test_a_plain_batch_sampler_is_read_by_rows():
    loader = DataLoader(
        torch.arange(7), batch_sampler=BatchSampler(SequentialSampler(range(7)), 3, False)
    )
    assert _lists(read(loader, 2)) == [[[0, 1, 2], [6, 0, 1]], [[3, 4, 5], [2, 3, 4]]]
    loader = DataLoader(
        torch.arange(7), batch_sampler=BatchSampler(RandomSampler(range(7)), 3, True)
    )
    found = read(loader, 2)
    assert [len(mine) for mine in found] == [1, 1]
    assert len({i for mine in found for data in mine for i in data.tolist()}) == 6


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_sampler_without_batching_asks_for_whole_lists(workers):
    sampler = BatchSampler(SequentialSampler(range(7)), 3, False)
    loader = DataLoader(torch.arange(7), sampler=sampler, batch_size=None, num_workers=workers)
    assert _lists(read(loader, 2)) == [[[0, 1, 2], [6, 0, 1]], [[3, 4, 5], [2, 3, 4]]]


@pytest.mark.parametrize("workers", slow_after(1, [0, 2]))
def test_without_batching_items_are_dealt(workers):
    data = [torch.full((2,), i) for i in range(5)]
    loader = DataLoader(data, batch_size=None, num_workers=workers)
    found = [list(fx.shard(loader, ctx)) for ctx in world(2)]
    assert [[int(b.data[0]) for b in mine] for mine in found] == [[0, 2, 4], [1, 3, 0]]
    assert [b.valid.tolist() for b in found[1]] == [[True], [True], [False]]
    assert found[0][-1].position == fx.Position(index=5, samples=5, updates=3, is_last=True)
    assert found[0][-1].sizes == (1, 1)
    with raises_code("FX400", 'batch="global"'):
        fx.shard(loader, world(2)[0], fx.Plan(batch="global"))


class Lengths(IterableDataset):
    def __iter__(self):
        return iter(range(5))

    def __len__(self):
        return 5


def test_an_iterable_dataset_with_a_length_gives_one():
    loaders = [
        fx.shard(DataLoader(Lengths(), batch_size=2), ctx, fx.Plan(even="uneven"))
        for ctx in world(2)
    ]
    assert [len(loader) for loader in loaders] == [2, 2] == [len(list(one)) for one in loaders]
