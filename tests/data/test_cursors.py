"""Cursors: where batches and epochs begin and end, and how runs resume."""

import pytest
import torch

import fxtrain as fx
from tests._errors import raises_code
from tests.data._loaders import loaders


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


def test_a_number_of_batches_to_skip_is_checked():
    (loader,) = loaders(torch.arange(4), 1)
    for n in (-1, 1.0, True, fx.Position()):
        with raises_code("FX400", f"skip({n!r})"):
            loader.skip(n)


def test_a_position_knows_the_update_of_its_batch():
    for flush in (True, False):
        plan = fx.Plan(accumulate=2, flush=flush)
        (loader,) = loaders(torch.arange(5), 1, plan)
        found = [batch.position.update for epoch in loader.epochs(2) for batch in epoch]
        assert found == ([0, 0, 1, 1, 2, 3, 3, 4, 4, 5] if flush else [n // 2 for n in range(10)])
    assert fx.Position().update == 0
