"""Replicas that train independently, and die and join between averages."""

import collections
import contextlib

import attrs
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.testing import Cluster
from tests._slow import slow_after
from tests.replicas._team import Life, loader, loss_of, net, together, wrapped

UPDATES = 9
EPOCH = 8  # of two replicas, without accumulation
QUICK = settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1)


@st.composite
def histories(draw):
    """Two or three replicas, of which all but the first may die, and up to two that join."""
    deaths = st.one_of(st.none(), st.integers(1, UPDATES))
    lives = [Life()] + [Life(dies=draw(deaths)) for _ in range(draw(st.integers(1, 2)))]
    for joins in draw(st.lists(st.integers(1, UPDATES - 3), max_size=2, unique=True)):
        dies = draw(st.one_of(st.none(), st.integers(joins + 2, UPDATES)))
        lives.append(Life(joins=joins, dies=dies))
    return lives


@st.composite
def plans_of_averages(draw):
    """`fx.LocalSGD`, or `fx.DiLoCo` with everything that it has."""
    every = draw(st.integers(1, 4))
    if draw(st.booleans()):
        return fx.LocalSGD(every=every)
    return fx.DiLoCo(
        every=every,
        outer_momentum=draw(st.sampled_from([0.0, 0.9])),
        nesterov=draw(st.booleans()),
        fragments=draw(st.integers(1, min(2, every))),
        delay=draw(st.integers(0, every - 1)),
        compress=draw(st.sampled_from(["none", "int8"])),
    )


def _check_outer(diaries):
    """Outer state is equal on all after each exchange, and a healed one has a donor's."""
    for update in {one for diary in diaries for one in diary.outer}:
        states = [diary.outer[update] for diary in diaries if update in diary.outer]
        assert all(torch.equal(states[0], other) for other in states)
    sent = [state for diary in diaries for state in diary.sent]
    for diary in diaries:
        for state in diary.entered:
            assert any(torch.equal(state, other) for other in sent)


def _check_rows(diaries):
    """At each exchange, the rows since the one before were trained on once, or are lost."""
    meetings = sorted({one for diary in diaries for one in diary.outer})
    before, samples = 0, 0
    for update in meetings:
        there = [d for d in diaries if any(u.updates == update for u in d.updates)]
        reports = [next(u for u in d.updates if u.updates == update) for d in there]
        rows = [row for d in there for k in range(before + 1, update + 1) for row in d.rows[k]]
        now = reports[0].position.samples
        assert {one.lost for one in reports} == {now - samples - len(rows)}
        assert max(collections.Counter(rows).values(), default=1) <= 1 + (now > 44)
        before, samples = update, now


@pytest.mark.slow
@QUICK
@given(
    lives=histories(),
    local=plans_of_averages(),
    accumulate=st.integers(1, 2),
    batch=st.sampled_from(["keep", "shrink"]),
)
def test_outer_states_are_equal_whatever_happens(lighthouse, lives, local, accumulate, batch):
    plan = fx.Plan(strategy=fx.Single(), accumulate=accumulate, seed=3, even="uneven")
    diaries = together(plan, lives, UPDATES, lighthouse, batch=batch, local=local)
    _check_outer(diaries)
    _check_rows(diaries)
    ends = [diary.parameters[UPDATES] for diary in diaries if UPDATES in diary.parameters]
    assert all(torch.equal(ends[0], other) for other in ends)


def _by_hand(diaries, local, *, weighted):
    """Outer parameters after each average, from the rows that each replica has trained on."""
    outer = [p.detach().clone() for p in net(0).parameters()]
    step = torch.optim.SGD(
        outer, lr=local.outer_lr, momentum=local.outer_momentum, nesterov=local.nesterov
    )
    _, x, y = loader().dataset.tensors
    found, before = {}, 0
    for update in sorted({u.updates for d in diaries for u in d.updates if u.averaged}):
        means, total = [torch.zeros_like(p) for p in outer], 0.0
        for diary in diaries:
            if not any(u.updates == update for u in diary.updates):
                continue
            model, weights = net(0), 0.0
            with torch.no_grad():
                for p, value in zip(model.parameters(), outer, strict=True):
                    p.copy_(value)
            inner = _sgd(model.parameters())
            for k in range(before + 1, update + 1):
                if diary.rows[k]:
                    rows = torch.tensor(diary.rows[k])
                    inner.param_groups[0]["lr"] = 0.1 * 0.5 ** ((k - 1) // 3)  # the scheduler's
                    loss = loss_of(model, (rows, x[rows], y[rows]), weighted=weighted)
                    weight = float(loss.weight) if weighted else len(rows)
                    loss = loss.total / loss.weight if weighted else loss
                    inner.zero_grad()
                    loss.backward()
                    inner.step()
                    weights += weight
            for mean, p in zip(means, model.parameters(), strict=True):
                mean += weights * p.detach()
            total += weights
        for p, mean in zip(outer, means, strict=True):
            p.grad = p - mean / total
        step.step()
        found[update] = torch.cat([p.detach().flatten().clone() for p in outer])
        before = update
    return found


@pytest.mark.parametrize("weighted", slow_after(1, [False, True]))
def test_a_replica_dies_and_another_joins_as_by_hand(lighthouse, weighted):
    local = fx.DiLoCo(every=3, outer_momentum=0.6)
    plan = fx.Plan(strategy=fx.Single(), accumulate=2, seed=3, even="uneven")
    lives = [Life(), Life(dies=5), Life(joins=4)]
    diaries = together(
        plan, lives, UPDATES, lighthouse, local=local, weighted=weighted, optimizer=_sgd
    )
    _check_outer(diaries)
    _check_rows(diaries)
    survivor, dead, joined = diaries
    wanted = _by_hand(diaries, local, weighted=weighted)
    for update, values in wanted.items():
        torch.testing.assert_close(
            survivor.outer[update][: len(values)], values, rtol=1e-12, atol=1e-13
        )
        if update in survivor.parameters:  # the other may have begun before this one was there
            assert torch.equal(survivor.parameters[update], survivor.outer[update][: len(values)])
    assert dead.updates[-1].updates < 5 and joined.updates[0].healed and joined.entered
    assert sum(one.lost for one in survivor.updates) > 0
    assert joined.updates[-1].averaged and joined.updates[-1].updates == UPDATES
    assert all(one.attempts == 1 for one in survivor.updates)  # nobody waited for the dead one


def _by_a_plan(ctx, plan):
    model = wrapped(ctx, plan, 0)
    fns = fx.StepFns(model=model, loss=lambda m, b: loss_of(m, b, weighted=False))
    for batch in fx.shard(loader(), ctx, plan).updates(EPOCH):
        fx.step(ctx, batch, fns)
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("compress", ["none", "int8"])
def test_replicas_that_stay_train_as_the_ranks_of_a_plan(lighthouse, compress):
    """Fragments are under way while others begin, and where the data end."""
    local = fx.DiLoCo(every=3, fragments=2, delay=2, compress=compress)
    plan = fx.Plan(seed=3, even="uneven")
    options = {"local": local, "min_count": 2}
    mine, other = together(plan, [Life(), Life()], EPOCH, lighthouse, **options)
    with contextlib.closing(Cluster(2)) as ranks:
        wanted, _ = ranks.run(_by_a_plan, attrs.evolve(plan, local=local))
    assert torch.equal(mine.parameters[EPOCH], other.parameters[EPOCH])
    torch.testing.assert_close(mine.parameters[EPOCH], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_a_run_of_averages_continues_from_its_folder(lighthouse, tmp_path):
    plan, local = fx.Plan(seed=3), fx.DiLoCo(every=2)
    options = {"local": local, "min_count": 2}
    lives = [Life(), Life()]
    whole = together(plan, lives, 8, lighthouse, **options)[0].outer[8]
    folder = tmp_path / "run"
    together(plan, lives, 4, lighthouse, **options, folder=folder)
    rest = together(plan, lives, 8, lighthouse, **options, folder=folder)
    assert [one.updates for one in rest[0].updates] == [5, 6, 7, 8]
    # All but the optimizer states of the replica that did not save.
    torch.testing.assert_close(rest[0].outer[8], whole, rtol=0.1, atol=0.1)
    assert torch.equal(rest[0].outer[8], rest[1].outer[8])
