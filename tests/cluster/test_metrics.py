"""Metrics of torchmetrics and running means over ranks, and what evaluation refuses."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx


def _torchmetrics(ctx, n):
    classification = pytest.importorskip("torchmetrics.classification")
    torchmetrics = pytest.importorskip("torchmetrics")
    generator = torch.Generator().manual_seed(n)
    logits, labels = torch.randn(n, 3, generator=generator), torch.arange(n) % 3
    model = fx.wrap(nn.Identity(), ctx)
    rows = DataLoader(TensorDataset(logits, labels), batch_size=2)
    three = {"num_classes": 3}
    metrics = {
        "accuracy": classification.MulticlassAccuracy(**three, average="micro"),
        "auroc": classification.MulticlassAUROC(**three),
        "both": torchmetrics.MetricCollection(
            [
                classification.MulticlassF1Score(**three),
                classification.MulticlassRecall(**three, average=None),
            ]
        ),
    }
    found = fx.evaluate(
        ctx,
        model,
        rows,
        lambda model, batch: dict.fromkeys(metrics, (model(batch[0]), batch[1])),
        metrics=metrics,
    )
    single = fx.evaluate(ctx, model, rows, lambda m, b: tuple(b), metrics=metrics["accuracy"])
    restored = metrics["accuracy"].distributed_available_fn is not None
    for metric in metrics.values():
        metric.reset()
        parts = metric.values() if isinstance(metric, torch.nn.ModuleDict) else [metric]
        for part in parts:
            part.distributed_available_fn = lambda: False
        metric.update(logits, labels)
    return found, single, restored, {name: metric.compute() for name, metric in metrics.items()}


@pytest.mark.parametrize("n", [3, 11])
def test_torchmetrics_give_what_they_give_in_one_process(pair, n):
    pytest.importorskip("torchmetrics")
    for found, single, restored, wanted in pair.run(_torchmetrics, n):
        assert single == found["accuracy"]
        assert restored
        torch.testing.assert_close(found["accuracy"], float(wanted["accuracy"]))
        torch.testing.assert_close(found["auroc"], float(wanted["auroc"]))
        for name, value in wanted["both"].items():
            got = found["both"][name]
            torch.testing.assert_close(torch.as_tensor(got), value)


BAD = {
    "text": (lambda m, b: "good", None, "no number and no column"),
    "wrong rows": (lambda m, b: torch.zeros(7), None, r"shape \[7\] for a batch of"),
    "structure": (lambda m, b: [1.0] * len(b[0]) if len(b[0]) > 1 else (1.0,), None, "same struct"),
}


def _refused(ctx, name):
    fn, metrics, _ = BAD[name]
    model = fx.wrap(nn.Identity(), ctx)
    loader = DataLoader(TensorDataset(torch.zeros(5, 2)), batch_size=2)
    try:
        return fx.evaluate(ctx, model, loader, fn, metrics=metrics)
    except fx.errors.DataError as error:
        return str(error)


@pytest.mark.parametrize("name", BAD)
def test_wrong_values_are_named(clusters, name):
    import re

    (found,) = clusters[1].run(_refused, name)
    assert re.search(BAD[name][2], found)


def _loaders(ctx):
    model, found = fx.wrap(nn.Identity(), ctx), []
    for loader in (
        DataLoader(TensorDataset(torch.zeros(5, 2)), batch_size=2, drop_last=True),
        DataLoader(TensorDataset(torch.zeros(0, 2))),
        [torch.zeros(2, 2)],
    ):
        try:
            fx.evaluate(ctx, model, loader, lambda model, batch: batch[0])
        except fx.errors.DataError as error:
            found.append(str(error))
    return found


def test_loaders_without_all_rows_are_refused(pair):
    for dropping, empty, other in pair.run(_loaders):
        assert "drop_last=False" in dropping
        assert "no batch" in empty
        assert "found list" in other


def _means(ctx):
    mean = fx.Mean()
    for value, weight in ((1.0, 1), (torch.tensor(2.0), torch.tensor(3))):
        mean = mean.update(value + ctx.rank, weight)
    mean = mean.update(fx.Weighted(torch.tensor(8.0), 4.0))
    return mean.reduce(ctx), fx.Mean().reduce(ctx)


def test_a_running_mean_is_that_of_all_ranks(cluster):
    totals = [(1 + r) + 3 * (2 + r) + 8 for r in range(cluster.n)]
    for mean, empty in cluster.run(_means):
        assert mean == pytest.approx(sum(totals) / (8 * cluster.n), rel=1e-12)
        assert empty != empty
