"""Loops that leave epochs early, skip them or resume: an update is the mean over its window."""

import itertools
import tempfile

import attrs
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fxtrain as fx
from property_tests import _regression

ON_RANKS = settings(
    max_examples=5, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
STRATEGIES = {
    "ddp": {},
    "sharded optimizer": {"strategy": fx.DDP(shard_optimizer=True)},
    "fsdp": {"strategy": fx.FSDP()},
    "copies": {"local": fx.LocalSGD(every=1)},
}
LEFT, RESUMED = [(4, False), (9, False)], [(4, True), (9, False)]  # for five batches an epoch


class Stream(IterableDataset):
    def __init__(self, table):
        self.table = table

    def __iter__(self):
        return iter(self.table)


def _sgd(params):
    return torch.optim.SGD(params, lr=0.3)


def _start(ctx, plan, *, weighted):
    model = fx.wrap(_regression.net(), ctx, plan, optimizer=_sgd)
    return model, fx.StepFns(
        model=model, loss=_regression.weighted if weighted else _regression.mean
    )


def _train(ctx, n, size, plan, parts, later, weighted, stream, folder):
    """Run so many batches at a time, then break; or save, and resume with another model.

    Args:
        later: Accumulation of those that resume.
    """
    rows = TensorDataset(*_regression.rows(n))
    table = DataLoader(Stream(rows) if stream else rows, batch_size=size)
    loader = fx.shard(table, ctx, plan)
    model, fns = _start(ctx, plan, weighted=weighted)
    epochs, position = loader.epochs(99), fx.Position()
    for number, (count, resumes) in enumerate(parts):
        applied = []
        for batch in itertools.islice(next(epochs), count):
            report = fx.step(ctx, batch, fns)
            applied.append(report.applied)
            position = report.position
            assert report.applied == (position.micro == 0)
        if resumes and applied:
            fx.save(f"{folder}/{number}", ctx, model, position=position)
            fx.unwrap(model)
            plan = attrs.evolve(plan, accumulate=later)
            loader = fx.shard(table, ctx, plan)
            model, fns = _start(ctx, plan, weighted=weighted)
            epochs = loader.at(fx.restore(f"{folder}/{number}", ctx, model).position).epochs(99)
    whole = fx.unwrap(model)
    return [p.detach().clone() for p in whole.parameters()], position


def _by_hand(n, stride, plan, parts, later):
    """The same loop on torch alone: a window's rows in one batch, whenever it closes."""
    net, table = _regression.net(), TensorDataset(*_regression.rows(n))
    optimizer = _sgd(net.parameters())
    steps = n // stride if plan.even == "drop" else -(-n // stride)
    window, micro, updates, samples, at = [], 0, 0, 0, 0
    accumulate = plan.accumulate
    for count, resumes in parts:
        if at and at == steps:
            at = 0
        first = at
        for at in range(first + 1, min(first + count, steps) + 1):
            rows = list(range((at - 1) * stride, min(at * stride, n)))
            window, micro, samples = window + rows, micro + 1, samples + len(rows)
            if micro >= accumulate or (at == steps and plan.flush):
                _regression.losses(net, *table[window]).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                window, micro, updates = [], 0, updates + 1
        if resumes and at > first:
            accumulate = later
        else:
            at = 0
    return list(net.parameters()), (samples, updates, micro)


@st.composite
def _parts(draw):
    parts = draw(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=5))
    return [*parts, (9, False)]


@ON_RANKS
@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 3),
    accumulate=st.integers(1, 4),
    later=st.integers(1, 4),
    flush=st.booleans(),
    sync_each=st.booleans(),
    shared=st.booleans(),
    weighted=st.booleans(),
    even=st.sampled_from(["pad", "drop", "uneven"]),
    stream=st.booleans(),
    how=st.sampled_from(sorted(STRATEGIES)),
    parts=_parts(),
)
@example(10, 1, 3, 3, True, False, False, False, "uneven", False, "ddp", LEFT)
@example(10, 1, 3, 3, True, False, False, False, "uneven", False, "ddp", RESUMED)
@example(10, 1, 3, 1, True, False, False, False, "uneven", False, "ddp", RESUMED)
@example(10, 1, 3, 1, True, False, False, True, "pad", True, "fsdp", RESUMED)
@example(14, 3, 4, 4, False, True, False, False, "uneven", False, "copies", [(9, False), (1, True)])
def test_an_update_is_the_mean_over_what_its_window_holds(
    cluster,
    rows,
    size,
    accumulate,
    later,
    flush,
    sync_each,
    shared,
    weighted,
    even,
    stream,
    how,
    parts,
):
    stride = size * cluster.n
    if even == "pad" and not weighted:  # whose mean counts padding
        rows = -(-rows // stride) * stride
    plan = fx.Plan(
        accumulate=accumulate,
        flush=flush,
        sync_each=sync_each,
        batch="global" if shared else "per_rank",
        even=even,
        **STRATEGIES[how],
    )
    wanted, seen = _by_hand(rows, stride, plan, parts, later)
    asked = stride if shared else size
    with tempfile.TemporaryDirectory() as folder:
        found = cluster.run(_train, rows, asked, plan, parts, later, weighted, stream, folder)
    for got, position in found:
        assert (position.samples, position.updates, position.micro) == seen
        assert position == found[0][1]
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
