"""Streams of any kind: each rank sees what one rank would, each row once, from every cursor."""

import copy
import itertools
import random

import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import fxtrain as fx
from fxtrain.state import DistContext
from property_tests.conftest import NO_SHRINK

EPOCHS = 3


class _Stream(IterableDataset):
    """0 to n - 1, in an order of its own for each epoch that it knows."""

    def __init__(self, n):
        self.n, self.epoch, self.next, self.opened = n, 0, 0, 0

    def __iter__(self):
        self.opened += 1
        return self.read()

    def order(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return torch.randperm(self.n, generator=generator).tolist()

    def read(self):
        yield from range(self.n)


class _Counts(_Stream):
    """Counts its epochs, to shuffle."""

    def read(self):
        order = self.order()
        self.epoch += 1
        yield from order


class _Told(_Stream):
    """Is told its epoch, and looks at it for every row."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def read(self):
        for place in range(self.n):
            yield self.order()[place]


class _KeepsPlace(_Stream):
    """Its place is in itself, and begins again at the end."""

    def read(self):
        while self.next < self.n:
            self.next += 1
            yield self.next - 1
        self.next = 0


class _Draws(_Stream):
    """Shuffles by the generators of the process."""

    def read(self):
        order = self.order()
        random.shuffle(order)
        yield from order


class _HasState(_KeepsPlace):
    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class _AllAttributes(_HasState):
    """Its state is all that is written on it."""

    def state_dict(self):
        return dict(self.__dict__)

    def load_state_dict(self, state):
        self.__dict__.update(state)


class _LastIterator(_Stream):
    """Its iterators are independent; its state is that of the last one, as with `datasets`."""

    def __init__(self, n):
        super().__init__(n)
        self.start, self.now = {"next": 0}, {"next": 0}

    def read(self):
        now = self.now = dict(self.start)
        while now["next"] < self.n:
            now["next"] += 1
            yield now["next"] - 1

    def state_dict(self):
        return dict(self.now)

    def load_state_dict(self, state):
        self.start = dict(state)


class _ToldAndState(_HasState):
    set_epoch = _Told.set_epoch

    def read(self):
        while self.next < self.n:
            self.next += 1
            yield self.order()[self.next - 1]
        self.next = 0


WITH_STATE = (_HasState, _AllAttributes, _ToldAndState, _LastIterator)
KINDS = (_Stream, _Counts, _Told, _KeepsPlace, _Draws, *WITH_STATE)
# What another pass does not disturb: the others have one place or count, in themselves.
SHARED = (_Stream, _Told, _Draws, *WITH_STATE)


def _ranks(dataset, size, world, plan, workers=0):
    """A loader per rank, each over a copy of the dataset, as in processes."""
    return [
        fx.shard(
            DataLoader(copy.deepcopy(dataset), batch_size=size, num_workers=workers),
            DistContext(rank=rank, world_size=world),
            plan,
        )
        for rank in range(world)
    ]


def _rows(batches):
    """Rows of a global batch in order, from the batches of all ranks."""
    return [row for batch in batches for row in batch.data[: batch.valid.sum()].tolist()]


def _epochs(loaders, epochs=EPOCHS):
    """The rows of each epoch; every rank iterates by itself, and draws what it wants."""
    found = []
    for rank, loader in enumerate(loaders):
        random.seed(rank)
        torch.manual_seed(rank)
        found.append([list(epoch) for epoch in loader.epochs(epochs)])
    return [
        [row for batches in zip(*epoch, strict=True) for row in _rows(batches)]
        for epoch in zip(*found, strict=True)
    ]


def _check(kind, n, size, world, even, workers):
    plan = fx.Plan(even=even)
    loaders = _ranks(kind(n), size, world, plan, workers)
    epochs = _epochs(loaders)
    alone = _epochs(_ranks(kind(n), size, 1, fx.Plan(), min(workers, 1)))
    for rows, wanted in zip(epochs, alone, strict=True):
        assert sorted(wanted) == list(range(n))
        assert rows == wanted[: len(rows)]
        assert len(rows) == (n // (size * world) * size * world if even == "drop" else n)
    for loader in loaders:
        kept = vars(kind(n)).keys()
        assert vars(loader.dataset).keys() == kept  # nothing is written into it
        if not workers and kind is not _AllAttributes:
            assert loader.dataset.opened == EPOCHS


@settings(max_examples=25)
@example(_Counts, 61, 3, 2, "uneven")
@example(_KeepsPlace, 61, 6, 3, "pad")
@given(
    st.sampled_from(KINDS),
    st.integers(1, 40),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from(["pad", "uneven", "drop"]),
)
def test_each_rank_sees_what_one_rank_would(kind, n, size, world, even):
    _check(kind, n, size, world, even, 0)


@settings(max_examples=2, phases=NO_SHRINK, deadline=None)
@example(_Draws, 9, 2, 2)
@given(st.sampled_from(KINDS), st.integers(1, 20), st.integers(1, 4), st.integers(1, 2))
def test_workers_see_what_one_rank_would(kind, n, size, workers):
    _check(kind, n, size, 2, "pad", workers)


@settings(max_examples=25)
@given(
    st.sampled_from(SHARED),
    st.integers(1, 20),
    st.integers(1, 4),
    st.lists(st.sampled_from(["state", "first", "whole", "step"]), max_size=12),
    st.sampled_from(["shard", "sharded"]),
)
@example(_HasState, 6, 1, ["step"] * 3, "shard")  # its state is asked for when another has read
def test_passes_in_turns_leave_each_other_alone(kind, n, size, others, source):
    """The rows of a pass are its own, whatever other loaders of the dataset do between them."""
    assume(source == "shard" or kind is not _Draws)  # nothing seeds what a stream of a rank draws
    dataset, ctx, plan = kind(n), DistContext(), fx.Plan(data=fx.Data(source=source))
    loader = fx.shard(DataLoader(dataset, batch_size=2), ctx, plan).at(fx.Position(epoch=1))
    wanted = _epochs(_ranks(kind(n), size, 1, fx.Plan()), 2)
    beside, seen, rows = iter(()), [], []
    turns = itertools.chain(others, itertools.repeat("none"))
    for batch, other in zip(loader, turns, strict=False):
        rows += batch.data.tolist()
        if other == "state":
            loader.state()
        if other in ("first", "whole"):
            limit = 1 if other == "first" else None
            every = fx.shard(DataLoader(dataset, batch_size=size), ctx, plan)
            found = [row for batch in itertools.islice(every, limit) for row in batch.data.tolist()]
            assert found == wanted[0][: len(found)]
            assert len(found) == (n if other == "whole" else min(n, size))
        if other == "step":
            if not seen:
                beside = iter(fx.shard(DataLoader(dataset, batch_size=size), ctx, plan))
            seen += next(beside).data.tolist() if len(seen) < n else []
    assert rows == wanted[1]
    assert seen == wanted[0][: len(seen)]


@settings(max_examples=25)
@given(
    st.sampled_from(KINDS),
    st.integers(2, 30),
    st.tuples(st.integers(1, 4), st.integers(1, 3)),
    st.tuples(st.integers(1, 4), st.integers(1, 3)),
    st.integers(1, 8),
    st.integers(0, 2),
    st.booleans(),
)
def test_a_stream_that_is_resumed_continues_or_raises(kind, n, before, after, cut, epoch, by_state):
    """In a new process, at another world size and batch size."""
    plan = fx.Plan(even="uneven")
    loaders = _ranks(kind(n), *before, plan)
    if epoch:
        _epochs(loaders, epoch)
    loaders = [loader.at(fx.Position(epoch=epoch)) for loader in loaders]
    found = [list(itertools.islice(loader, cut)) for loader in loaders]
    states = [loader.state() for loader in loaders]
    position = found[0][-1].position
    assume(not position.is_last)
    whole = _rows_of(kind, n, epoch)
    seen = [row for batches in zip(*found, strict=True) for row in _rows(batches)]
    # A new process begins with the first epoch of a stream that counts, told by its first rows.
    assume(kind is not _Counts or not epoch or _rows_of(kind, n, 0)[: len(seen)] != seen)
    assert seen == whole[: len(seen)]
    state = states[0] if by_state else None
    again = [loader.at(position, state) for loader in _ranks(kind(n), *after, plan)]
    try:
        rest = [row for batches in zip(*map(list, again), strict=True) for row in _rows(batches)]
    except fx.errors.DataError as error:
        assert kind is _Counts and epoch, error
        assert "of data in another order" in str(error)
        return
    assert seen + rest == whole


@settings(max_examples=15)
@given(
    st.sampled_from(KINDS),
    st.integers(2, 20),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 2),
    st.booleans(),
)
def test_a_stream_that_is_sharded_already_continues_or_raises(kind, n, size, cut, epoch, by_state):
    plan, ctx = fx.Plan(data=fx.Data(source="sharded")), DistContext()

    def loader():
        return fx.shard(DataLoader(kind(n), batch_size=size), ctx, plan)

    first = loader()
    before = _epochs([first], epoch)
    assert all(sorted(rows) == list(range(n)) for rows in before)
    here = first.at(fx.Position(epoch=epoch))
    found = list(itertools.islice(here, cut))
    position, state = found[-1].position, here.state() if by_state else None
    assume(not position.is_last)
    seen = [row for batch in found for row in batch.data.tolist()]
    assume(kind is not _Counts or not epoch or _rows_of(kind, n, 0)[: len(seen)] != seen)
    try:
        rest = [row for batch in loader().at(position, state) for row in batch.data.tolist()]
    except fx.errors.DataError as error:
        # Nothing seeds what a stream of a rank draws.
        assert kind is _Draws or (kind is _Counts and epoch), error
        return
    assert sorted(seen + rest) == list(range(n))


def _rows_of(kind, n, epoch):
    """The rows of an epoch, as one rank sees them that has read those before."""
    return _epochs(_ranks(kind(n), n, 1, fx.Plan()))[epoch]
