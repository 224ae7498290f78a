"""A model of which most is on disk: run it, and train adapters through it.

    fxtrain launch --ranks 2 examples/big_model.py

Writes a small frozen network, streams its layers from the file while two adapters are trained, and
maps inputs over the ranks. Ends with one JSON line; `equal` compares with the resident network.
"""

import json
import tempfile

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops


class Adapted(nn.Module):
    """Frozen layers, each with a small trained one beside it."""

    def __init__(self, frozen: nn.Module) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(requires_grad=False)
        self.adapters = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(6))
        for adapter in self.adapters:
            nn.init.zeros_(adapter.get_parameter("weight"))
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 192))
        for layer, adapter in zip(self.frozen.children(), self.adapters, strict=True):
            x = torch.relu(layer(x) + adapter(x))
        return self.head(x)


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))


def loss(model: fx.Wrapped, batch: fx.Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def main(ctx: fx.DistContext, folder: str) -> None:
    torch.manual_seed(0)
    full = build()
    fx.export(full, folder, ctx=ctx)
    with torch.device("meta"):
        empty = build()

    layers = {f"frozen.{number}": "disk" for number in range(6)}
    placement = fx.big.place(fx.big.sizes(Adapted(empty)), policy={"": "cpu", **layers})
    plan = fx.Plan(strategy=fx.Offload(placement=placement), batch="global", clip_norm=1.0)
    model = fx.wrap(
        Adapted(empty), ctx, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=5e-4)
    )
    fx.load_model(folder, model, strict=False, rename=lambda name: f"frozen.{name}")

    columns = load_digits(return_X_y=True)
    x, y = torch.tensor(columns[0][:1792]).float() / 16, torch.tensor(columns[1][:1792])
    loader = fx.shard(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True), ctx, plan)
    fns = fx.StepFns(model=model, loss=loss)
    for epoch in loader.epochs(8):
        for batch in epoch:
            fx.step(ctx, batch, fns)

    with torch.no_grad():
        found = ops.map(lambda rows: model(rows).argmax(-1), x, ctx, batch=128, order="dynamic")
        resident = Adapted(full)
        resident.adapters, resident.head = model.module.adapters, model.module.head
        equal = torch.equal(model(x[:8]), resident(x[:8]))
    accuracy = float((torch.stack(found) == y).float().mean())
    ops.say(json.dumps({"ranks": ctx.world_size, "accuracy": accuracy, "equal": equal}), ctx)


if __name__ == "__main__":
    with fx.detect() as ctx, tempfile.TemporaryDirectory() as made:
        main(ctx, ops.broadcast_object(made, ctx))
        ops.barrier(ctx)
