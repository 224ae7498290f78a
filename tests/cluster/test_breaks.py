"""A loop that leaves an epoch in the middle of a window, under every strategy."""

import itertools

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.testing import Transformer
from fxtrain.testing.training import on_mesh
from tests.cluster.test_uneven import PLANS, cases

BATCH, BATCHES = 4, 5  # of each data rank
# Windows of three: the epoch would end with a short one, and the loop leaves that open.
LEFT_AFTER = 4
WINDOWS = ((0, 1, 2), (3, 0, 1), (2, 3, 4))


def _sgd(params):
    return torch.optim.SGD(params, lr=0.3)


def _tokens(ranks):
    generator = torch.Generator().manual_seed(3)
    count = BATCH * BATCHES * ranks
    return torch.randint(0, Transformer.VOCABULARY, (count, 9), generator=generator)


def _loss(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _train(ctx, plan, mesh):
    with on_mesh(ctx, mesh) as placed:
        tokens = _tokens(placed.axis("data").world_size)
        table = TensorDataset(tokens[:, :-1], tokens[:, 1:])
        loader = fx.shard(DataLoader(table, batch_size=BATCH), placed, plan)
        model = fx.wrap(Transformer(), placed, plan, optimizer=_sgd)
        fns = fx.StepFns(model=model, loss=lambda m, batch: _loss(m, *batch))
        for epoch, count in zip(loader.epochs(2), (LEFT_AFTER, BATCHES), strict=True):
            for batch in itertools.islice(epoch, count):
                report = fx.step(placed, batch, fns)
        whole = fx.unwrap(model)
        return report.position.updates, {n: p.detach().clone() for n, p in whole.named_parameters()}


def _by_hand(ranks):
    net = Transformer()
    optimizer = _sgd(net.parameters())
    batches = _tokens(ranks).split(BATCH * ranks)
    for window in WINDOWS:
        rows = torch.cat([batches[number] for number in window])
        _loss(net, rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(net.named_parameters())


@pytest.mark.parametrize(("n", "name"), list(cases()))
def test_an_open_window_continues_with_the_next_epoch(clusters, n, name):
    _, strategy, mesh = PLANS[name]
    plan = fx.Plan(strategy=strategy, accumulate=3)
    if name == "alone":
        plan = attrs.evolve(plan, local=fx.LocalSGD(every=1))
    if name == "context":
        plan = attrs.evolve(plan, context=fx.CP(tables=("position",)))
    ranks = n if mesh is None else n // (mesh.tensor * mesh.pipeline * mesh.context)
    wanted = _by_hand(ranks)
    for updates, got in clusters[n].run(_train, plan, mesh):
        assert updates == len(WINDOWS)
        for key, value in wanted.items():
            torch.testing.assert_close(got[key], value.detach(), rtol=1e-9, atol=1e-11)
