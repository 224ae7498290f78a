"""Arguments in the wrong place: the line to write instead, the same on every rank."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from tests.cluster._wrong_calls import WRONG, plateau, sgd


def _said(ctx):
    """The error of each call on this rank."""
    net = nn.Sequential(nn.Linear(2, 2))
    model = fx.wrap(net, ctx, optimizer=sgd, scheduler=plateau)
    rows = [{"x": torch.ones(2), "y": n % 2} for n in range(8)]
    loader = fx.shard(DataLoader(rows, batch_size=2), ctx)
    batch = next(iter(loader))
    said = {}
    for name, (call, _) in WRONG.items():
        try:
            call(ctx, model, loader, batch)
        except (fx.FxError, AttributeError) as error:
            said[name] = f"{type(error).__name__}: {error}".replace(f"rank {ctx.rank} ", "rank ")
    return said


@pytest.mark.parametrize("n", [1, 2])
def test_the_line_to_write_is_said_on_every_rank(clusters, n):
    first, *others = clusters[n].run(_said)
    assert [name for name in WRONG if WRONG[name][1] not in first.get(name, "")] == []
    assert all(other == first for other in others)


def test_a_batch_is_a_mapping_with_get(ctx_of_one):
    rows = [{"x": torch.ones(2)}] * 2
    (batch,) = fx.shard(DataLoader(rows, batch_size=2), ctx_of_one)
    assert batch.get("x").shape == (2, 2)
    assert batch.get("z") is None and batch.get("z", 3) == 3


def test_a_loader_has_the_batch_that_it_yielded_last(ctx_of_one):
    loader = fx.shard(DataLoader(torch.arange(10), batch_size=4), ctx_of_one)
    for epoch in loader.epochs(2):
        assert all(batch is epoch.batch for batch in epoch)
        assert epoch.batch.position.is_last


@pytest.fixture
def ctx_of_one():
    with fx.detect({}, device="cpu") as opened:
        yield opened
