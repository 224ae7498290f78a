"""Two models that train each other: a generator and a discriminator, each with its own step.

    fxtrain launch --ranks 2 examples/gan.py

The generator's backward goes through the discriminator and leaves gradients there. A step begins
without them, as a raw loop does with `zero_grad()`. Ends with one JSON line that compares the
trained parameters with those of such a loop on torch alone.
"""

import json
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

Model = nn.Module | fx.Wrapped
EPOCHS, ROWS, BATCH = 20, 512, 64  # of all ranks together


def networks() -> tuple[nn.Module, nn.Module]:
    """A generator of points in the plane, and a discriminator, the same on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    return generator.double(), discriminator.double()


def data() -> TensorDataset:
    """Noise, and points on a circle."""
    draw = torch.Generator().manual_seed(1)
    angle = torch.rand(ROWS, generator=draw, dtype=torch.float64) * 2 * torch.pi
    noise = torch.randn(ROWS, 4, generator=draw, dtype=torch.float64)
    return TensorDataset(noise, torch.stack([angle.cos(), angle.sin()], dim=1))


def adam(params: Iterable[nn.Parameter]) -> torch.optim.Adam:
    return torch.optim.Adam(params, lr=1e-3, betas=(0.5, 0.9))


def d_loss(generator: Model, discriminator: Model, noise: Tensor, real: Tensor) -> Tensor:
    fake = generator(noise).detach()
    return F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()


def g_loss(generator: Model, discriminator: Model, noise: Tensor) -> Tensor:
    return F.softplus(-discriminator(generator(noise))).mean()


def raw() -> list[Tensor]:
    """The loop on torch alone, over the batches of all ranks."""
    generator, discriminator = networks()
    g_adam, d_adam = adam(generator.parameters()), adam(discriminator.parameters())
    for _ in range(EPOCHS):
        for noise, real in DataLoader(data(), batch_size=BATCH):
            d_adam.zero_grad()
            d_loss(generator, discriminator, noise, real).backward()
            d_adam.step()
            g_adam.zero_grad()
            g_loss(generator, discriminator, noise).backward()
            g_adam.step()
    return [*generator.parameters(), *discriminator.parameters()]


def main() -> None:
    with fx.detect() as ctx:
        plan = fx.Plan(batch="global")
        g_net, d_net = networks()
        generator = fx.wrap(g_net, ctx, plan, optimizer=adam)
        discriminator = fx.wrap(d_net, ctx, plan, optimizer=adam)
        d_fns = fx.StepFns(model=discriminator, loss=lambda d, batch: d_loss(generator, d, *batch))
        g_fns = fx.StepFns(model=generator, loss=lambda g, b: g_loss(g, discriminator, b[0]))
        updates = 0
        for epoch in fx.shard(DataLoader(data(), batch_size=BATCH), ctx, plan).epochs(EPOCHS):
            for batch in epoch:
                fx.step(ctx, batch, d_fns)
                updates = fx.step(ctx, batch, g_fns).updates
        ours = [*generator.parameters(), *discriminator.parameters()]
        pairs = zip(ours, raw(), strict=True)
        apart = max((a - b).detach().abs().max().item() for a, b in pairs)
        told = {"ranks": ctx.world_size, "updates": updates, "apart": apart}
        ops.say(json.dumps(told), ctx)


if __name__ == "__main__":
    main()
