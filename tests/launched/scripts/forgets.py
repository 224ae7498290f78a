"""Saves and restores, and forgets what its argument names."""

import sys

import torch
from torch.utils.data import DataLoader

import fxtrain as fx


def main():
    fault = sys.argv[1]
    with fx.detect() as ctx:
        torch.manual_seed(0)
        model = fx.wrap(torch.nn.Linear(2, 1), ctx, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        data = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
        loader = fx.shard(DataLoader(data, batch_size=4, shuffle=True), ctx)
        average = torch.zeros(1, 2)
        if fx.latest("runs"):
            restored = fx.restore("runs", ctx, model, random=fault != "random")
            if fault != "loader":
                loader = loader.at(restored.position)
            if restored.extra is not None and fault != "ema":
                average = restored.extra
        noise = 1.0 if fault == "random" else 0.0

        def loss(model, batch):
            return (model(batch.data) + noise * torch.rand(1)).square().mean()

        fns = fx.StepFns(model=model, loss=loss)
        for batch in loader:
            report = fx.step(ctx, batch, fns)
            average = 0.9 * average + 0.1 * model.module.weight.detach()
            if report.position.updates % 4 == 0:
                extra = None if fault == "random" else average
                fx.save("runs", ctx, model, position=report.position, extra=extra)


if __name__ == "__main__":
    main()
