"""DeepSpeed from a config of its own: ZeRO-2 with an optimizer and a scheduler that JSON names.

    python examples/features/deepspeed_config.py
    fxtrain launch --ranks 2 examples/features/deepspeed_config.py

`"auto"` takes its value from the plan. The loop is that of every other strategy. Needs
`pip install 'fxtrain[deepspeed]'`. Ends with one JSON line: the losses of DeepSpeed and of plain
DDP with the same settings, and the entries that "auto" became.
"""

import json
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops
from fxtrain.backends import Params

CONFIG = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-2, "weight_decay": 0.0, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupLR",  # from 0.01 to 0.01, so that DDP needs none
        "params": {"warmup_min_lr": 1e-2, "warmup_max_lr": 1e-2},
    },
}


def adamw(params: Params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0)


def train(
    ctx: fx.DistContext, plan: fx.Plan, optimizer: Any, scheduler: Any = None
) -> tuple[fx.Wrapped, float]:
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x[:512]).float() / 16, torch.tensor(y[:512]))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = fx.wrap(net, ctx, plan, optimizer=optimizer, scheduler=scheduler)
    fns = fx.StepFns(model=model, loss=lambda model, b: F.cross_entropy(model(b[0]), b[1]))
    for epoch in fx.shard(DataLoader(data, batch_size=32), ctx, plan).epochs(2):
        for batch in epoch:
            fx.step(ctx, batch, fns)
    return model, fx.evaluate(ctx, model, DataLoader(data, batch_size=256), fns.loss)


def main(ctx: fx.DistContext) -> dict[str, Any]:
    plan = fx.Plan(accumulate=2, clip_norm=1.0, batch="global")
    deepspeed = attrs.evolve(plan, strategy=fx.DeepSpeed(config=CONFIG))
    model, loss = train(ctx, deepspeed, optimizer=fx.from_config, scheduler=fx.from_config)
    _, ddp = train(ctx, plan, optimizer=adamw)
    values = model.strategy_state.values
    auto = {name: values[name] for name, value in CONFIG.items() if value == "auto"}
    return {"deepspeed": loss, "ddp": ddp, **auto}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
