"""What a batch and a sharded loader offer beside their rows."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import fxtrain as fx
from tests._errors import raises_code


def _first(data, **options):
    with fx.detect(env={}, device="cpu") as ctx:
        return next(iter(fx.shard(DataLoader(data, batch_size=2, **options), ctx)))


def test_a_batch_of_a_mapping_is_one():
    batch = _first([{"x": torch.ones(3), "y": n} for n in range(4)])
    got = (lambda **columns: columns)(**batch)
    assert got == dict(batch) == batch.data and got["y"].tolist() == [0, 1]
    assert list(batch.keys()) == list(batch) == ["x", "y"] and "x" in batch and len(batch) == 2
    assert dict(batch.items()) == dict(zip(batch.keys(), batch.values(), strict=True))


def test_a_batch_is_cast_and_moved_like_a_tensor():
    batch = _first([(torch.ones(3), n) for n in range(4)])
    cast, moved = batch.to(torch.float64), batch.to("meta")
    assert [one.dtype for one in cast] == [torch.float64, torch.int64]
    assert {one.device.type for one in (*moved, moved.valid)} == {"meta"}
    assert cast.position == moved.position == batch.position and batch[0].dtype == torch.float32


@given(
    rows=st.integers(1, 12),
    size=st.integers(1, 4),
    accumulate=st.integers(1, 4),
    flush=st.booleans(),
    even=st.sampled_from(["pad", "drop"]),
    epochs=st.integers(0, 3),
)
def test_total_updates_are_those_of_the_run(rows, size, accumulate, flush, even, epochs):
    plan = fx.Plan(accumulate=accumulate, flush=flush, even=even)
    with fx.detect(env={}, device="cpu") as ctx:
        loader = fx.shard(DataLoader(torch.arange(rows), batch_size=size), ctx, plan)
        updates = [batch.position.updates for epoch in loader.epochs(epochs) for batch in epoch]
        assert loader.total_updates(epochs) == max(updates, default=0)


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_a_loader_knows_its_dataset_size_and_epoch():
    data = torch.arange(6)
    with fx.detect(env={}, device="cpu") as ctx:
        loader = fx.shard(DataLoader(data, batch_size=4), ctx)
        assert loader.dataset is data and loader.batch_size == 4
        sampled = fx.shard(DataLoader(data, batch_sampler=[[0, 1], [2], [3, 4, 5]]), ctx)
        assert sampled.batch_size is None and len(sampled) == 3
        assert [epoch.number for epoch in loader.epochs(3)] == [0, 1, 2]
        stream = fx.shard(DataLoader(_Stream(), batch_size=2), ctx)
        with raises_code("FX400", "total_updates"):
            stream.total_updates(2)
        with raises_code("FX400", "total_updates(-1)"):
            loader.total_updates(-1)
