"""Data laws: every row once, at every world size, from every cursor. No processes."""

import itertools

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Sampler

import fxtrain as fx
from fxtrain.state import DistContext
from tests.data._streams import Numbers

sizes = st.integers(1, 6)
worlds = st.integers(1, 8)
counts = st.integers(0, 60)
evens = st.sampled_from(["pad", "drop", "uneven"])
# What is read: by index in order, by index shuffled, a stream, rows or batches of a sampler.
kinds = st.sampled_from(["plain", "shuffled", "stream", "custom", "batches"])


class Own(Sampler):
    """Rows in an order of its own, drawn anew for each epoch."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(torch.randperm(self.n).tolist())


class Growing(Sampler):
    """Batches of growing size."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        low, size = 0, 1
        while low < self.n:
            yield list(range(low, min(low + size, self.n)))
            low, size = low + size, size % 4 + 1


def _loader(kind, n, size):
    table = torch.arange(n)
    if kind == "stream":
        return DataLoader(Numbers(n), batch_size=size)
    if kind == "batches":
        return DataLoader(table, batch_sampler=Growing(n))
    if kind == "custom":
        return DataLoader(table, batch_size=size, sampler=Own(n))
    shuffle = kind == "shuffled" and n > 0
    return DataLoader(table, batch_size=size, shuffle=shuffle)


def _shards(kind, n, size, world, plan):
    loader = _loader(kind, n, size)
    return [fx.shard(loader, DistContext(rank=r, world_size=world), plan) for r in range(world)]


def _real(batch):
    return batch.data[batch.valid].tolist()


def _order(kind, n, plan, epoch=0):
    """Rows of an epoch in order."""
    if kind == "batches":
        return list(range(n))
    (loader,) = _shards(kind, n, 1, 1, plan)
    return [int(batch.data) for batch in loader.at(fx.Position(epoch=epoch))]


def _joined(found):
    """Real rows of all ranks in global order."""
    steps = itertools.zip_longest(*found)
    return [row for step in steps for batch in step if batch is not None for row in _real(batch)]


@given(
    kind=kinds,
    n=counts,
    size=sizes,
    world=worlds,
    even=evens,
    epoch=st.integers(0, 3),
    seed=st.integers(0, 9),
)
def test_shards_cover_every_row_once_in_an_order_of_its_own(
    kind, n, size, world, even, epoch, seed
):
    plan = fx.Plan(seed=seed, even=even)
    start = fx.Position(epoch=epoch)
    loaders = [loader.at(start) for loader in _shards(kind, n, size, world, plan)]
    found = [list(loader) for loader in loaders]
    order = _order(kind, n, fx.Plan(seed=seed), epoch)
    rows = _joined(found)
    assert rows == order[: len(rows)]
    assert len(rows) == n or even == "drop"
    assert len({len(mine) for mine in found}) == 1
    lengths = {len(batch.data) for mine in found for batch in mine}
    if kind != "batches" and world > 1 and even != "uneven":
        assert lengths <= {size}
    assert n - len(rows) < size * world or kind == "batches"
    if kind in ("plain", "shuffled"):
        assert [len(loader) for loader in loaders] == [len(mine) for mine in found]


@given(kind=kinds, n=counts, size=sizes, world=worlds, even=evens, accumulate=st.integers(1, 3))
def test_ranks_see_the_same_run(kind, n, size, world, even, accumulate):
    plan = fx.Plan(even=even, accumulate=accumulate)
    found = [list(loader) for loader in _shards(kind, n, size, world, plan)]
    for rank, mine in enumerate(found):
        for batch, other in zip(mine, found[0], strict=True):
            assert batch.position == other.position
            assert (batch.rows, batch.sizes) == (other.rows, other.sizes)
            assert int(batch.valid.sum()) == batch.rows[rank]
            assert len(batch.data) == len(batch.valid) == batch.sizes[rank] or not batch.sizes[rank]
            assert len(batch.data) > 0
            # Padding stands at the end.
            assert batch.valid.tolist() == sorted(batch.valid.tolist(), reverse=True)
    ends = [batch.position.is_last for batch in found[0]]
    assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)


@given(
    kind=kinds,
    n=counts,
    size=sizes,
    before=worlds,
    after=worlds,
    cut=st.integers(1, 8),
    even=evens,
    seed=st.integers(0, 9),
)
def test_another_world_goes_on_with_exactly_the_rows_not_yet_seen(
    kind, n, size, before, after, cut, even, seed
):
    plan = fx.Plan(seed=seed, even=even)
    first = [list(loader)[:cut] for loader in _shards(kind, n, size, before, plan)]
    longest = max(first, key=len)
    assume(longest)
    last = longest[-1].position
    order = _order(kind, n, fx.Plan(seed=seed))
    seen = _joined(first)
    assert last.samples == len(seen)
    loaders = [loader.at(last) for loader in _shards(kind, n, size, after, plan)]
    found = [list(loader) for loader in loaders]
    rest = _joined(found)
    assert seen == order[: len(seen)]
    assert rest == order[len(seen) : len(seen) + len(rest)]
    if last.is_last:
        assert rest == []
    elif even != "drop":
        assert seen + rest == order
    if rest:
        end = max(found, key=len)[-1].position
        assert end.is_last and end.samples == len(seen) + len(rest)
    epochs = [epoch.position.epoch for epoch in loaders[0].epochs(3)]
    if rest:
        assert epochs == [0, 1, 2]
    elif kind in ("plain", "shuffled") or last.is_last:
        assert epochs == [1, 2]
    else:  # how many rows are left shows only when they are read
        assert epochs[-2:] == [1, 2]


@given(n=counts, size=sizes, world=worlds, even=evens, index=st.integers(0, 30))
def test_a_stream_is_cut_like_a_table(n, size, world, even, index):
    plan, start = fx.Plan(even=even), fx.Position(index=min(index, n))
    tables, streams = (_shards(kind, n, size, world, plan) for kind in ("plain", "stream"))
    for table, stream in zip(tables, streams, strict=True):
        left, right = ([_seen(b) for b in loader.at(start)] for loader in (table, stream))
        assert left == right


def _seen(batch):
    return (
        _real(batch),
        len(batch.data),
        batch.valid.tolist(),
        batch.position,
        batch.rows,
        batch.sizes,
    )


@settings(max_examples=4)
@given(
    n=st.integers(0, 40),
    size=sizes,
    world=st.integers(1, 3),
    even=evens,
    workers=st.integers(1, 2),
    index=st.integers(0, 20),
)
def test_workers_do_not_change_a_stream(n, size, world, even, workers, index):
    plan, start = fx.Plan(even=even), fx.Position(index=min(index, n))
    rank = DistContext(rank=world - 1, world_size=world)
    alone, many = (
        [
            _seen(batch)
            for batch in fx.shard(
                DataLoader(Numbers(n), batch_size=size, num_workers=count), rank, plan
            ).at(start)
        ]
        for count in (0, workers)
    )
    assert alone == many


@given(
    kind=kinds,
    n=counts,
    size=sizes,
    world=worlds,
    accumulate=st.integers(1, 5),
    flush=st.booleans(),
    even=evens,
)
def test_windows_partition_the_micro_batches(kind, n, size, world, accumulate, flush, even):
    plan = fx.Plan(accumulate=accumulate, flush=flush, even=even)
    loader = _shards(kind, n, size, world, plan)[0]  # the first rank has a row in every step
    window, updates = [], 0
    for batch in [batch for epoch in loader.epochs(3) for batch in epoch]:
        window.append(batch)
        closed = len(window) == accumulate or (flush and batch.position.is_last)
        assert batch.position.micro == (0 if closed else len(window))
        if closed:
            window, updates = [], updates + 1
        assert batch.position.updates == updates


@given(n=st.integers(1, 40), world=worlds, size=sizes, kind=st.sampled_from(["plain", "stream"]))
def test_global_batches_are_those_of_one_process(n, world, size, kind):
    plan = fx.Plan(batch="global")
    found = [list(loader) for loader in _shards(kind, n, size * world, world, plan)]
    (alone,) = _shards(kind, n, size * world, 1, plan)
    assert [_joined([[b] for b in step]) for step in zip(*found, strict=True)] == [
        batch.data.tolist() for batch in alone
    ]


@given(
    n=counts,
    size=sizes,
    world=worlds,
    even=evens,
    accumulate=st.integers(1, 4),
    flush=st.booleans(),
    stops=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    kind=kinds,
)
def test_positions_count_what_was_seen_whatever_the_loop_leaves_out(
    n, size, world, even, accumulate, flush, stops, kind
):
    plan = fx.Plan(accumulate=accumulate, flush=flush, even=even)
    runs = []
    for rank, loader in enumerate(_shards(kind, n, size, world, plan)):
        runs.append([])
        ahead = list(loader.epochs(len(stops)))
        samples = updates = micro = 0
        pairs = zip(ahead, loader.epochs(len(stops)), stops, strict=True)
        for number, (late, epoch, stop) in enumerate(pairs):
            if stop == 0:  # skipped
                continue
            assert late.position == epoch.position
            start = fx.Position(epoch=number, samples=samples, updates=updates, micro=micro)
            assert epoch.position == start
            seen = [list(itertools.islice(one, stop)) for one in (epoch, late)]
            for batch, other in zip(*seen, strict=True):
                assert batch.position == other.position
                here = batch.position
                samples += sum(batch.rows)
                closes = micro + 1 == accumulate or (flush and here.is_last)
                micro, updates = (0, updates + 1) if closes else (micro + 1, updates)
                assert (here.samples, here.updates, here.micro) == (samples, updates, micro)
                runs[rank].append(here)
            if seen[0]:
                whole = [batch.position for batch in loader.at(start)]
                rest = [batch.position for batch in loader.at(seen[0][-1].position)]
                assert rest == whole[len(seen[0]) :]
    assert all(run == runs[0] for run in runs)
