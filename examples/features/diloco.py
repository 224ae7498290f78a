"""DiLoCo: replicas train independently for twenty updates, then an outer optimizer moves them.

    python examples/features/diloco.py
    fxtrain launch --ranks 2 examples/features/diloco.py

For ranks with slow links: only the field `local` of the plan differs from DDP. Ends with one JSON
line: for both, the accuracy and what this rank sent while it trained, and whether the replicas
are equal at the end.
"""

import json
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops
from fxtrain.testing import count_collectives

PLANS = {
    "ddp": fx.Plan(batch="global", seed=2),
    "diloco": fx.Plan(batch="global", seed=2, local=fx.DiLoCo(every=20, outer_lr=0.7)),
}


def train(ctx: fx.DistContext, plan: fx.Plan) -> tuple[fx.Wrapped, dict[str, float]]:
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x[:1792]).float() / 16, torch.tensor(y[:1792]))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=5e-3))
    fns = fx.StepFns(model=model, loss=lambda model, b: F.cross_entropy(model(b[0]), b[1]))
    loader = fx.shard(DataLoader(data, batch_size=64, shuffle=True), ctx, plan)
    with count_collectives() as traffic:
        for epoch in loader.epochs(6):
            for batch in epoch:
                fx.step(ctx, batch, fns)
    sent = sum(call.bytes for call in traffic.calls)
    tests = DataLoader(data, batch_size=256)
    hits = fx.evaluate(ctx, model, tests, lambda model, b: model(b[0]).argmax(1) == b[1])
    return model, {"accuracy": hits, "kib_sent": sent / 1024}


def main(ctx: fx.DistContext) -> dict[str, Any]:
    _, ddp = train(ctx, PLANS["ddp"])
    model, diloco = train(ctx, PLANS["diloco"])
    total = sum(parameter.detach().double().sum() for parameter in model.parameters())
    equal = len(set(ops.gather_objects(float(total), ctx))) == 1
    return {"ddp": ddp, "diloco": diloco, "equal": equal}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
