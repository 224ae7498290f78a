"""Save in the middle of an epoch, and resume under the same plan and under another strategy.

    python examples/features/resume_anywhere.py
    fxtrain launch --ranks 2 examples/features/resume_anywhere.py

A run is saved after its seventh update, and resumed by new objects: under the same plan, where
the result is equal in every bit, and under FSDP. A checkpoint also resumes at any other world size:
`examples/resume.py` can be started again on another number of ranks. Ends with one JSON line:
whether the first is equal, how far the second is from the run that never stopped, and its loss.
"""

import json
import tempfile
from typing import TypedDict

import attrs
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

STOP = 7


class Trained(TypedDict):
    loss: float
    weights: dict[str, Tensor]


PLAN = fx.Plan(strategy=fx.DDP(), batch="global", clip_norm=1.0, seed=5)


def objects(ctx: fx.DistContext, plan: fx.Plan) -> tuple[fx.StepFns, fx.Sharded]:
    """New objects, as a new process would make them."""
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x[:512]) / 16, torch.tensor(y[:512]))
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    model = fx.wrap(
        net,
        ctx,
        plan,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5),
    )
    fns = fx.StepFns(model=model, loss=lambda model, b: F.cross_entropy(model(b[0]), b[1]))
    return fns, fx.shard(DataLoader(data, batch_size=32, shuffle=True), ctx, plan)


def train(ctx: fx.DistContext, fns: fx.StepFns, loader: fx.Sharded, folder: str = "") -> Trained:
    """Two epochs, from the loader's position on; saves on the way if there is a folder."""
    for epoch in loader.epochs(2):
        for batch in epoch:
            report = fx.step(ctx, batch, fns)
            if folder and report.position.updates == STOP:
                fx.save(folder, ctx, fns.model, position=report.position)
    loss = fx.evaluate(ctx, fns.model, loader.at(fx.Position()), fns.loss)
    return {"loss": loss, "weights": dict(fx.weights(fns.model, device="cpu"))}


def resumed(ctx: fx.DistContext, plan: fx.Plan, folder: str) -> Trained:
    """Continue from the checkpoint with new objects."""
    fns, loader = objects(ctx, plan)
    restored = fx.restore(folder, ctx, fns.model)
    return train(ctx, fns, loader.at(restored.position))


def apart(one: Trained, other: Trained) -> float:
    return max(
        (one["weights"][name] - w).abs().max().item() for name, w in other["weights"].items()
    )


def main(ctx: fx.DistContext) -> dict[str, float | bool]:
    with tempfile.TemporaryDirectory() as own:
        folder = ops.broadcast_object(own, ctx)
        ops.seed(PLAN.seed, ctx)
        whole = train(ctx, *objects(ctx, PLAN), folder)
        again = resumed(ctx, PLAN, folder)
        sharded = resumed(ctx, attrs.evolve(PLAN, strategy=fx.FSDP()), folder)
        ops.barrier(ctx)
    equal = all(torch.equal(whole["weights"][name], w) for name, w in again["weights"].items())
    return {"equal": equal, "fsdp_apart": apart(whole, sharded), "loss": whole["loss"]}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
