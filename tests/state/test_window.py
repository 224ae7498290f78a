"""The record of an accumulation window."""

import attrs
import pytest
import torch

from fxtrain.state import AccumulationWindow, window_in

SUMS = ("scale", "weight", "bad_losses", "bad_grads")
COUNTS = ("micro", "rows", "full_rows", "real_rows", "unscaled")


@pytest.fixture
def window():
    return window_in(torch.zeros(4, dtype=torch.float64), torch.zeros(5, dtype=torch.int64))


def test_every_field_is_one_number_of_what_a_checkpoint_holds(window):
    # Their places are those of the checkpoints that exist: 'tally' and 'counts' on each rank.
    assert [field.name for field in attrs.fields(AccumulationWindow)] == [
        "sums",
        "counts",
        *SUMS,
        *COUNTS,
    ]
    for number, name in enumerate((*SUMS, *COUNTS), start=1):
        getattr(window, name).fill_(number)
    assert window.sums.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert window.counts.tolist() == [5, 6, 7, 8, 9]


def test_one_call_zeroes_many_numbers(window):
    window.weight.add_(3)
    window.rows.add_(3)
    window.sums.zero_()
    window.counts.zero_()
    assert not any(getattr(window, name) for name in (*SUMS, *COUNTS))


def test_the_record_itself_is_frozen(window):
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        window.rows = torch.ones(())
