"""schedulefree: an optimizer that needs no schedule, and has two sets of weights.

    fxtrain launch --ranks 2 examples/recipes/schedule_free.py

Gradients are computed at one set of weights, and the other is the model: `optimizer.eval()` puts
it into the module and `optimizer.train()` takes it out again, around each evaluation and save.
Ends with one JSON line: the accuracy, and whether a resumed run ends with the same weights.
"""

import json
import tempfile

import torch
import torch.nn.functional as F
from schedulefree import AdamWScheduleFree
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

PLAN = fx.Plan(batch="global", clip_norm=1.0, seed=1)


def train(ctx: fx.DistContext, folder: str) -> tuple[dict[str, torch.Tensor], float]:
    """Two epochs, with a checkpoint after the first; from the checkpoint if there is one."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x[:1792], dtype=torch.float32) / 16, torch.tensor(y[:1792])  # 28 × 64
    data = TensorDataset(x, y)
    loader = fx.shard(DataLoader(data, batch_size=64, shuffle=True), ctx, PLAN)
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 10)
    model = fx.wrap(net, ctx, PLAN, optimizer=lambda params: AdamWScheduleFree(params, lr=3e-2))
    fns = fx.StepFns(model=model, loss=lambda model, b: F.cross_entropy(model(b[0]), b[1]))
    if resumed := fx.latest(folder) is not None:
        loader = loader.at(fx.restore(folder, ctx, model).position)
    model.optimizer.train()
    for epoch in loader.epochs(2):
        for batch in epoch:
            report = fx.step(ctx, batch, fns)
        if not resumed and report.position.epoch == 0:
            fx.save(folder, ctx, model, position=report.position)
    model.optimizer.eval()
    tests = DataLoader(data, batch_size=256)
    hits = fx.evaluate(ctx, model, tests, lambda model, b: model(b[0]).argmax(1) == b[1])
    return dict(fx.weights(model, device="cpu")), hits


def main(ctx: fx.DistContext) -> dict[str, float | bool]:
    with tempfile.TemporaryDirectory() as own:
        folder = ops.broadcast_object(own, ctx)
        weights, accuracy = train(ctx, folder)
        again, _ = train(ctx, folder)
        ops.barrier(ctx)
    return {"accuracy": accuracy, "same": all(torch.equal(weights[n], again[n]) for n in weights)}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
