"""Replicas that die and join against one process that never stops."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import fxtrain as fx
from tests.replicas._team import Life, alone, together

UPDATES = 7
QUICK = settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def histories(draw):
    """Two or three replicas, of which all but the first may die, and up to two that join."""
    first = draw(st.integers(2, 3))
    deaths = st.one_of(st.none(), st.integers(1, UPDATES))
    lives = [Life()] + [Life(dies=draw(deaths)) for _ in range(first - 1)]
    for joins in draw(st.lists(st.integers(1, UPDATES - 3), max_size=2, unique=True)):
        dies = draw(st.one_of(st.none(), st.integers(joins + 2, UPDATES)))
        lives.append(Life(joins=joins, dies=dies))
    return lives


def _check(diaries, expected, plan):
    for update in range(1, UPDATES + 1):
        present = [one for one in diaries if update in one.parameters]
        values = [one.parameters[update] for one in present]
        assert all(torch.equal(values[0], other) for other in values)
        torch.testing.assert_close(values[0], expected.parameters[update], rtol=1e-12, atol=1e-13)
    for diary in diaries:
        for update in diary.updates:
            assert update.position == expected.updates[update.updates - 1].position


@pytest.mark.slow
@QUICK
@given(lives=histories(), accumulate=st.integers(1, 2), weighted=st.booleans())
def test_a_run_equals_one_that_nothing_happened_to(lighthouse, lives, accumulate, weighted):
    plan = fx.Plan(
        strategy=fx.Single(), accumulate=accumulate, clip_norm=0.5, seed=3, even="uneven"
    )
    count = sum(not life.joins for life in lives)
    expected = alone(plan, count, UPDATES, weighted=weighted)
    diaries = together(plan, lives, UPDATES, lighthouse, weighted=weighted)
    _check(diaries, expected, plan)


def test_a_replica_dies_and_another_joins(lighthouse):
    plan = fx.Plan(strategy=fx.Single(), accumulate=2, seed=3, even="uneven")
    lives = [Life(), Life(dies=3), Life(joins=3)]
    diaries = together(plan, lives, UPDATES, lighthouse)
    _check(diaries, alone(plan, 2, UPDATES), plan)
    survivor, dead, joined = diaries
    # Each of the two may have made the first update before the other was there.
    assert dead.updates[-1].updates == 2 and survivor.updates[-1].updates == UPDATES
    made = [one.updates for one in survivor.updates]
    assert made == list(range(made[0], UPDATES + 1))
    assert joined.updates and joined.updates[0].healed and joined.updates[-1].updates == UPDATES
    repeated = next(one for one in survivor.updates if one.updates == 3)
    assert repeated.attempts > 1 and repeated.live == 1
    assert not any(one.healed for one in survivor.updates[1:])


@pytest.mark.slow
def test_a_smaller_batch_leaves_rows_to_later_updates(lighthouse):
    plan = fx.Plan(strategy=fx.Single(), seed=3)
    survivor, dead = together(plan, [Life(), Life(dies=3)], UPDATES, lighthouse, batch="shrink")
    before = 0
    for update in survivor.updates:
        # The other may have made the first update before this one was there.
        assert update.healed or update.position.samples == before + 3 * update.live
        before = update.position.samples
    assert [one.live for one in survivor.updates if one.updates > 2] == [1] * (UPDATES - 2)
    # Of the last attempt, by who made the update.
    seen = [
        row
        for diary in (survivor, dead)
        for update in diary.updates
        for row in diary.rows[update.updates][-3:]
    ]
    expected = [row for rows in alone(plan, 1, before // 3).rows.values() for row in rows]
    assert sorted(seen) == sorted(expected)
