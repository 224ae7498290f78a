"""Simulated failures: time is conserved, and the formulas of Young and Daly hold."""

import math
import random
import statistics

import attrs
import pytest

from fxtrain.profiling import Failures, goodput, simulate_run
from tests._errors import raises_code

# Mean time between failures of the run, checkpoint and restart, in seconds.
SETUPS = [(10_000, 10, 100), (10_000, 300, 60), (3_000, 60, 600), (100_000, 30, 0)]


def _setup(mtbf, save, restart, **more):
    return Failures(
        ranks=1000, rank_mtbf_s=1000 * mtbf, checkpoint_s=save, restart_s=restart, **more
    )


def _mean(setup, interval, runs=40):
    work = 200 * setup.mtbf_s
    found = [simulate_run(setup, interval_s=interval, work_s=work, seed=n) for n in range(runs)]
    return statistics.mean(run.goodput for run in found)


@pytest.mark.parametrize("numbers", SETUPS)
@pytest.mark.parametrize("factor", [0.5, 1, 3])
def test_runs_have_the_goodput_that_daly_expects(numbers, factor):
    setup = _setup(*numbers)
    interval = factor * setup.daly_interval_s
    assert _mean(setup, interval) == pytest.approx(setup.daly_goodput(interval), abs=0.006)


@pytest.mark.parametrize("numbers", SETUPS)
def test_no_interval_is_better_than_dalys(numbers):
    setup = _setup(*numbers)
    best = setup.daly_interval_s
    at_best = setup.daly_goodput(best)
    others = [setup.daly_goodput(best * factor) for factor in (0.5, 0.8, 0.95, 1.05, 1.25, 2)]
    assert max(others) < at_best
    simulated = {factor: _mean(setup, best * factor) for factor in (0.33, 1, 3)}
    assert max(simulated, key=simulated.get) == 1


def test_youngs_interval_is_dalys_to_first_order():
    for save in (0.01, 0.1, 1.0):
        setup = _setup(100_000, save, 0)
        assert setup.daly_interval_s == pytest.approx(setup.young_interval_s, rel=0.01)
    assert _setup(100, 300, 0).daly_interval_s == 100  # a checkpoint takes longer than that


def test_spares_save_waiting_and_never_cost_goodput():
    setup = _setup(10_000, 60, 120, repair_s=86_400)
    found = goodput(setup, work_s=3e6, spares=(0, 4, 16, 64), runs=4)
    best = [max(row) for row in found.rows]
    assert best == sorted(best)
    assert best[0] < 0.2  # one repair after the other
    assert best[-1] == pytest.approx(
        max(setup.daly_goodput(one) for one in found.intervals_s), abs=0.02
    )
    none = simulate_run(attrs.evolve(setup, spares=64), interval_s=1000, work_s=3e6)
    assert none.waiting_s == 0


def _piece_by_piece(setup, interval, work, seed):
    """Useful, checkpoints, lost and restarts of a run without repairs, in seconds; and failures."""
    chance = random.Random(seed)
    now = useful = saved = lost = restarts = 0.0
    fails_at, failures = chance.expovariate(1 / setup.mtbf_s), 0
    while useful < work:
        piece = min(interval, work - useful)
        save = setup.checkpoint_s if useful + piece < work else 0.0
        if fails_at >= now + piece + save:
            now, useful, saved = now + piece + save, useful + piece, saved + save
            continue
        lost, ready = lost + fails_at - now, False
        while not ready:
            now, failures = fails_at, failures + 1
            fails_at = now + chance.expovariate(1 / setup.mtbf_s)
            ready = fails_at >= now + setup.restart_s
            restarts += setup.restart_s if ready else fails_at - now
        now += setup.restart_s
    return useful, saved, lost, restarts, failures


@pytest.mark.parametrize("numbers", SETUPS)
@pytest.mark.parametrize("factor", [0.1, 0.7, 1, 3, math.inf])
def test_a_run_from_failure_to_failure_is_that_piece_by_piece(numbers, factor):
    setup = _setup(*numbers)
    for seed, work in enumerate((1.0, 0.7 * setup.mtbf_s, 3 * setup.mtbf_s)):
        how = {"interval_s": factor * setup.daly_interval_s, "work_s": work, "seed": seed}
        run = simulate_run(setup, **how)
        parts = (run.useful_s, run.checkpoint_s, run.lost_s, run.restart_s, run.failures)
        assert parts == pytest.approx(_piece_by_piece(setup, *how.values()))


def test_a_run_takes_no_longer_to_simulate_for_its_checkpoints():
    """With a million million of them, as of a small model that is saved in a microsecond."""
    setup = _setup(1e6, 1e-6, 10)
    run = simulate_run(setup, interval_s=1e-3, work_s=1e9)
    assert run.finished and run.checkpoint_s == pytest.approx(1e6, rel=1e-3)


def test_a_run_that_cannot_end_is_given_up():
    run = simulate_run(_setup(10, 100, 100), interval_s=100, work_s=1e4)
    assert not run.finished
    assert run.goodput == 0
    assert _setup(10, 100, 100).daly_goodput(1e9) == 0


@pytest.mark.parametrize(
    "wrong", [{"ranks": 0}, {"rank_mtbf_s": 0}, {"checkpoint_s": -1}, {"spares": -1}]
)
def test_wrong_setups_are_refused(wrong):
    with raises_code("FX200", next(iter(wrong))):
        Failures(**{"ranks": 1, "rank_mtbf_s": 1.0, "checkpoint_s": 1.0} | wrong)


def test_wrong_intervals_are_refused():
    with raises_code("FX200", "interval_s"):
        simulate_run(_setup(1, 1, 1), interval_s=0, work_s=1)


def test_the_table_shows_times_in_units_that_fit():
    setup = Failures(ranks=10, rank_mtbf_s=1.2e8, checkpoint_s=0.25, restart_s=60)
    table = goodput(setup, work_s=1e6, runs=1).__rich__()
    assert str(table.title).startswith("Goodput of 10 ranks: a failure every 139 days, a check")
    assert "40.8 min by Young's formula" in str(table.caption)
