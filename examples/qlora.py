"""Adapters over a base model in four bits (QLoRA), with a LoRA layer of ten lines or with peft.

    python examples/qlora.py
    python examples/qlora.py --peft
    fxtrain launch --ranks 2 examples/qlora.py

A network learns upright digits. Its weights are then quantized to NF4 and frozen, and adapters
learn digits that lie on their side. A checkpoint holds the adapters, and digests of the base.
Ends with one JSON line from rank 0.
"""

import argparse
import json
import tempfile

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops


class LoRA(nn.Module):
    """A frozen layer, and a product of two thin matrices that is added to it."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def digits(*, turned: bool) -> TensorDataset:
    x, y = (torch.tensor(column[:1792]) for column in load_digits(return_X_y=True))
    images = x.float().view(-1, 8, 8) / 16
    return TensorDataset((images.rot90(1, (1, 2)) if turned else images).flatten(1), y)


def train(model: fx.Wrapped, ctx: fx.DistContext, data: TensorDataset, epochs: int) -> float:
    """Train, and return the accuracy over the same data."""
    fns = fx.StepFns(
        model=model, loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    )
    loader = fx.shard(DataLoader(data, batch_size=32, shuffle=True), ctx, model.plan)
    for epoch in loader.epochs(epochs):
        for batch in epoch:
            fx.step(ctx, batch, fns)
    with torch.no_grad():
        rows, labels = data.tensors
        return float((model(rows).argmax(1) == labels).float().mean())


def adapted(net: nn.Sequential, *, peft: bool) -> nn.Module:
    """The frozen network with an adapter around each quantized layer."""
    if peft:
        from peft import LoraConfig, get_peft_model

        vars(net)["is_loaded_in_4bit"] = True  # where peft looks, to merge adapters later
        return get_peft_model(net, LoraConfig(r=8, target_modules=["0", "2"]))
    for number in (0, 2):
        layer = net[number]
        assert isinstance(layer, nn.Linear)  # quantized ones are, too
        net[number] = LoRA(layer)
    return net


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peft", action="store_true")
    use_peft = parser.parse_args().peft
    torch.manual_seed(0)

    def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=3e-3)

    with fx.detect(device="cpu") as ctx, tempfile.TemporaryDirectory() as own:
        folder = ops.broadcast_object(own, ctx)
        base = fx.wrap(network(), ctx, fx.Plan(batch="global"), optimizer=adamw)
        upright = train(base, ctx, digits(turned=False), epochs=6)
        fx.export(base, folder)

        with torch.device("meta"):
            net = network().requires_grad_(requires_grad=False)
        fx.load_model(folder, net, quantize=fx.Bnb4(), ctx=ctx)
        plan = fx.Plan(quantize=fx.Bnb4(), frozen="digests", batch="global")
        model = fx.wrap(adapted(net, peft=use_peft), ctx, plan, optimizer=adamw)
        before = train(model, ctx, digits(turned=True), epochs=0)
        after = train(model, ctx, digits(turned=True), epochs=8)

        fx.save(f"{folder}/runs", ctx, model, position=fx.Position(epoch=8))
        fx.restore(f"{folder}/runs", ctx, model)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if ctx.is_main:
            told = {"upright": upright, "before": before, "after": after, "trained": trained}
            print(json.dumps({"ranks": ctx.world_size, **told}))


if __name__ == "__main__":
    main()
