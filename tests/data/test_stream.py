"""Iterable datasets: the order is that of the stream, whoever reads it."""

import random
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import fxtrain as fx
from fxtrain.state import DistContext
from tests._errors import raises_code
from tests._slow import slow_after
from tests.data._streams import Numbers


def world(n):
    return [DistContext(rank=rank, world_size=n) for rank in range(n)]


def shards(dataset, n, plan=fx.Plan(), **kw):  # noqa: B008
    return [fx.shard(DataLoader(dataset, **kw), ctx, plan) for ctx in world(n)]


def data(loaders):
    return [[batch.data.tolist() for batch in mine] for mine in loaders]


class Shuffling(IterableDataset):
    """Draws its order, and one number per row, from the global generators."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        order = list(range(self.n))
        random.shuffle(order)
        for i in order:
            yield i, float(torch.rand(()))


class Epochs(IterableDataset):
    def __init__(self):
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([10 * self.epoch + i for i in range(5)])


class Splits(IterableDataset):
    """Leaves the rows of other workers out, as torch's documentation shows."""

    def __iter__(self):
        info = get_worker_info()
        if info is None:
            return iter(range(12))
        return iter(range(info.id, 12, info.num_workers))


class Once(IterableDataset):
    def __init__(self, n):
        self.rows = iter(range(n))

    def __iter__(self):
        return self.rows


def _same(rows):
    return rows


def _noisy(rows):
    return [(row, float(torch.rand(())), random.random()) for row in rows]


def _all(batches):
    return [(b.data.tolist(), b.position, b.rows, b.sizes, b.valid.tolist()) for b in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_items_are_dealt_one_by_one(workers):
    found = data(
        shards(Numbers(5), 2, batch_size=None, num_workers=workers, collate_fn=torch.tensor)
    )
    assert found == [[0, 2, 4], [1, 3, 4]]


def test_drop_last_drops():
    assert data(shards(Numbers(7), 2, batch_size=3, drop_last=True)) == [[[0, 1, 2]], [[3, 4, 5]]]


@pytest.mark.slow
def test_a_stream_that_shuffles_is_the_same_for_all_workers_of_all_ranks():
    def read(n, workers, index=0):
        loaders = shards(Shuffling(12), n, batch_size=2, num_workers=workers, collate_fn=_same)
        found = [[b.data for b in m.at(fx.Position(index=index))] for m in loaders]
        return [row for step in zip(*found, strict=True) for rows in step for row in rows]

    one = read(1, 1)
    assert sorted(i for i, _ in one) == list(range(12))
    assert read(1, 2) == read(2, 1) == one
    assert read(2, 2, index=4) == one[4:]


def test_random_collating_depends_on_the_place_only():
    def read(n, workers):
        loaders = shards(Numbers(8), n, batch_size=2, num_workers=workers, collate_fn=_noisy)
        found = [[b.data for b in m] for m in loaders]
        return [row for step in zip(*found, strict=True) for rows in step for row in rows]

    assert read(1, 1) == read(1, 2) == read(2, 1)
    assert len({row[1] for row in read(1, 1)}) == 8


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_is_told_its_epoch_also_in_workers_that_live_on(workers):
    (loader,) = shards(
        Epochs(), 1, batch_size=3, num_workers=workers, persistent_workers=workers > 0
    )
    found = [b.data.tolist() for epoch in loader.epochs(2) for b in epoch]
    assert found == [[0, 1, 2], [3, 4], [10, 11, 12], [13, 14]]


def test_a_stream_may_be_read_twice_whether_or_not_it_is_told_epochs():
    for plan in (fx.Plan(), DECLARED):  # warnings are errors here
        (loader,) = shards(Epochs(), 1, plan, batch_size=3)
        assert [_all(loader) for _ in range(2)] == [_all(loader)] * 2


def test_a_dataset_that_splits_itself_over_workers_loses_no_rows():
    found = data(shards(Splits(), 2, batch_size=2, num_workers=2))
    assert found == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]


def test_a_stream_is_padded_with_rows_of_its_last_batch():
    for stream, rows in ((Once, [[3, 3, 3]]), (Numbers, [[3, 3, 3]])):
        ctx = world(2)[1]
        assert data([fx.shard(DataLoader(stream(4), batch_size=3), ctx)]) == [rows]
    assert data(shards(Numbers(7), 2, batch_size=3)) == [
        [[0, 1, 2], [6, 6, 6]],
        [[3, 4, 5], [6, 6, 6]],
    ]


def test_persistent_workers_start_the_stream_anew_after_a_break():
    (loader,) = shards(Numbers(40), 1, batch_size=2, num_workers=2, persistent_workers=True)
    next(iter(loader))
    assert [b.data[0].item() for b in loader] == list(range(0, 40, 2))


class Breaks(IterableDataset):
    def __iter__(self):
        yield 1
        raise OSError("disk")


def test_an_error_of_the_stream_is_raised():
    (loader,) = shards(Breaks(), 1)
    with pytest.raises(OSError, match="disk"):
        list(loader)


# Streams that are split already, on one rank

DECLARED = fx.Plan(data=fx.Data(source="sharded"), accumulate=2)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_split_stream_is_told_its_epoch_also_in_workers_that_live_on(workers):
    (loader,) = shards(
        Epochs(), 1, DECLARED, batch_size=3, num_workers=workers, persistent_workers=workers > 0
    )
    found = [b for epoch in loader.epochs(2) for b in epoch]
    assert [b.data.tolist() for b in found] == [[0, 1, 2], [3, 4], [10, 11, 12], [13, 14]]
    assert [b.position.samples for b in found] == [3, 5, 8, 10]
    assert [b.position.micro for b in found] == [1, 0, 1, 0]
    rest = loader.at(found[2].position)
    assert [b.data.tolist() for b in rest] == [[13, 14]]


def test_a_split_stream_is_split_over_workers_by_itself():
    found = data(shards(Splits(), 1, DECLARED, batch_size=4, num_workers=2))
    assert found == [[[0, 2, 4, 6], [1, 3, 5, 7], [8, 10], [9, 11]]]


def test_a_split_stream_may_yield_items_and_drop_what_is_left():
    assert data(shards(Numbers(3), 1, DECLARED, batch_size=None, collate_fn=torch.tensor)) == [
        [0, 1, 2]
    ]
    assert data(shards(Numbers(5), 1, DECLARED, batch_size=2, drop_last=True)) == [[[0, 1], [2, 3]]]
    dropping = fx.Plan(data=fx.Data(source="sharded"), even="drop")
    assert data(shards(Numbers(5), 1, dropping, batch_size=2)) == [[[0, 1], [2, 3]]]
    assert data(shards(Numbers(0), 1, DECLARED, batch_size=2)) == [[]]


def test_a_global_batch_of_split_data_is_shared_by_size():
    plan = fx.Plan(data=fx.Data(source="sharded"), batch="global")
    assert data(shards(Numbers(3), 1, plan, batch_size=2)) == [[[0, 1], [2]]]
    for ctx in world(2):
        with raises_code("FX400", "2 ranks"):
            fx.shard(DataLoader(Numbers(3), batch_size=3), ctx, plan)
        with raises_code("FX400", "global"):
            fx.shard(DataLoader(range(3), batch_sampler=[[0], [1, 2]]), ctx, plan)


class Read(Dataset):
    """0 to 9, with the rows that were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 10

    def __getitem__(self, row):
        self.read.append(row)
        return row


def test_a_split_table_continues_from_its_state_without_reading_what_came_before():
    (loader,) = shards(Read(), 1, DECLARED, batch_size=2, shuffle=True)
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == 2:
            cut = batch.position, loader.state()
    table = Read()
    (again,) = shards(table, 1, DECLARED, batch_size=2, shuffle=True)
    rest = list(again.at(*cut))
    assert [b.position for b in rest] == [b.position for b in batches[2:]]
    assert [b.data.tolist() for b in rest] == [b.data.tolist() for b in batches[2:]]
    assert table.read == torch.cat([b.data for b in rest]).tolist()
    position_only = list(again.at(cut[0]))
    assert [b.data.tolist() for b in position_only] == [b.data.tolist() for b in rest]


class Rewinding(IterableDataset):
    """Its own iterator, which begins again when it is asked after its end."""

    def __init__(self, n):
        self.n, self.next = n, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.n:
            self.next = 0
            raise StopIteration
        self.next += 1
        return self.next - 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_ends_where_its_iterator_ends_first(workers):
    for even in ("uneven", "drop"):
        (loader,) = shards(Rewinding(7), 1, fx.Plan(even=even), batch_size=3, num_workers=workers)
        for epoch in loader.epochs(2):
            last = [[6]] if even == "uneven" else []
            assert [b.data.tolist() for b in epoch] == [[0, 1, 2], [3, 4, 5], *last]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("rows", slow_after(1, [range(9), Numbers(9)]))
def test_an_iteration_within_another_leaves_it_alone(rows, persistent):
    settings = {"num_workers": 2, "persistent_workers": persistent}
    (loader,) = shards(rows, 1, batch_size=2, **settings)
    outer = []
    for batch in loader:
        outer.append((batch.data.tolist(), batch.position.index))
        assert next(iter(loader)).data.tolist() == [0, 1]
    assert outer == [([0, 1], 2), ([2, 3], 4), ([4, 5], 6), ([6, 7], 8), ([8], 9)]


class SharedEpoch(IterableDataset):
    """Workers share the number of the epoch, and each adds to it, as streams of `datasets` do."""

    def __init__(self):
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch):
        more = epoch - self.epoch
        time.sleep(0.1)
        self.epoch += more

    def __iter__(self):
        for row in range(6):
            yield 10 * int(self.epoch) + row


@pytest.mark.slow
def test_workers_that_share_the_epoch_read_the_same_one():
    settings = {"batch_size": 2, "num_workers": 2, "persistent_workers": True}
    (loader,) = shards(SharedEpoch(), 1, **settings)
    assert data(loader.epochs(2)) == [[[0, 1], [2, 3], [4, 5]], [[10, 11], [12, 13], [14, 15]]]


class _Examples:
    """A step of a stream of Hugging Face: its rows come from the step inside."""

    def __init__(self, inside=None, n=0):
        self.ex_iterable, self.n = inside, n

    def __iter__(self):
        return iter(range(self.n) if self.ex_iterable is None else self.ex_iterable)


class BufferShuffledExamplesIterable(_Examples):
    """Shuffles in a buffer of 5 rows."""

    def __iter__(self):
        buffer, numbers = [], random.Random(3)
        for row in self.ex_iterable:
            buffer.append(row)
            if len(buffer) == 5:
                yield buffer.pop(numbers.randrange(5))
        numbers.shuffle(buffer)
        yield from buffer


class HuggingFace(IterableDataset):
    """As in `datasets`: the state has what was read of the source, not the rows of the buffer."""

    def __init__(self, n, *, shuffle):
        self.n, self.seen, self.skipped = n, 0, 0
        self._ex_iterable = _Examples(n=n)
        if shuffle:
            self._ex_iterable = _Examples(BufferShuffledExamplesIterable(self._ex_iterable))

    def __iter__(self):
        for seen, row in enumerate(self._ex_iterable, 1):
            self.seen = seen
            if seen > self.skipped:
                yield row

    def state_dict(self):
        return {"seen": min(self.n, self.seen + 5)}

    def load_state_dict(self, state):
        self.skipped = state["seen"]


@pytest.mark.parametrize("source", ["shard", "sharded"])
def test_a_state_that_leaves_out_a_shuffle_buffer_is_not_used(source, caplog):
    plan = fx.Plan(data=fx.Data(source=source))

    def shard(shuffle):
        dataset = HuggingFace(20, shuffle=shuffle)
        return fx.shard(DataLoader(dataset, batch_size=4), DistContext(), plan)

    loader = shard(5)
    first = next(iter(loader))
    state = loader.state()
    assert state is None
    rest = [row for batch in shard(5).at(first.position, state) for row in batch.data.tolist()]
    assert sorted(first.data.tolist() + rest) == list(range(20))
    assert "is read again from the start of epoch 0 to row 4, since its state" in caplog.text
    plain = shard(0)
    next(iter(plain))
    assert plain.state() is not None
