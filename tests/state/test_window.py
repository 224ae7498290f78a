"""The record of what a model counts."""

import torch

import fxtrain as fx
from fxtrain.state import AccumulationWindow, Batch, MicroBatch

SUMS = ("scale", "weight", "bad_losses", "bad_grads")


def test_every_sum_is_a_number_of_one_tensor():
    # A checkpoint has them in this order, as "tally" of each rank.
    window = AccumulationWindow(sums=torch.zeros(4, dtype=torch.float64))
    for number, name in enumerate(SUMS, start=1):
        getattr(window, name).fill_(number)
    assert window.sums.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_the_end_of_a_window_counts_an_update_and_leaves_nothing_of_it():
    valid = torch.ones(4, dtype=torch.bool)
    batch = Batch(data=None, position=fx.Position(), valid=valid, rows=(4,), sizes=(4,))
    window = AccumulationWindow(
        sums=torch.zeros(4),
        micro=2,
        rows=8,
        full_rows=8,
        real_rows=7,
        pending=MicroBatch(batch=batch, closes=True, reduces=True),
        added=True,
        unreduced=True,
        provisional=True,
    )
    assert window.closes and window.is_open
    window.end()
    assert (window.updates, window.micro, window.rows) == (1, 0, 0)
    assert (window.full_rows, window.real_rows) == (0, 0)
    assert not (window.closes or window.is_open or window.unreduced or window.provisional)
