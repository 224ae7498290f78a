"""A contrastive loss over the rows of all ranks, by `ops.gather(grad=True)`: as in one process."""

import pytest
import torch
import torch.nn.functional as F

import fxtrain as fx
from fxtrain import ops
from tests._slow import slow_after
from tests.cluster._frozen import data, net

PLANS = {
    "ddp": fx.Plan(batch="global"),
    "ddp, clipped": fx.Plan(batch="global", clip_norm=0.1),
    "fsdp": fx.Plan(batch="global", strategy=fx.FSDP(min_params=1)),
}


def _sgd(params):
    return torch.optim.SGD(params, lr=0.5)


def _contrastive(rows, others, first):
    """Each row is to be more like its own pair than like those of the other rows."""
    rows, others = F.normalize(rows, dim=1), F.normalize(others, dim=1)
    return F.cross_entropy(rows @ others.T / 0.1, torch.arange(first, first + len(rows)))


def _trained(ctx, plan):
    model = fx.wrap(net().double(), ctx, plan, optimizer=_sgd)

    def loss(model, batch):
        x = batch[0].double()
        rows, pairs = model(x), model(x + 0.1)
        everyones = ops.gather(pairs, ctx, grad=True)
        return _contrastive(rows, everyones, ctx.rank * len(rows))

    fns = fx.StepFns(model, loss)
    for epoch in fx.shard(data(), ctx, plan).epochs(3):
        for batch in epoch:
            fx.step(ctx, batch, fns)
    return [one.detach().clone() for _, one in fx.weights(model)]


@pytest.mark.parametrize("name", slow_after(2, PLANS))
def test_negatives_of_all_ranks_train_as_in_one_process(pair, clusters, name):
    (truth,) = clusters[1].run(_trained, PLANS[name])
    for found in pair.run(_trained, PLANS[name]):
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-12)


def _gathered(ctx, requires):
    x = torch.ones(2, requires_grad=requires[ctx.rank])
    try:
        return ops.gather({"a": x}, ctx, grad=True)["a"].requires_grad
    except fx.CollectiveError as error:
        return str(error)


def test_leaves_without_gradient_have_none(pair):
    assert pair.run(_gathered, (False, False)) == [False, False]


def test_ranks_that_differ_in_what_requires_a_gradient_hear_of_it(pair):
    for told in pair.run(_gathered, (True, False)):
        assert "with gradients of the leaves [0]" in told and "leaves []" in told
