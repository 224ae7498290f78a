"""Metrics over exactly the rows of the data: equal to one process, whatever the ranks do."""

import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fxtrain as fx
from fxtrain.testing import Transformer
from fxtrain.testing.training import on_mesh, token_rows
from tests._slow import slow_after
from tests.cluster._metrics import Share
from tests.cluster._models import ATTENTION, DOWN, PIPELINES, UP

ON_RANKS = settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])


SPLIT = fx.TP(styles=(UP, DOWN, *ATTENTION))


class Collected:
    """A metric with Hugging Face's methods: all that it is given, in order."""

    def __init__(self):
        self.columns = []

    def add_batch(self, *, predictions, references):
        self.columns += zip(predictions, references, strict=True)

    def compute(self):
        found, self.columns = self.columns, []
        return {"columns": found}


def _values(model, batch):
    tokens, targets, mask = batch
    logits = model(tokens)
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    each = each.view(mask.shape)
    guesses = logits[:, 0].argmax(-1)
    return {
        "row": each.mean(1),
        "mean": each.mean(),
        "token": fx.Weighted((each * mask).sum(), mask.sum()),
        "nested": (guesses == targets[:, 0], guesses.tolist()),
        "share": (guesses, targets[:, 0]),
        "collected": {"predictions": guesses, "references": targets[:, 0]},
    }


def _data(n):
    tokens, mask = token_rows(n)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:], mask)


def _wanted(n):
    batch = _data(n)[:]
    with torch.no_grad():
        found = _values(Transformer(dtype=torch.float64), batch)
    guesses, targets = found["share"]
    hits, numbers = found["nested"]
    return {
        "row": float(found["row"].mean()),
        "mean": float(found["mean"]),
        "token": float(found["token"].total / found["token"].weight),
        "nested": (float(hits.double().mean()), sum(numbers) / n),
        "share": float((guesses == targets).sum() / n),
        "collected": {"columns": list(zip(guesses.tolist(), targets.tolist(), strict=True))},
    }


def _evaluated(ctx, n, size, mesh, options, whole):
    plan = fx.Plan(**options)
    with on_mesh(ctx, mesh) as placed:
        model = fx.wrap(Transformer(dtype=torch.float64), placed, plan)
        loader = DataLoader(_data(n), batch_size=size)
        if not whole:
            loader = fx.shard(loader, placed, plan)
        metrics = {"share": Share(), "collected": Collected()}
        return [fx.evaluate(placed, model, loader, _values, metrics=metrics) for _ in range(2)]


def _same(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted.keys() - {"collected"}:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-9, atol=0)
    assert found["collected"] == wanted["collected"]


def _check(pool, n, size, mesh, options, *, whole=False):
    wanted = _wanted(n)
    for twice in pool.run(_evaluated, n, size, mesh, options, whole):
        for found in twice:
            _same(found, wanted)


@ON_RANKS
@given(
    n=st.integers(1, 11),
    size=st.integers(1, 4),
    even=st.sampled_from(["pad", "drop", "uneven"]),
    strategy=st.sampled_from([fx.DDP(), fx.FSDP()]),
    batch=st.sampled_from(["per_rank", "global"]),
    whole=st.booleans(),
)
@example(n=5, size=3, even="pad", strategy=fx.DDP(), batch="global", whole=True)
def test_ragged_rows_count_once(pair, n, size, even, strategy, batch, whole):
    assume(whole or batch == "per_rank" or size % 2 == 0)  # fx.shard refuses the others
    options = {"strategy": strategy, "even": even, "batch": batch}
    _check(pair, n, size, None, options, whole=whole)


def _in_own_batches(ctx, batches):
    model = fx.wrap(nn.Identity(), ctx, fx.Plan(batch="global"))
    loader = DataLoader(torch.arange(9.0), batch_sampler=batches)
    return fx.evaluate(ctx, model, loader, lambda model, batch: model(batch.data))


def test_batches_of_a_sampler_need_not_be_divisible(pair):
    assert pair.run(_in_own_batches, [[0, 1, 2], [3, 4, 5, 6, 7], [8, 0]]) == [3.6, 3.6]


STRATEGIES = {
    "one process": (1, None, {}),
    "accumulated": (2, None, {"accumulate": 3}),
    "global batch": (2, None, {"batch": "global"}),
    "dispatched": (2, None, {"data": fx.Data(source="dispatch"), "even": "drop"}),
    "tensor": (
        2,
        fx.Mesh(tensor=2),
        {"strategy": fx.FSDP(tensor=fx.TP(styles=(UP, DOWN, *ATTENTION)))},
    ),
    "sharded optimizer": (2, None, {"strategy": fx.DDP(shard_optimizer=True)}),
    "more ranks than rows": (4, None, {}),
    "replicas and shards": (4, fx.Mesh(replicate=2, shard=2), {"strategy": fx.FSDP()}),
}


@pytest.mark.parametrize("name", slow_after(6, STRATEGIES))
def test_every_strategy_gives_the_metrics_of_one_process(clusters, name):
    ranks, mesh, options = STRATEGIES[name]
    _check(clusters[ranks], 3 if ranks == 4 else 7, 2, mesh, options)


@PIPELINES
@pytest.mark.parametrize(
    ("ranks", "mesh", "stages"),
    [(2, fx.Mesh(pipeline=2), None), (4, fx.Mesh(pipeline=2, shard=2), fx.FSDP())],
    ids=["plain", "sharded"],
)
def test_a_pipeline_gives_the_metrics_of_one_process(clusters, ranks, mesh, stages):
    _check(clusters[ranks], 7, 4, mesh, {"strategy": fx.PP(stages=stages)})


def _last_only(ctx):
    with on_mesh(ctx, fx.Mesh(pipeline=2)) as placed:
        plan = fx.Plan(strategy=fx.PP(outputs="last"))
        model = fx.wrap(Transformer(), placed, plan)
        try:
            fx.evaluate(placed, model, DataLoader(_data(2)), _values)
        except fx.PlanError as error:
            return str(error)


@PIPELINES
def test_outputs_of_the_last_stage_only_are_refused(pair):
    assert all('Use PP(outputs="all")' in found for found in pair.run(_last_only))


def _noisy_net():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))
    net[1].eval()  # as a user freezes it
    return net


def _state(net):
    return {
        "modes": [part.training for part in net.modules()],
        "random": (torch.rand(2).tolist(), random.random()),
        "grads": [parameter.grad is not None for parameter in net.parameters()],
    }


def _trained(ctx, strategy, look):
    """Training in which every step is followed by an evaluation, or not."""
    plan = fx.Plan(strategy=strategy, accumulate=2, seed=3)
    fx.ops.seed(5, ctx, per_rank=True)
    model = fx.wrap(_noisy_net(), ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch[0]).square().mean())
    rows = torch.randn(18, 4, generator=torch.Generator().manual_seed(1))
    loader = fx.shard(DataLoader(TensorDataset(rows), batch_size=3, shuffle=True), ctx, plan)
    held_out = DataLoader(TensorDataset(rows[:5]), batch_size=2, shuffle=True)
    noise = lambda model, batch: torch.rand(len(batch[0])) + random.random()  # noqa: E731
    found = []
    for epoch in loader.epochs(2):
        for batch in epoch:
            fx.step(ctx, batch, fns)
            if look:
                found.append(fx.evaluate(ctx, model, held_out, noise))
    weights = {name: value.tolist() for name, value in fx.weights(model)}
    return found, weights, _state(model.module)


@pytest.mark.parametrize("strategy", [fx.DDP(), fx.FSDP(min_params=1)], ids=["DDP", "FSDP"])
def test_training_is_bitwise_as_without_evaluations(pair, strategy):
    plain = pair.run(_trained, strategy, False)
    for (found, weights, state), (_, wanted, before) in zip(
        pair.run(_trained, strategy, True), plain, strict=True
    ):
        assert weights == wanted
        assert state["modes"] == before["modes"] == [True, True, False, True, True]
        assert state["random"] == before["random"]
        assert len(set(found)) == 1  # the same random numbers each time


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(7.0))


def _streamed(ctx, batch, size):
    model = fx.wrap(nn.Identity(), ctx, fx.Plan(batch=batch))
    return fx.evaluate(ctx, model, DataLoader(Stream(), batch_size=size), lambda m, b: m(b.data))


@pytest.mark.parametrize(("batch", "size"), [("per_rank", 2), ("global", 3)])
def test_a_stream_is_evaluated_too(cluster, batch, size):
    assert cluster.run(_streamed, batch, size) == [3.0] * cluster.n
