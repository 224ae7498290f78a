"""A strategy of your own: DDP whose updates use the sign of the gradient (signSGD).

    python examples/features/strategy.py
    fxtrain launch --ranks 2 examples/features/strategy.py

A strategy is a record of functions, found by the type of its config; this one changes `apply` of
DDP. A package adds it to every installation by an entry point in its pyproject.toml:

    [project.entry-points."fxtrain.strategies"]
    signed = "my_package:SIGNED"

Ends with one JSON line: the loss before and after, and whether each parameter has moved by a
multiple of the learning rate, as it does under this strategy only.
"""

import json

import attrs
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops
from fxtrain.backends import strategies
from fxtrain.state import UpdateResult, UpdateSpec

LR, DDP = 2**-7, strategies()[fx.DDP]


@attrs.frozen(kw_only=True)
class Signed(fx.DDP):
    """DDP, with gradients below `threshold` in absolute value set to zero and others to ±1."""

    # A name of its own in files, which a checker takes for a wrong value of DDP's.
    kind: str = attrs.field(default="signed", init=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    threshold: float = 0.0


def apply(model: fx.Wrapped, update: UpdateSpec) -> UpdateResult:
    """DDP's update with signs; gradients are the mean over all ranks here."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            small = parameter.grad.abs() <= model.plan.strategy.threshold
            parameter.grad.sign_().masked_fill_(small, 0)
    return DDP.apply(model, update)


SIGNED = attrs.evolve(DDP, name="Signed", config=Signed, apply=apply)


def main(ctx: fx.DistContext) -> dict[str, float | bool]:
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x[:1792]).float() / 16, torch.tensor(y[:1792]))
    plan = fx.Plan(strategy=Signed(threshold=1e-6), batch="global", seed=6)
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 10)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    model = fx.wrap(
        net, ctx, plan, optimizer=lambda params: torch.optim.SGD(params, lr=LR), strategy=SIGNED
    )
    fns = fx.StepFns(model=model, loss=lambda model, b: F.cross_entropy(model(b[0]), b[1]))
    loader = fx.shard(DataLoader(data, batch_size=64, shuffle=True), ctx, plan)
    before = fx.evaluate(ctx, model, DataLoader(data, batch_size=256), fns.loss)
    for batch in loader:
        fx.step(ctx, batch, fns)
    after = fx.evaluate(ctx, model, DataLoader(data, batch_size=256), fns.loss)
    steps = torch.cat([p.detach().flatten() for p in model.parameters()]) / LR
    return {"before": before, "after": after, "whole_steps": bool((steps == steps.round()).all())}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
