"""A run over any data that is read, left, skipped and resumed has each row once. No processes."""

import itertools

import attrs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch.utils.data import DataLoader, IterableDataset, Sampler

import fxtrain as fx
from fxtrain.state import DistContext
from tests.data._streams import Numbers

sizes = st.integers(1, 5)
worlds = st.integers(1, 5)
evens = st.sampled_from(["pad", "drop", "uneven"])


class Own(Sampler):
    """A sampler with a new random order in each epoch."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(torch.randperm(self.n).tolist())


class Told(IterableDataset):
    """A stream whose rows name the epoch that it was told."""

    def __init__(self, n):
        self.n, self.epoch, self.next = n, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return (100 * self.epoch + row for row in range(self.n))


class Stateful(Told):
    """The same with the state protocol of the dataset."""

    def __iter__(self):
        while self.next < self.n:
            self.next += 1
            yield 100 * self.epoch + self.next - 1
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class OfIterator(Told):
    """The same with the state protocol of the iterator."""

    def __iter__(self):
        return _Rows(self)


class _Rows:
    def __init__(self, stream):
        self.stream, self.next = stream, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next >= self.stream.n:
            raise StopIteration
        self.next += 1
        return 100 * self.stream.epoch + self.next - 1

    state_dict, load_state_dict = Stateful.state_dict, Stateful.load_state_dict


def _groups(n):
    """Rows 0 to n - 1 in groups of growing size."""
    rows, lengths = iter(range(n)), itertools.cycle((1, 2, 3, 4))
    return list(iter(lambda: list(itertools.islice(rows, next(lengths))), []))


STREAMS = {"stream": Numbers, "told": Told, "stateful": Stateful, "iterator": OfIterator}
OF_GROUPS = ("batch sampler", "ready")
WITH_LENGTH = ("rows", "shuffled", "batch sampler")
KINDS = ("rows", "shuffled", "sampler", *OF_GROUPS, *STREAMS)


def _data(kind, n, size, workers=0):
    if kind == "ready":
        return [torch.tensor(rows) for rows in _groups(n)]
    if kind in STREAMS:
        return DataLoader(STREAMS[kind](n), batch_size=size, num_workers=workers)
    order = {
        "batch sampler": {"batch_sampler": _groups(n)},
        "sampler": {"batch_size": size, "sampler": Own(n)},
        "shuffled": {"batch_size": size, "shuffle": n > 0},
        "rows": {"batch_size": size},
    }
    return DataLoader(torch.arange(n), num_workers=workers, **order[kind])


class Reading(RuleBasedStateMachine):
    """Reads an epoch further, leaves it, skips batches, and resumes on other ranks.

    The model has the units of each epoch, which are rows or whole batches, and the position of
    the run. All ranks have to be there, with the rows that the position says.
    """

    @initialize(
        kind=st.sampled_from(KINDS),
        n=st.integers(0, 40),
        size=sizes,
        world=worlds,
        even=evens,
        batch=st.sampled_from(["per_rank", "global"]),
        accumulate=st.integers(1, 4),
        flush=st.booleans(),
        seed=st.integers(0, 9),
    )
    def begin(self, kind, n, size, world, batch, **fields):
        self.kind, self.n, self.orders = kind, n, {}
        self.plan = fx.Plan(batch="per_rank" if kind in OF_GROUPS else batch, **fields)
        self.here, self.state = fx.Position(), None
        self.place(size, world)

    def place(self, size, world):
        """Start with new data on so many ranks, as after a restart."""
        self.size, self.world = size, world
        rows = size * world if self.plan.batch == "global" else size
        self.restart(
            [
                fx.shard(
                    _data(self.kind, self.n, rows),
                    DistContext(rank=rank, world_size=world),
                    self.plan,
                ).at(self.here, self.state)
                for rank in range(world)
            ]
        )

    def restart(self, loaders):
        assert {loader.position for loader in loaders} == {self.here}
        self.loaders = loaders
        self.epochs = [loader.epochs(99) for loader in loaders]
        known = self.kind in WITH_LENGTH and self.here.index
        if self.here.is_last or (known and not self.whole_batches()):
            self.here = self.next_start()
        self.open_epoch()

    def open_epoch(self):
        self.loaders = [next(epochs) for epochs in self.epochs]
        assert {loader.position for loader in self.loaders} == {self.here}
        if self.kind in WITH_LENGTH:
            assert {len(loader) for loader in self.loaders} == {self.whole_batches()}
        self.passes = [iter(loader) for loader in self.loaders]

    def next_start(self):
        return attrs.evolve(self.here, epoch=self.here.epoch + 1, index=0, is_last=False)

    def units(self):
        """The units of this epoch in order, each a list of rows."""
        epoch = self.here.epoch
        if self.kind in OF_GROUPS:
            return _groups(self.n)
        if epoch not in self.orders:
            plan = fx.Plan(seed=self.plan.seed)
            alone = fx.shard(_data(self.kind, self.n, 1), DistContext(), plan)
            self.orders[epoch] = [b.data.tolist() for b in alone.at(fx.Position(epoch=epoch))]
            first = 100 * epoch * (self.kind in STREAMS and self.kind != "stream")
            wanted = [[first + row] for row in range(self.n)]
            shuffles = self.kind in ("shuffled", "sampler")
            assert (sorted if shuffles else list)(self.orders[epoch]) == wanted
        return self.orders[epoch]

    @property
    def stride(self):
        return self.world * (1 if self.kind in OF_GROUPS else self.size)

    def whole_batches(self):
        """Global batches that are left of this epoch."""
        whole, rest = divmod(len(self.units()) - self.here.index, self.stride)
        return whole + (rest > 0 and self.plan.even != "drop")

    def advance(self):
        """The rows of each rank in the next global batch, to which the model moves."""
        units = self.units()[self.here.index :][: self.stride]
        each = self.stride // self.world
        parts = [units[rank * each :][:each] for rank in range(self.world)]
        rows = [list(itertools.chain.from_iterable(part)) for part in parts]
        last, micro = self.whole_batches() == 1, self.here.micro + 1
        closes = micro == self.plan.accumulate or (last and self.plan.flush)
        self.here = attrs.evolve(
            self.here,
            index=self.here.index + len(units),
            samples=self.here.samples + sum(map(len, rows)),
            updates=self.here.updates + closes,
            micro=0 if closes else micro,
            is_last=last,
        )
        return rows

    @rule(batches=st.integers(1, 6))
    def read(self, batches):
        found = [list(itertools.islice(each, batches)) for each in self.passes]
        steps = min(batches, self.whole_batches())
        assert {len(each) for each in found} == {steps}
        for batches_of_ranks in zip(*found, strict=True):
            rows = self.advance()
            for mine, batch in zip(rows, batches_of_ranks, strict=True):
                self.check(batch, rows, mine)
        if steps:
            self.state = self.state_of(self.loaders)

    def state_of(self, loaders):
        (state, *_) = [loader.state() for loader in loaders]
        assert state is None or self.kind in ("stateful", "iterator")
        return state

    def check(self, batch, rows, mine):
        assert batch.position == self.here
        assert batch.rows == tuple(map(len, rows))
        # Each rank has data, whose real rows stand at the start.
        assert len(batch.data) == len(batch.valid) > 0
        assert batch.valid.tolist() == [place < len(mine) for place in range(len(batch.valid))]
        assert batch.data[: len(mine)].tolist() == mine
        if self.kind not in OF_GROUPS:
            padded = self.plan.even == "pad" and self.world > 1
            assert batch.sizes == ((self.size,) * self.world if padded else batch.rows)

    @rule()
    def leave_the_epoch(self):
        self.here, self.state = self.next_start(), None
        self.open_epoch()

    @rule(size=sizes, world=worlds, by_state=st.booleans())
    def resume(self, size, world, by_state):
        self.state = self.state if by_state else None
        self.place(size, world)

    @precondition(lambda self: not self.here.is_last)
    @rule(batches=st.integers(0, 6))
    def skip(self, batches):
        self.passes = []
        loaders = [loader.at(self.here, self.state).skip(batches) for loader in self.loaders]
        for _ in range(min(batches, self.whole_batches())):
            self.advance()
        self.state = self.state_of(loaders)
        self.restart(loaders)


TestReading = Reading.TestCase
TestReading.settings = settings(max_examples=50, stateful_step_count=10, deadline=None)


@settings(max_examples=4)
@given(
    kind=st.sampled_from([kind for kind in KINDS if kind != "ready"]),
    n=st.integers(0, 40),
    size=sizes,
    world=st.integers(1, 3),
    even=evens,
    workers=st.integers(1, 2),
    index=st.integers(0, 20),
)
def test_workers_change_nothing(kind, n, size, world, even, workers, index):
    rank = DistContext(rank=world - 1, world_size=world)
    start = fx.Position(index=min(index, len(_groups(n)) if kind in OF_GROUPS else n))
    alone, many = (
        [
            (batch.data.tolist(), batch.valid.tolist(), batch.position, batch.rows, batch.sizes)
            for batch in fx.shard(_data(kind, n, size, count), rank, fx.Plan(even=even)).at(start)
        ]
        for count in (0, workers)
    )
    assert alone == many
