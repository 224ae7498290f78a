"""Evaluations inside a run, errors in them, and strategies that hold a model in parts."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.testing import Transformer
from fxtrain.testing.training import on_mesh, token_rows
from tests.cluster._metrics import Share

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
