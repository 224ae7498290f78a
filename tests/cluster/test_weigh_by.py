"""`Plan(weigh_by="batches")`: each micro-batch weighs 1 / accumulate, as in Accelerate."""

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.testing.training import on_mesh
from tests._slow import slow_after
from tests.cluster._models import PIPELINES
from tests.cluster._small_nets import SGD, small_data, small_net, square_loss

EVERY, ROWS, SIZE = 3, 30, 4  # the last micro-batch and the last window of an epoch are short


def _trained(ctx, plan, parts):
    model = fx.wrap(small_net().double(), ctx, plan, optimizer=SGD)
    loader = fx.shard(DataLoader(_data(), batch_size=SIZE), ctx, plan)
    for epoch in loader.epochs(2):
        for batch in epoch:
            if parts:
                fx.ops.backward(square_loss(model, batch), model, batch)
                fx.ops.apply(model)
            else:
                fx.step(ctx, batch, fx.StepFns(model, square_loss))
    return [value.tolist() for _, value in fx.weights(model, device="cpu")]


def _data():
    x, y = small_data(ROWS)[:]
    return torch.utils.data.TensorDataset(x.double(), y)


def _by_hand(ranks):
    """As Accelerate: each micro-batch of each rank counts 1 / accumulate, in any window."""
    net, (x, y) = small_net().double(), _data()[:]
    optimizer = SGD(net.parameters())
    size = SIZE * ranks
    for _ in range(2):
        starts = range(0, ROWS, size)
        for number, start in enumerate(starts, 1):
            rows = torch.arange(start, min(start + size, ROWS))
            if len(rows) < size and ranks > 1:
                rows = torch.arange(start, start + size) % ROWS  # padding from the start
            loss = square_loss(net, (x[rows], y[rows])) / EVERY
            loss.backward()
            if number % EVERY == 0 or number == len(starts):
                optimizer.step()
                optimizer.zero_grad()
    return [value.tolist() for value in net.state_dict().values()]


PLANS = {
    "one rank": (1, {}),
    "two ranks": (2, {}),
    "sync_each": (2, {"sync_each": True}),
    "FSDP": (2, {"strategy": fx.FSDP(min_params=1)}),
}


@pytest.mark.parametrize("parts", slow_after(1, [False, True]), ids=["step", "parts"])
@pytest.mark.parametrize("name", PLANS)
def test_each_micro_batch_has_the_same_weight(clusters, name, parts):
    ranks, how = PLANS[name]
    plan = fx.Plan(accumulate=EVERY, weigh_by="batches", **how)
    wanted = _by_hand(ranks)
    for found in clusters[ranks].run(_trained, plan, parts):
        if ranks == 1:
            assert found == wanted
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(
                torch.tensor(mine, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
            )


def _in_a_pipeline(ctx, plan):
    with on_mesh(ctx, fx.Mesh(pipeline=2)) as placed:
        return _trained(placed, plan, parts=False)


@PIPELINES
def test_micro_batches_that_a_pipeline_divides_have_the_same_weight(pair):
    plan = fx.Plan(accumulate=EVERY, weigh_by="batches", strategy=fx.PP(microbatches=2))
    for found in pair.run(_in_a_pipeline, plan):
        for mine, theirs in zip(found, _by_hand(1), strict=True):
            assert torch.tensor(mine).flatten().tolist() == pytest.approx(
                torch.tensor(theirs).flatten().tolist()
            )


def test_rows_have_the_same_weight_by_default(clusters):
    (found,) = clusters[1].run(_trained, fx.Plan(accumulate=EVERY), False)
    assert found != _by_hand(1)
