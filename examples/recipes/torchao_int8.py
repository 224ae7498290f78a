"""torchao: train with 8-bit optimizer states, then quantize the weights to int8.

    fxtrain launch --ranks 2 examples/recipes/torchao_int8.py

To train adapters on quantized weights, see examples/qlora.py and `fx.Torchao`. Ends with one JSON
line: the accuracy after training and after quantization, and bytes per parameter of Adam's states.
"""

import json
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.optim import AdamW8bit
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import fxtrain as fx
from fxtrain import ops


def main(ctx: fx.DistContext) -> dict[str, float]:
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x[:1792], dtype=torch.float32) / 16, torch.tensor(y[:1792])  # 28 × 64
    plan = fx.Plan(batch="global", seed=1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: AdamW8bit(params, lr=3e-3))
    fns = fx.StepFns(model=model, loss=lambda model, b: F.cross_entropy(model(b[0]), b[1]))
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    for epoch in fx.shard(loader, ctx, plan).epochs(2):
        for batch in epoch:
            fx.step(ctx, batch, fns)

    weight: Any = net[0].weight
    states = model.optimizer.state[weight]
    held = sum(
        v.numel() if hasattr(v, "codes") else 4 * v.numel() for v in states.values() if v.ndim
    )
    net = fx.unwrap(model).eval()
    with torch.no_grad():
        trained = (net(x).argmax(1) == y).float().mean().item()
        quantize_(net, Int8WeightOnlyConfig())
        quantized = (net(x).argmax(1) == y).float().mean().item()
    return {"trained": trained, "quantized": quantized, "state_bytes": held / weight.numel()}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
