"""Streams of Hugging Face `datasets`: rows of a run that is stopped, and of one that is split."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from tests._errors import raises_code

pytestmark = pytest.mark.recipes
N = 200


def _stream(shuffle=50):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [float(i) for i in range(N)]})
    stream = rows.to_iterable_dataset(num_shards=4)
    stream = stream.shuffle(seed=3, buffer_size=shuffle) if shuffle else stream
    return stream.with_format("torch")


def _rows(batches):
    return [row for batch in batches for row in batch.data["x"].tolist()]


@pytest.mark.parametrize("shuffle", [0, 50])
def test_a_resumed_stream_yields_every_row_once(shuffle):
    ctx = fx.DistContext()
    loader = fx.shard(DataLoader(_stream(shuffle), batch_size=4), ctx)
    first = list(itertools.islice(loader, 12))
    state = loader.state()
    assert (state is None) == bool(shuffle)
    again = fx.shard(DataLoader(_stream(shuffle), batch_size=4), ctx)
    rest = _rows(again.at(first[-1].position, state))
    assert sorted(_rows(first) + rest) == list(range(N))
    assert rest == _rows(loader.at(first[-1].position))


def test_a_stream_that_is_split_by_node_is_refused():
    distributed = pytest.importorskip("datasets.distributed")
    split = distributed.split_dataset_by_node(_stream(), rank=0, world_size=2)
    with raises_code("FX400", "split_dataset_by_node"):
        fx.shard(DataLoader(split, batch_size=4), fx.DistContext())
    declared = fx.Plan(data=fx.Data(source="sharded"))
    rows = _rows(fx.shard(DataLoader(split, batch_size=4), fx.DistContext(), declared))
    assert len(rows) == N / 2


def test_a_table_that_is_split_by_node_has_another_text_on_each_rank():
    datasets = pytest.importorskip("datasets")
    distributed = pytest.importorskip("datasets.distributed")
    rows = datasets.Dataset.from_dict({"x": list(range(8))})
    texts = set()
    for table in (rows, *(distributed.split_dataset_by_node(rows, rank, 2) for rank in range(2))):
        loader = fx.shard(DataLoader(table.with_format("torch"), batch_size=4), fx.DistContext())
        batch = next(iter(loader))
        assert torch.is_tensor(batch.data["x"])
        texts.add(batch.position.order)
    assert len(texts) == 3
