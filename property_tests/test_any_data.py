"""A run cut anywhere, any number of times, is the run left alone, whatever its data come from."""

import itertools
import tempfile

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import fxtrain as fx
from property_tests.conftest import NO_SHRINK

ROWS, EPOCHS = 11, 2


class _Stream(IterableDataset):
    """Rows of an epoch, one after the other; those of one rank if they are sharded already."""

    def __init__(self, first=0, step=1, size=None):
        self.first, self.step, self.size, self.epoch, self.next = first, step, size, 0, first

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _row(self, index):
        row = torch.tensor([100.0 * self.epoch + index])
        return row if self.size is None else row.expand(index % 3 + 1, 1).clone()

    def __iter__(self):
        for index in range(self.first, ROWS, self.step):
            yield self._row(index)


class _Stateful(_Stream):
    """The same with the state protocol of the dataset."""

    def __iter__(self):
        while self.next < ROWS:
            self.next += self.step
            yield self._row(self.next - self.step)
        self.next = self.first

    def state_dict(self):
        return {"next": self.next, "as a tensor": torch.tensor(self.next)}

    def load_state_dict(self, state):
        assert state["next"] == int(state["as a tensor"])
        self.next = state["next"]


class _OfIterator(_Stream):
    """The same with the state protocol of the iterator."""

    def __iter__(self):
        return _Rows(self)


class _Rows:
    def __init__(self, stream):
        self.stream, self.next = stream, stream.first

    def __iter__(self):
        return self

    def __next__(self):
        if self.next >= ROWS:
            raise StopIteration
        self.next += self.stream.step
        return self.stream._row(self.next - self.stream.step)

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


STREAMS = {"stream": _Stream, "stateful": _Stateful, "iterator": _OfIterator}


def _function(position):
    return (position.index + torch.arange(2.0))[:, None]


def _loader(ctx, plan, kind):
    if kind == "function":
        return fx.shard(_function, ctx, plan, batch_size=2)
    if kind == "table":
        return fx.shard(torch.arange(float(ROWS))[:, None], ctx, plan, batch_size=2)
    name, _, ready = kind.partition(", ")
    own = (ctx.rank, ctx.world_size) if plan.data.source == "sharded" else (0, 1)
    stream = STREAMS[name](*own, size=3 if ready else None)
    return fx.shard(DataLoader(stream, batch_size=None if ready else 2), ctx, plan)


def _generated(ctx, plan, model, position, steps):
    """Batches of what the model itself computes, with other sizes on each rank."""
    for _ in range(steps):
        number = position.samples
        rows = torch.full(((number + ctx.rank) % 3 + (ctx.rank == 0), 1), float(number % 7))
        with torch.no_grad():
            rows = rows + model(rows)
        batch = fx.batch(rows, ctx, plan, after=position, last=number % 4 == 0)
        position = batch.position
        yield batch


def _segment(ctx, folder, plan, kind, steps, resumes):
    """Train on so many batches, or to the end; the real rows and the position of each."""
    net = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(net.weight, 0.5)
    torch.nn.init.zeros_(net.bias)
    model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3))
    fns = fx.StepFns(model, lambda model, batch: model(batch.data).square().mean())
    position, state, seen = fx.Position(), None, []
    if resumes:
        restored = fx.restore(folder, ctx, model, extra={"data": None})
        position, state = restored.position, restored.extra["data"]
    loader = None
    if kind == "generated":
        batches = _generated(ctx, plan, model, position, steps)
    else:
        loader = _loader(ctx, plan, kind).at(position, state)
        # What a function makes has no end.
        batches = (
            loader.updates(100)
            if kind == "function"
            else itertools.chain.from_iterable(loader.epochs(EPOCHS))
        )
    for batch in itertools.islice(batches, steps):
        fx.step(ctx, batch, fns)
        real = batch.data[: batch.rows[ctx.rank], 0].tolist()
        seen.append((real, batch.position))
        position = batch.position
    kept = {"data": None if loader is None else loader.state()}
    fx.save(folder, ctx, model, position=position, extra=kept)
    return seen, [p.detach().clone() for p in fx.unwrap(model).parameters()]


def _run(clusters, plan, kind, segments):
    """All segments, each on its ranks: rows in order, positions, and the last parameters."""
    with tempfile.TemporaryDirectory() as folder:
        rows, positions, values = [], [], None
        for number, (ranks, steps) in enumerate(segments):
            results = clusters[ranks].run(_segment, folder, plan, kind, steps, number > 0)
            values = results[0][1]
            for steps_of_ranks in zip(*(seen for seen, _ in results), strict=True):
                rows.append([row for real, _ in steps_of_ranks for row in real])
                positions.append(steps_of_ranks[0][1])
        return rows, positions, values


def _expected(kind):
    """Every row of the run, in order; None where the run left alone says so."""
    if kind == "function":
        return [float(index) for index in range(200)]
    if kind == "generated":
        return None
    ready = kind.endswith("ready")
    return [
        (0.0 if kind == "table" else 100.0 * epoch) + index
        for epoch in range(EPOCHS)
        for index in range(ROWS)
        for _ in range(index % 3 + 1 if ready else 1)
    ]


KINDS = (*STREAMS, "stream, ready", "stateful, ready", "function", "table", "generated")
CUTS = st.lists(st.tuples(st.sampled_from((1, 2)), st.integers(1, 5)), max_size=3)


@settings(max_examples=5, phases=NO_SHRINK)
@example("stateful", "sharded", 1, [(2, 2), (2, 1)])
@example("stateful, ready", "shard", 2, [(2, 1), (1, 3)])
@example("iterator", "dispatch", 1, [(1, 3), (2, 2)])
@example("generated", "shard", 2, [(2, 3), (2, 2)])
@example("function", "shard", 2, [(1, 3), (2, 2)])
@given(
    st.sampled_from(KINDS),
    st.sampled_from(("shard", "dispatch", "sharded")),
    st.integers(1, 2),
    CUTS,
)
def test_rows_come_once_whatever_the_cuts(clusters, kind, source, accumulate, cuts):
    moves = kind != "generated"
    if (source == "sharded" and kind in STREAMS) or kind == "stateful, ready":
        moves = moves and source != "sharded"
    elif source == "sharded":
        source = "shard"
    cuts = [(ranks if moves else 2, steps) for ranks, steps in cuts]
    plan = fx.Plan(accumulate=accumulate, even="uneven", data=fx.Data(source=source))
    rest = 6 if kind in ("function", "generated") else 99
    rows, positions, values = _run(clusters, plan, kind, [*cuts, (2, rest)])
    flat = [row for batch in rows for row in batch]
    expected = _expected(kind)
    if expected is not None:
        if source == "sharded":
            flat, expected = sorted(flat), sorted(expected)
        assert flat == expected[: len(flat)]
        assert rest == 6 or len(flat) == len(expected)
    counts = list(itertools.accumulate(map(len, rows)))
    assert [position.samples for position in positions] == counts
    if all(ranks == 2 for ranks, _ in cuts):
        steps = sum(count for _, count in cuts) + rest
        alone = _run(clusters, plan, kind, [(2, steps)])
        assert (rows, positions) == alone[:2]
        torch.testing.assert_close(values, alone[2], rtol=0, atol=0)
