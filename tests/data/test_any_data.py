"""Data that come without a DataLoader: iterables, functions of a position, streams with a state."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fxtrain as fx
from fxtrain.errors import DataError
from fxtrain.state import DistContext
from tests._errors import raises_code
from tests._slow import slow_after


def _world(n):
    return [DistContext(rank=rank, world_size=n) for rank in range(n)]


def _read(make, n, plan=fx.Plan(), position=None, state=None, batches=99, **kw):  # noqa: B008
    """(rows, samples, sizes) of each batch of each rank."""
    found = []
    for ctx in _world(n):
        loader = fx.shard(make(), ctx, plan, **kw).at(position or fx.Position(), state)
        found.append([])
        for batch, _ in zip(loader, range(batches), strict=False):
            found[-1].append((batch.data.tolist(), batch.position.samples, batch.sizes))
    return found


def _rows(found):
    return [[rows for rows, *_ in rank] for rank in found]


@pytest.mark.parametrize(
    "make",
    [lambda: range(5), lambda: iter(range(5)), lambda: torch.arange(5), lambda: {0, 1, 2, 3, 4}],
)
def test_an_iterable_of_rows_is_collated(make):
    assert _rows(_read(make, 1, batch_size=2)) == [[[0, 1], [2, 3], [4]]]
    a_table = isinstance(make(), range | torch.Tensor)  # padded from the start of the epoch
    assert _rows(_read(make, 2, batch_size=2))[1] == [[2, 3], [1, 2] if a_table else [4, 4]]


def _ready():
    """Batches of three, one and two rows."""
    return [torch.arange(3), torch.arange(3, 4), torch.arange(4, 6)]


@pytest.mark.parametrize("make", [_ready, lambda: iter(_ready())])
def test_ready_batches_count_their_rows(make):
    for given in (make, lambda: DataLoader(_Listed(_ready()), batch_size=None)):
        first, second = _read(given, 2)
        assert first == [([0, 1, 2], 4, (3, 1)), ([4, 5], 6, (2, 2))]
        assert _read(given, 1)[0] == [
            ([0, 1, 2], 3, (3,)), ([3], 4, (1,)), ([4, 5], 6, (2,))
        ]  # fmt: skip
        assert second[0] == ([3], 4, (3, 1))
    first, second = _read(_ready, 2, fx.Plan(even="uneven"))
    assert [sizes for *_, sizes in second] == [(3, 1), (2, 0)]
    data = fx.Data(source="sharded")
    assert _read(_ready, 1, fx.Plan(data=data))[0][-1] == ([4, 5], 6, (2,))


class _Listed(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_a_generator_has_one_pass():
    with fx.detect({}, device="cpu") as ctx:
        loader = fx.shard((row for row in range(4)), ctx, batch_size=2)
        assert [batch.data.tolist() for batch in loader] == [[0, 1], [2, 3]]
        with raises_code("FX400", "second pass"):
            list(loader)


def test_a_dataset_needs_no_loader():
    with fx.detect({}, device="cpu") as ctx:
        loader = fx.shard(TensorDataset(torch.arange(4)), ctx, batch_size=3)
        assert [batch[0].tolist() for batch in loader] == [[0, 1, 2], [3]]
        assert len(loader) == 2 and isinstance(loader.dataset, TensorDataset)
        assert fx.shard(range(3), ctx, batch_size=2).dataset == range(3)


def _squares(position):
    assert not position.is_last
    return (position.index + torch.arange(2)) ** 2


def test_a_function_makes_rows_for_a_position():
    alone = _rows(_read(lambda: _squares, 1, batches=4, batch_size=2))[0]
    assert alone == [[0, 1], [4, 9], [16, 25], [36, 49]]
    first, second = _read(lambda: _squares, 2, batches=2, batch_size=2)
    assert first == [([0, 1], 4, (2, 2)), ([16, 25], 8, (2, 2))]
    assert [rows for rows, *_ in second] == [[4, 9], [36, 49]]
    position = fx.Position(index=4, samples=4, updates=1)
    assert _rows(_read(lambda: _squares, 1, position=position, batches=1, batch_size=2)) == [
        [[16, 25]]
    ]
    after = fx.shard(_squares, fx.DistContext(), batch_size=2).skip(1).skip(1)
    assert next(iter(after)).data.tolist() == [16, 25] and after.position.samples == 4


def test_a_function_of_a_global_batch_is_called_for_all_of_it():
    plan, asked = fx.Plan(batch="global"), []

    def make(position):
        asked.append(position.samples)
        return {"x": position.index + torch.arange(4), "y": torch.zeros(3)}

    for ctx in _world(2):
        loader = iter(fx.shard(make, ctx, plan, batch_size=4))
        assert next(loader)["x"].tolist() == [2 * ctx.rank, 2 * ctx.rank + 1]
        assert next(loader)["y"].shape == (3,)
    assert asked == [0, 4] * 2


def test_a_function_is_called_when_its_batch_is_due():
    asked = []

    def make(position):
        asked.append(position.updates)
        return torch.zeros(1)

    with fx.detect({}, device="cpu") as ctx:
        for batch in fx.shard(make, ctx, batch_size=1).updates(3):
            assert asked[-1] == batch.position.updates - 1


@pytest.mark.parametrize(
    ("given", "plan", "words", "batch_size"),
    [
        (_squares, fx.Plan(), "needs the number of rows that it returns", None),
        (_squares, fx.Plan(data=fx.Data(source="sharded")), r"fx\.batch\(data", 2),
        (_squares, fx.Plan(), "returned 2 rows for index 0, and the loader has batch_size=3", 3),
        (lambda position: None, fx.Plan(), "returned NoneType without rows", 3),
        (range(3), fx.Plan(), "pass a number of rows, 1 or more", 0),
        ("text", fx.Plan(), "takes a torch DataLoader, an iterable or a function", 2),
        (DataLoader(range(3)), fx.Plan(), r"Use DataLoader\(dataset, batch_size=2\)", 2),
    ],
)
def test_other_data_are_refused(given, plan, words, batch_size):
    with fx.detect({}, device="cpu") as ctx, pytest.raises(DataError, match=words):
        next(iter(fx.shard(given, ctx, plan, batch_size=batch_size)))


class Counted(IterableDataset):
    """Rows with the state protocol, of the dataset or of its iterator; counts what it reads."""

    def __init__(self, n, *, of="dataset"):
        self.n, self.next, self.epoch, self.reads = n, 0, 0, 0
        if of == "dataset":
            self.state_dict = self._state
            self.load_state_dict = self._load
        self.of = of

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _state(self):
        return {"next": self.next}

    def _load(self, state):
        self.next = state["next"]

    def __iter__(self):
        return _Iterator(self) if self.of == "iterator" else self._rows()

    def _rows(self):
        while self.next < self.n:
            self.reads += 1
            self.next += 1
            yield 100 * self.epoch + self.next - 1
        self.next = 0


class _Iterator:
    def __init__(self, dataset):
        self.dataset, self.next = dataset, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.dataset.n:
            raise StopIteration
        self.next += 1
        self.dataset.reads += 1
        return 100 * self.dataset.epoch + self.next - 1

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


@pytest.mark.parametrize("of", slow_after(1, ["dataset", "iterator"]))
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_with_a_state_continues_at_once(of, workers):
    with fx.detect({}, device="cpu") as ctx:
        whole = fx.shard(DataLoader(Counted(11, of=of), batch_size=2, num_workers=workers), ctx)
        batches = iter(whole)
        cut = next(batch for batch in batches if batch.position.index == 6).position
        state = whole.state()
        assert (state["epoch"], state["index"]) == (0, 6)
        rest = [batch.data.tolist() for batch in batches]
        dataset = Counted(11, of=of)
        loader = fx.shard(DataLoader(dataset, batch_size=2, num_workers=workers), ctx)
        resumed = loader.at(cut, state)
        assert resumed.state() == state
        assert [batch.data.tolist() for batch in resumed] == rest == [[6, 7], [8, 9], [10]]
        if not workers:
            assert dataset.reads == 5
        assert [b.data.tolist() for b in resumed.epochs(2).__next__()] == rest
        with raises_code("FX401"):
            loader.at(fx.Position(index=4, samples=4), state)
        later = [[b.data.tolist() for b in epoch] for epoch in loader.at(cut, state).epochs(2)]
        assert later[1][0] == [100, 101]


class _Keeping(Counted):
    """Begins every pass at the state that was loaded last, as streams of `datasets` do."""

    start = 0

    def _load(self, state):
        self.start = state["next"]

    def __iter__(self):
        self.next = self.start
        while self.next < self.n:
            self.next += 1
            yield self.next - 1


@pytest.mark.parametrize("make", [Counted, _Keeping])
def test_every_loader_of_a_stream_begins_where_the_first_one_did(make):
    stream, plan = make(5), fx.Plan(even="uneven")
    for _ in range(4):  # as `fx.evaluate` does, with placeholders on rank 1 at the end
        loader = fx.shard(DataLoader(stream, batch_size=1), _world(2)[1], plan)
        assert [batch.data[batch.valid].tolist() for batch in loader] == [[1], [3], []]


def _cut_and_whole(ctx, even, cut):
    """The batches after a cut: those of a resumed run, and those of the uninterrupted run."""
    plan = fx.Plan(even=even, data=fx.Data(source="sharded"))

    def make():
        return fx.shard(DataLoader(Counted(3 + 4 * ctx.rank), batch_size=2), ctx, plan)

    loader, whole, cursors = make(), [], []
    for batch in loader:
        whole.append((batch.data.tolist(), batch.position, batch.rows))
        cursors.append((batch.position, loader.state()))
    resumed = [(b.data.tolist(), b.position, b.rows) for b in make().at(*cursors[cut - 1])]
    return resumed, whole[cut:]


@pytest.mark.parametrize("even", ["pad", "uneven"])
def test_a_rank_whose_stream_had_ended_does_not_begin_it_again(pair, even):
    # The stream of rank 0 ends with its second batch, and has the state of its start then.
    for resumed, whole in pair.run(_cut_and_whole, even, 2):
        assert resumed == whole and len(whole) == 2
