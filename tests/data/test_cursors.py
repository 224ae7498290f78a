"""Cursors: where batches and epochs begin and end, and how runs resume."""

import pytest
import torch

import fxtrain as fx
from tests.data._loaders import loaders


def positions(loader):
    return [batch.position for batch in loader]


def test_positions_count_real_rows_of_all_ranks():
    for loader in loaders(torch.arange(7), 2, batch_size=3):
        (one, two) = [b.position for epoch in loader.epochs(2) for b in epoch][2:]
        assert one == fx.Position(epoch=1, index=6, samples=13, updates=3)
        assert two == fx.Position(epoch=1, index=7, samples=14, updates=4, is_last=True)


@pytest.mark.parametrize(
    ("flush", "micros", "updates"),
    [
        (True, [1, 0, 0, 1, 0, 0], [0, 1, 2, 2, 3, 4]),
        (False, [1, 0, 1, 0, 1, 0], [0, 1, 1, 2, 2, 3]),
    ],
)
def test_windows_close_every_few_batches_and_at_the_end(flush, micros, updates):
    plan = fx.Plan(accumulate=2, flush=flush)
    (loader,) = loaders(torch.arange(5), 1, plan, batch_size=2)
    batches = [batch for epoch in loader.epochs(2) for batch in epoch]
    assert [batch.position.micro for batch in batches] == micros
    assert [batch.position.updates for batch in batches] == updates


@pytest.mark.parametrize("shuffle", [False, True])
def test_another_world_goes_on_with_the_next_row(shuffle):
    kw = {"batch_size": 2, "shuffle": shuffle}
    (alone,) = loaders(torch.arange(11), 1, batch_size=11, shuffle=shuffle)
    order = next(iter(alone)).data.tolist()
    cut = positions(loaders(torch.arange(11), 2, **kw)[0])[0]
    left = [list(loader.at(cut)) for loader in loaders(torch.arange(11), 3, **kw)]
    real = [
        row for step in zip(*left, strict=True) for b in step for row in b.data[b.valid].tolist()
    ]
    assert real == order[4:]
    assert left[2][-1].data.tolist() == order[3:5]  # padding counts from the epoch's start


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


def test_epochs_made_before_any_ran_stand_where_they_would():
    for plan in (fx.Plan(), fx.Plan(accumulate=2, flush=False), fx.Plan(accumulate=3)):
        (loader,) = loaders(torch.arange(7), 1, plan, batch_size=2)
        ahead = list(loader.epochs(3))
        for late, one in zip(ahead, loader.epochs(3), strict=True):
            assert late.position == one.position
            assert positions(late) == positions(one)


def test_after_a_break_the_next_epoch_counts_what_was_seen():
    (loader,) = loaders(torch.arange(10), 1, fx.Plan(accumulate=2), batch_size=2)
    seen = []
    for epoch in loader.epochs(2):
        for number, batch in enumerate(epoch):
            seen.append(batch)
            if number == 2:
                break
    assert [b.position.samples for b in seen] == [2, 4, 6, 8, 10, 12]
    # The window that was left open takes the first batch of the next epoch in.
    assert [b.position.updates for b in seen] == [0, 1, 1, 2, 2, 3]


def test_an_epoch_that_is_skipped_counts_nothing():
    (loader,) = loaders(torch.arange(8), 1, batch_size=2)
    for number, epoch in enumerate(loader.epochs(4)):
        if number in (0, 2):
            continue
        *_, last = epoch
        assert last.position == fx.Position(
            epoch=number,
            index=8,
            samples=8 if number == 1 else 16,
            updates=4 if number == 1 else 8,
            is_last=True,
        )


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
