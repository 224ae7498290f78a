"""Simulated runs: every second is counted once, whatever fails."""

import sys
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxtrain.profiling import Failures, failures, simulate_run

# Simulating the 100,000 failures after which a run is given up takes seconds.
MOST = 300

SETUPS = st.builds(
    Failures,
    ranks=st.integers(1, 10**5),
    rank_mtbf_s=st.floats(1e3, 1e10),
    checkpoint_s=st.floats(0.1, 1e4),
    restart_s=st.floats(0, 1e4),
    repair_s=st.floats(0, 1e6),
    spares=st.integers(0, 50),
)


@mock.patch.object(failures, "_MOST_FAILURES", MOST)
@settings(max_examples=20)
@given(setup=SETUPS, interval=st.floats(1, 1e5), work=st.floats(1, 1e6), seed=st.integers(0, 99))
def test_time_is_conserved(setup, interval, work, seed):
    run = simulate_run(setup, interval_s=interval, work_s=work, seed=seed)
    assert run == simulate_run(setup, interval_s=interval, work_s=work, seed=seed)
    parts = (run.useful_s, run.checkpoint_s, run.lost_s, run.restart_s, run.waiting_s)
    assert min(parts) >= 0
    if not run.finished:
        assert run.failures == MOST
        return
    assert run.useful_s == pytest.approx(work)
    saves = run.checkpoint_s / setup.checkpoint_s
    assert saves == pytest.approx(round(saves))  # only whole ones are kept
    assert 0 < run.goodput <= 1
    if run.failures == 0:
        assert run.total_s == pytest.approx(work + run.checkpoint_s)
        assert run.lost_s == run.restart_s == run.waiting_s == 0
    else:
        # Differences of two times of a clock, which rounds at most four times in each.
        rounding = 4 * sys.float_info.epsilon * run.total_s
        assert run.waiting_s <= run.failures * (setup.repair_s * (1 + 1e-9) + rounding)
        assert run.restart_s <= run.failures * (setup.restart_s * (1 + 1e-9) + rounding)
        longest = min(interval, work) + setup.checkpoint_s
        assert run.lost_s <= run.failures * (longest * (1 + 1e-9) + rounding)
