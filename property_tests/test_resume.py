"""A run that was stopped and resumed is the run that was not, in every bit."""

import random
import tempfile

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import fxtrain as fx
from tests._slow import slow_after
from tests.checkpoint import _runs
from tests.checkpoint._runs import bits

ROWS = 40  # even, and so is every batch: BatchNorm takes no batch of one row
ON_RANKS = settings(deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])


def _loader(ctx, plan, size, workers):
    """With a worker process where asked."""
    more = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    rows = _runs.Noisy(ROWS)
    return fx.shard(DataLoader(rows, batch_size=size, shuffle=True, **more), ctx, plan)


def _resume(ctx, folder, kind, plan, before, after, background, workers):
    """Names of the leaves in which the stopped run differs from the other."""
    fx.ops.seed(before, ctx, per_rank=True)
    model, fns = _runs.start(ctx, kind, plan)
    report, _ = _runs.go_on(ctx, _loader(ctx, plan, 4, workers), fns, before)
    saving = fx.save(folder, ctx, model, position=report.position, background=background)
    loader = _loader(ctx, plan, 4, workers).at(report.position)
    _, wanted_rows = _runs.go_on(ctx, loader, fns, after)
    wanted, values = _runs.leaves(model)
    saving.result()

    fx.ops.seed(99, ctx, per_rank=True)
    random.seed(99)
    model, fns = _runs.start(ctx, kind, plan)
    restored = fx.restore(folder, ctx, model)
    loader = _loader(ctx, plan, 4, workers).at(restored.position)
    _, rows = _runs.go_on(ctx, loader, fns, after)
    found, other = _runs.leaves(model)
    differing = sorted(wanted.keys() ^ found.keys())
    differing += [name for name in wanted if bits(wanted[name]) != bits(found[name])]
    return differing, values == other, wanted_rows == rows, len(rows)


HOW = {
    "together": {},
    "sharded optimizer": {"strategy": fx.DDP(shard_optimizer=True)},
    "alone": {"local": fx.LocalSGD(every=3)},
    "alone with an outer optimizer": {"local": fx.DiLoCo(every=2)},
    "fragments": {"local": fx.DiLoCo(every=4, fragments=2, delay=3, compress="int8")},
    "late": {"local": fx.DiLoCo(every=3, delay=2)},
}


@pytest.mark.parametrize("cluster", slow_after(1, [2, 4]), indirect=True)
@settings(ON_RANKS, max_examples=3)
@given(
    kind=st.sampled_from(_runs.KINDS),
    accumulate=st.integers(1, 4),
    before=st.integers(1, 12),
    after=st.integers(1, 5),
    background=st.booleans(),
    workers=st.sampled_from([0, 0, 1]),
    even=st.sampled_from(["pad", "drop"]),
    how=st.sampled_from(sorted(HOW)),
)
@example("plain", 2, 5, 4, True, 0, "drop", "together")
@example("weighted", 3, 4, 2, False, 1, "pad", "alone")
@example("two optimizers", 2, 5, 4, False, 0, "drop", "sharded optimizer")
@example("fp16", 2, 3, 3, True, 0, "pad", "together")
@example("fp16", 1, 5, 4, False, 0, "pad", "alone with an outer optimizer")
@example("bf16", 2, 5, 4, False, 0, "drop", "together")
@example("scheduled", 2, 5, 4, False, 0, "drop", "sharded optimizer")
@example("plain", 1, 3, 5, True, 0, "drop", "fragments")
@example("two optimizers", 1, 4, 4, False, 0, "pad", "late")
@example("compressed", 1, 5, 4, True, 0, "drop", "together")
@example("fp16", 4, 1, 2, True, 0, "pad", "sharded optimizer")
def test_a_resumed_run_is_equal_in_every_bit(
    cluster, kind, accumulate, before, after, background, workers, even, how
):
    plan = _runs.plan_of(kind, accumulate, even=even, **HOW[how])
    with tempfile.TemporaryDirectory() as folder:
        found = cluster.run(_resume, folder, kind, plan, before, after, background, workers)
        assert fx.checkpoint.verify(folder).world_size == cluster.n
    for differing, values, rows, _ in found:
        assert differing == []
        assert values and rows
    assert any(seen for *_, seen in found)  # a rank may have had nothing but padding


def _part(ctx, folder, kind, accumulate, size, steps, save):
    """Train on so many micro-batches, or on the rest of the epoch; the rows seen."""
    plan = _runs.plan_of(kind, accumulate)
    model, fns = _runs.start(ctx, kind, plan)
    loader = _loader(ctx, plan, size, 0)
    if not save:
        loader = loader.at(fx.restore(folder, ctx, model).position)
    report, rows = _runs.go_on(ctx, loader, fns, steps, epochs=1)
    if save:
        fx.save(folder, ctx, model, position=report.position)
    return rows, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("ranks", [(1, 2), pytest.param((1, 2, 4), marks=pytest.mark.slow)])
@settings(ON_RANKS, max_examples=4)
@given(
    kind=st.sampled_from(["plain", "weighted", "bf16", "fp16", "two optimizers", "compressed"]),
    accumulate=st.integers(1, 3),
    sizes=st.tuples(st.sampled_from([2, 4]), st.sampled_from([2, 4])),
    data=st.data(),
)
def test_at_another_number_of_ranks_exactly_the_unseen_rows(
    clusters, ranks, kind, accumulate, sizes, data
):
    first, then = data.draw(st.permutations(ranks), label="numbers of ranks")[:2]
    most = -(-ROWS // (first * sizes[0])) - 1  # before the last batch of the epoch
    steps = data.draw(st.integers(1, most), label="micro-batches")
    with tempfile.TemporaryDirectory() as folder:
        before = clusters[first].run(_part, folder, kind, accumulate, sizes[0], steps, True)
        after = clusters[then].run(_part, folder, kind, accumulate, sizes[1], -1, False)
    seen = [row for rows, _ in before for row in rows]
    rest = [row for rows, _ in after for row in rows]
    assert len(seen) == steps * first * sizes[0]
    assert sorted(seen + rest) == list(range(ROWS))
    for _, parameters in after[1:]:
        for one, other in zip(parameters, after[0][1], strict=True):
            assert torch.equal(one, other)
