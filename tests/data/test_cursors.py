"""Cursors: where batches and epochs begin and end, and how runs resume."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from tests.data._loaders import loaders, world


def positions(loader):
    return [batch.position for batch in loader]


def test_epochs_go_on_up_to_epoch_n_of_the_run():
    (loader,) = loaders(torch.arange(4), 1, batch_size=2)
    cut = next(iter(loader)).position
    assert [len(epoch) for epoch in loader.at(cut).epochs(3)] == [1, 2, 2]
    assert [e.position.epoch for e in loader.at(fx.Position(epoch=2)).epochs(3)] == [2]
    assert list(loader.at(fx.Position(epoch=3)).epochs(3)) == []


@pytest.mark.parametrize("end", [fx.Position(index=4, is_last=True), fx.Position(index=4)])
def test_from_the_end_of_an_epoch_the_next_one_follows(end):
    (loader,) = loaders(torch.arange(4), 1, batch_size=2)
    assert list(loader.at(end)) == [] and len(loader.at(end)) == 0
    assert [epoch.position.epoch for epoch in loader.at(end).epochs(3)] == [1, 2]


def test_skipping_many_epochs_is_cheap():
    (loader,) = loaders(torch.arange(2), 1)
    *_, last = loader.epochs(20_000)
    assert last.position == fx.Position(epoch=19_999)
    assert len(list(last)) == 2


def test_an_open_window_and_rows_seen_survive_a_skipped_epoch():
    (loader,) = loaders(torch.arange(10), 1, fx.Plan(accumulate=2), batch_size=2)
    start = fx.Position(epoch=1, index=6, samples=16, updates=8, micro=1)
    rest = list(loader.at(start).epochs(4))
    assert [epoch.position.epoch for epoch in rest] == [1, 2, 3]
    first = next(iter(rest[2])).position
    assert first == fx.Position(epoch=3, index=2, samples=18, updates=9)


def test_the_same_loader_gives_the_same_epoch_again():
    (loader,) = loaders(torch.arange(4), 1, batch_size=2)
    assert [b.position for b in loader] == [b.position for b in loader]


class _Rows(torch.utils.data.IterableDataset):
    def __init__(self, state):
        self.at, self.keeps = 0, state

    def __iter__(self):
        first, self.at = self.at if self.keeps else 0, 0
        for row in range(first, 13):
            self.at = row + 1
            yield row

    def __getattr__(self, name):
        if name == "state_dict" and self.keeps:
            return lambda: {"at": self.at}
        if name == "load_state_dict" and self.keeps:
            return lambda state: setattr(self, "at", state["at"])
        raise AttributeError(name)


def _function(position):
    return position.index + torch.arange(2)


SKIPPED = {
    "rows": lambda: DataLoader(torch.arange(13), batch_size=2, shuffle=True),
    "no last batch": lambda: DataLoader(torch.arange(13), batch_size=2, drop_last=True),
    "batch sampler": lambda: DataLoader(torch.arange(13), batch_sampler=[[0, 1, 2], [3], [4, 5]]),
    "ready": lambda: [torch.arange(3), torch.arange(3, 4), torch.arange(4, 6)],
    "stream": lambda: DataLoader(_Rows(state=False), batch_size=2),
    "stream with a state": lambda: DataLoader(_Rows(state=True), batch_size=2),
    "function": lambda: _function,
}


@pytest.mark.parametrize("settings", [{}, {"even": "uneven"}, {"batch": "global"}], ids=str)
@pytest.mark.parametrize("kind", SKIPPED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loader_without_its_next_batches_yields_what_follows_them(kind, ranks, settings):
    if settings.get("batch") and ranks > 1 and kind in ("batch sampler", "ready"):
        pytest.skip("its batches do not divide by the ranks")
    plan, more = fx.Plan(accumulate=2, **settings), {"batch_size": 2} if kind == "function" else {}

    def read(loader):
        return [
            (batch.position, batch.data.tolist(), batch.rows)
            for batch in itertools.islice(loader, 9)
        ]

    for ctx in world(ranks):
        every = read(fx.shard(SKIPPED[kind](), ctx, plan, **more))
        for first in (0, 1):
            for n in range(len(every) + 2 - first):
                loader = fx.shard(SKIPPED[kind](), ctx, plan, **more).skip(first).skip(n)
                rest = read(loader)[: max(0, len(every) - first - n)]
                assert rest == every[first + n :]
                if kind != "function" and n + first >= len(every):
                    assert read(loader) == [] and loader.position.is_last


def test_a_number_of_batches_to_skip_is_checked():
    (loader,) = loaders(torch.arange(4), 1)
    for n in (-1, 1.0, True, fx.Position()):
        with pytest.raises(fx.errors.DataError, match=r"skip\(.*\): pass a number of batches"):
            loader.skip(n)


def test_a_position_knows_the_update_of_its_batch():
    for flush in (True, False):
        plan = fx.Plan(accumulate=2, flush=flush)
        (loader,) = loaders(torch.arange(5), 1, plan)
        found = [batch.position.update for epoch in loader.epochs(2) for batch in epoch]
        assert found == ([0, 0, 1, 1, 2, 3, 3, 4, 4, 5] if flush else [n // 2 for n in range(10)])
    assert fx.Position().update == 0
