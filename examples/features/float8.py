"""Float8 training: the same digits in bf16, with float8 products, and with mxfp8 products.

    python examples/features/float8.py
    fxtrain launch --ranks 2 examples/features/float8.py

`--emulate` is the default here: values are rounded to the format and multiplied in high precision,
on any device. `--no-emulate` uses the float8 units of a GPU; those for mxfp8 need CUDA 10.0 (B200).
Only the plan differs between the three runs. Ends with one JSON line: the loss on all rows after
training, by format, and how far the others are from bf16, relative to it. Needs torchao: pip
install 'fxtrain[quant]'.
"""

import argparse
import json

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

EPOCHS = 2


def train(ctx: fx.DistContext, precision: fx.Precision) -> float:
    """Train one network, and return its loss on all rows."""
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
    plan = fx.Plan(precision=precision, batch="global", even="drop", clip_norm=1.0, seed=3)
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU(),
        torch.nn.Linear(128, 10),  # the head stays in bf16
    )  # fmt: skip
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3))
    fns = fx.StepFns(model=model, loss=lambda model, b: F.cross_entropy(model(b[0]).float(), b[1]))
    for epoch in fx.shard(DataLoader(data, batch_size=64, shuffle=True), ctx, plan).epochs(EPOCHS):
        for batch in epoch:
            fx.step(ctx, batch, fns)
    return fx.evaluate(ctx, model, DataLoader(data, batch_size=256), fns.loss)


def main(ctx: fx.DistContext, *, emulate: bool = True) -> dict[str, float]:
    recipes = {
        "rowwise": fx.Float8(scaling="rowwise", emulate=emulate, pad=True),
        "mxfp8": fx.MX(format="mxfp8", emulate=emulate, grad_weight="bf16"),
    }
    losses = {"bf16": train(ctx, fx.Precision(compute="bf16"))}
    for name, recipe in recipes.items():
        losses[name] = train(ctx, fx.Precision(compute="fp8", recipe=recipe))
    apart = {f"{name}_apart": abs(losses[name] / losses["bf16"] - 1) for name in recipes}
    return losses | apart


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--emulate", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx, emulate=options.emulate)}), ctx)
