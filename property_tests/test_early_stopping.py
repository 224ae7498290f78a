"""Early stopping is a function of the metrics seen so far."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fxtrain as fx

METRICS = st.lists(st.one_of(st.integers(-5, 5).map(float), st.sampled_from([math.nan, math.inf])))


@given(metrics=METRICS, patience=st.integers(1, 4), best=st.sampled_from(["min", "max"]))
def test_it_is_due_when_the_last_ones_bring_nothing(metrics, patience, best):
    stopping = fx.EarlyStopping(patience=patience, best=best)
    choose = min if best == "min" else max
    for count, metric in enumerate(metrics, 1):
        stopping = stopping.update(torch.tensor(metric) if count % 2 else metric)
        seen = metrics[:count]
        finite = [one for one in seen if math.isfinite(one)]
        value = choose(finite) if finite else None
        first = seen.index(value) + 1 if finite else 0
        assert stopping.value == value
        assert stopping.improved == (first == count)
        assert stopping.due == (count - first >= patience)


@given(metrics=METRICS, at=st.integers(0, 10))
def test_a_checkpoint_keeps_it(metrics, at):
    whole = stopped = fx.EarlyStopping(min_delta=0.5)
    for count, metric in enumerate(metrics):
        if count == at:
            stopped = fx.state.loads(fx.state.dumps(stopped), fx.EarlyStopping)
        whole, stopped = whole.update(metric), stopped.update(metric)
    assert whole == stopped


def test_a_gain_below_the_least_is_none():
    stopping = fx.EarlyStopping(patience=1, min_delta=0.1).update(1.0).update(0.95)
    assert stopping.due and stopping.value == 1.0


@pytest.mark.parametrize("metric", [None, "x", torch.ones(2)])
def test_what_is_no_number_is_an_error(metric):
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        fx.EarlyStopping().update(metric)
