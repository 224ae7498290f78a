"""Metrics over exactly the rows of the data: equal to one process, whatever the ranks do."""

import itertools
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

ON_RANKS = settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])


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


@pytest.mark.parametrize("name", slow_after(4, STRATEGIES))
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


@pytest.mark.parametrize(
    "strategy", slow_after(1, [fx.DDP(), fx.FSDP(min_params=1)]), ids=["DDP", "FSDP"]
)
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


HERE = "the function of this test"


def _net():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    net[1].eval()  # as a user freezes it
    return net


def _around(model):
    return {
        "modes": [part.training for part in model.module.modules()],
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "gradients": torch.is_grad_enabled(),
    }


def _failing(ctx, strategy, kind):
    """What is around an evaluation that fails in its second batch, before and after it."""
    model = fx.wrap(_net(), ctx, fx.Plan(strategy=strategy, seed=3))
    rows = DataLoader(TensorDataset(torch.randn(7, 4)), batch_size=1, shuffle=True)
    metrics, calls = {"share": Share()}, []
    if kind == "torchmetrics":
        classification = pytest.importorskip("torchmetrics.classification")
        metrics = {"share": classification.MulticlassAccuracy(num_classes=3)}
    alone = [getattr(one, "distributed_available_fn", None) for one in metrics.values()]

    def fn(model, batch):
        assert not torch.is_grad_enabled() and not model.module.training
        calls.append(torch.rand(1) + random.random())
        guesses = model(batch[0]).argmax(1)
        if len(calls) == 2:
            raise ValueError(HERE)
        return {"share": (guesses, guesses)}

    before = _around(model)
    try:
        fx.evaluate(ctx, model, rows, fn, metrics=metrics)
    except ValueError as error:
        after = [getattr(one, "distributed_available_fn", None) for one in metrics.values()]
        return str(error), before, _around(model), alone == after


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [(fx.DDP(), "own"), (fx.FSDP(min_params=1), "own"), (fx.DDP(), "torchmetrics")],
    ids=["DDP", "FSDP", "torchmetrics"],
)
def test_an_error_of_the_function_leaves_everything_as_it_was(pair, strategy, kind):
    if kind == "torchmetrics":
        pytest.importorskip("torchmetrics")
    for text, before, after, metric_restored in pair.run(_failing, strategy, kind):
        assert text == HERE
        assert before == after
        assert before["modes"] == [True, True, False, True, True] and before["gradients"]
        assert metric_restored


def _fitted(ctx, folder, look):
    """A run whose body evaluates at some updates, or not: weights and the state around it."""
    plan = fx.Plan(accumulate=2, seed=3)
    fx.ops.seed(5, ctx, per_rank=True)
    model = fx.wrap(_net(), ctx, plan, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch[0]).square().mean())
    rows = torch.randn(22, 4, generator=torch.Generator().manual_seed(1))
    loader = fx.shard(DataLoader(TensorDataset(rows), batch_size=3, shuffle=True), ctx, plan)
    held_out = DataLoader(TensorDataset(rows[:5]), batch_size=2, shuffle=True)

    def measure():
        return fx.evaluate(ctx, model, held_out, lambda m, b: m(b[0]).square().mean(1))

    how = {"evaluate": measure, "evaluate_every": 2} if look else {}
    found = []
    for report in fx.fit(ctx, fns, loader, folder, epochs=2, show=False, **how):
        if look:
            inside = measure()
            if report.metrics is not None:
                found.append((report.metrics, inside))
    return found, {name: value.tolist() for name, value in fx.weights(model)}, _around(model)


def test_a_run_with_evaluations_trains_bitwise_as_without(pair, tmp_path):
    plain = pair.run(_fitted, str(tmp_path / "plain"), False)
    looked = pair.run(_fitted, str(tmp_path / "looked"), True)
    for (found, weights, around), (_, wanted, before) in zip(looked, plain, strict=True):
        assert weights == wanted
        assert around == before
        # Two evaluations of the same weights, one by `fit` and one in its body.
        assert len(found) > 1 and all(one == two for one, two in found)


def _token_mean(model, batch):
    tokens, targets, mask = batch
    each = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
    return fx.Weighted((each * mask.flatten()).sum(), mask.sum())


def _tokens():
    tokens, mask = token_rows(7)
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:], mask), batch_size=2)


def _measured(ctx, mesh, options):
    with on_mesh(ctx, mesh) as placed:
        plan = fx.Plan(**options)
        model = fx.wrap(Transformer(dtype=torch.float64), placed, plan)
        return fx.evaluate(placed, model, _tokens(), _token_mean)


PARTS = {
    "context": (2, fx.Mesh(context=2), {"context": fx.CP(tables=("position",))}),
    "local": (2, None, {"local": fx.LocalSGD(every=3)}),
    "streamed": (1, None, {"strategy": fx.Offload()}),
}


@pytest.mark.parametrize("name", PARTS)
def test_strategies_that_hold_parts_give_the_metrics_of_one_process(clusters, name):
    ranks, mesh, options = PARTS[name]
    with torch.no_grad():
        model = Transformer(dtype=torch.float64)
        found = _token_mean(model, _tokens().dataset[:])
    for measured in clusters[ranks].run(_measured, mesh, options):
        assert measured == pytest.approx(float(found.total / found.weight), rel=1e-9)


def _hugging_face(ctx):
    from sklearn.metrics import f1_score

    datasets = pytest.importorskip("datasets")
    evaluate = pytest.importorskip("evaluate")

    class F1(evaluate.Metric):
        def _info(self):
            kinds = {name: datasets.Value("int64") for name in ("predictions", "references")}
            return evaluate.MetricInfo(
                description="",
                citation="",
                features=datasets.Features(kinds),
                inputs_description="",
            )

        def _compute(self, predictions, references):
            return {"f1": float(f1_score(references, predictions, average="macro"))}

    torch.manual_seed(0)
    guesses, right = torch.randint(0, 3, (2, 11))
    model = fx.wrap(nn.Identity(), ctx)
    rows = DataLoader(TensorDataset(guesses, right), batch_size=2)
    pairs = fx.evaluate(ctx, model, rows, lambda m, b: tuple(b), metrics=F1())
    named = fx.evaluate(
        ctx,
        model,
        rows,
        lambda m, b: {"f1": {"predictions": b[0], "references": b[1]}},
        metrics={"f1": F1()},
    )
    return [pairs, named["f1"]], float(f1_score(right, guesses, average="macro"))


def test_a_metric_of_hugging_face_gives_what_it_gives_in_one_process(pair):
    pytest.importorskip("evaluate")
    for found, wanted in pair.run(_hugging_face):
        assert found == [{"f1": wanted}] * 2


def _first_batches(ctx):
    """Of data without an end, of which the ranks' rows are 0, 1, 2, ...; and of data with one."""
    model = fx.wrap(nn.Identity(), ctx)
    endless = fx.shard(lambda at: at.index + torch.arange(3.0), ctx, batch_size=3)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return map(float, itertools.count())

    streams = DataLoader(Stream(), batch_size=3)
    rows = DataLoader(torch.arange(8.0), batch_size=3)

    def mean(loader, batches):
        return fx.evaluate(ctx, model, loader, lambda m, b: m(b.data), batches=batches)

    found = [[mean(loader, batches) for batches in (1, 2)] for loader in (endless, streams, rows)]
    return found, mean(rows, 99), mean(endless.skip(1), 1)


def test_the_first_batches_of_data_without_an_end_are_evaluated(clusters):
    for ranks in (1, 2):
        for found, whole, after in clusters[ranks].run(_first_batches):
            means = [(3 * ranks * batches - 1) / 2 for batches in (1, 2)]
            assert found == [means, means, [min(one, 3.5) for one in means]]
            assert (whole, after) == (3.5, means[0] + 3 * ranks)


@pytest.mark.parametrize("batches", [0, -1, 1.0, True])
def test_a_number_of_batches_is_checked(batches):
    words = r"evaluate\(batches=.*\): pass a number of batches"
    with fx.detect(env={}, device="cpu") as ctx, pytest.raises(fx.PlanError, match=words):
        model, rows = fx.wrap(nn.Identity(), ctx), DataLoader(torch.arange(3.0))
        fx.evaluate(ctx, model, rows, lambda model, batch: 1.0, batches=batches)
