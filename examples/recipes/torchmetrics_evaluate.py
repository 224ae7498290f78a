"""torchmetrics and evaluate: their objects in `fx.evaluate`, over exactly the rows.

    fxtrain launch --ranks 2 examples/recipes/torchmetrics_evaluate.py

With a network, `evaluate.load("f1")` takes the place of the class here. Ends with one JSON line of
the metrics, which are those of one process.
"""

import json
from typing import Any

import datasets
import evaluate
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAUROC, MulticlassCalibrationError

import fxtrain as fx
from fxtrain import ops


class F1(evaluate.Metric):
    """The macro F1 of scikit-learn."""

    def _info(self) -> evaluate.MetricInfo:
        kinds = {name: datasets.Value("int64") for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description="", citation="", features=datasets.Features(kinds), inputs_description=""
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"f1": float(f1_score(references, predictions, average="macro"))}


def measures(model: fx.Wrapped, batch: fx.Batch) -> dict[str, Any]:
    """The arguments of each metric."""
    scores = model(batch[0]).softmax(1)
    return {
        "auroc": (scores, batch[1]),
        "calibration": (scores, batch[1]),
        "f1": {"predictions": scores.argmax(1), "references": batch[1]},
    }


def main(ctx: fx.DistContext) -> dict[str, Any]:
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x[:301], dtype=torch.float32) / 16, torch.tensor(y[:301]))
    torch.manual_seed(0)
    model = fx.wrap(torch.nn.Linear(64, 10), ctx)
    metrics = {
        "auroc": MulticlassAUROC(num_classes=10),
        "calibration": MulticlassCalibrationError(num_classes=10),
        "f1": F1(),
    }
    return fx.evaluate(ctx, model, DataLoader(data, batch_size=32), measures, metrics=metrics)


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
