"""Choices of plans: better devices never make them slower, and what is chosen trains."""

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import fxtrain as fx
from tests.choosing._programs import DEVICE, Net, question, searched
from tests.profiling._dry_runs import DRY_DDP

# Plans whose steps are equally long differ by the rounding of at most thousands of terms.
_ROUNDED = 1 + 1e4 * 2**-52
FACTORS = st.floats(1, 8)
MEMORY = st.integers(5_000_000, 60_000_000)
ASKED = st.builds(
    question,
    world=st.sampled_from([1, 2, 6, 8, 16]),
    rows=st.sampled_from([48, 96, 97]),
    fixed=st.sets(st.sampled_from(["strategy", "recompute", "accumulate"])),
)


def _seconds(choice):
    return choice.best.cost.seconds if choice.table else float("inf")


@settings(max_examples=15)
@given(asked=ASKED, memory=MEMORY, factor=FACTORS)
def test_more_memory_never_makes_the_choice_slower(asked, memory, factor):
    small, large = (
        searched(asked, attrs.evolve(DEVICE, memory=int(size)), most=10**6)
        for size in (memory, memory * factor)
    )
    assert _seconds(large) <= _ROUNDED * _seconds(small)


@settings(max_examples=15)
@given(asked=ASKED, memory=MEMORY, links=FACTORS, nodes=FACTORS)
def test_faster_links_never_make_the_choice_slower(asked, memory, links, nodes):
    slow = attrs.evolve(DEVICE, memory=memory)
    fast = attrs.evolve(
        slow,
        link_bandwidth=links * slow.link_bandwidth,
        node_bandwidth=nodes * slow.node_bandwidth,
    )
    slower = _seconds(searched(asked, slow, most=10**6))
    assert _seconds(searched(asked, fast, most=10**6)) <= _ROUNDED * slower


def _train(ctx, size, plan):
    model = fx.wrap(Net(), ctx, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    for batch in fx.shard(DataLoader(torch.ones(5_000, 4), batch_size=size), ctx, plan):
        fx.step(ctx, batch, fns)


@DRY_DDP
@pytest.mark.slow
@settings(max_examples=3)
@given(world=st.sampled_from([2, 4, 8]), rows=st.sampled_from([16, 48]), memory=MEMORY)
def test_what_is_chosen_trains_on_ranks_of_that_number(world, rows, memory):
    device = attrs.evolve(DEVICE, memory=memory)
    choice = fx.tuning.choose(
        _train, world=world, device=device, rows=rows, keep=("strategy",), processes=1
    )
    best = choice.best
    run = fx.dry_run(
        lambda ctx: _train(ctx, best.batch_size, choice.plan), world=world, mesh=choice.plan.mesh
    )
    assert run.fits and run.plan == choice.plan
    data = choice.plan.mesh.replicate * choice.plan.mesh.shard
    assert best.batch_size * choice.plan.accumulate * data == rows
