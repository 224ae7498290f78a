"""diffusers: a tiny UNet that learns to remove noise from handwritten digits.

    fxtrain launch --ranks 2 examples/recipes/diffusers_unet.py

Noise and time steps are those of each row, from its number and the epoch, so that the run is the
same on any number of ranks. Ends with one JSON line: the loss before and after on held-out digits,
and the shape of samples that the trained model draws with its moving average.
"""

import json
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

NOISE = DDPMScheduler(num_train_timesteps=100)


def denoise(model: fx.Wrapped, batch: fx.Batch) -> Tensor:
    """The mean squared error of each row."""
    clean, noise, time = batch
    noisy = NOISE.add_noise(clean, noise, time)
    return F.mse_loss(model(noisy, time).sample, noise, reduction="none").mean((1, 2, 3))


def rows(images: Tensor, seed: int) -> TensorDataset:
    """Images, and noise and a time step for each."""
    draw = torch.Generator().manual_seed(seed)
    noise = torch.randn(images.shape, generator=draw)
    return TensorDataset(images, noise, torch.randint(0, 100, (len(images),), generator=draw))


def main(ctx: fx.DistContext) -> dict[str, Any]:
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    train = DataLoader(rows(images[:256], 0), batch_size=32, shuffle=True)
    tests = DataLoader(rows(images[1000:1064], 1), batch_size=32)
    plan = fx.Plan(batch="global", clip_norm=1.0, seed=1)
    torch.manual_seed(0)
    channels = {"in_channels": 1, "out_channels": 1, "norm_num_groups": 4, "layers_per_block": 1}
    kinds = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    net = UNet2DModel(sample_size=8, block_out_channels=(16, 16), **channels, **kinds)
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3))
    average = fx.ema(model, decay=0.8)
    fns = fx.StepFns(model=model, loss=lambda model, batch: denoise(model, batch).mean())
    before = fx.evaluate(ctx, model, tests, denoise)
    for epoch in fx.shard(train, ctx, plan).epochs(3):
        for batch in epoch:
            average.update(fx.step(ctx, batch, fns))
    after = fx.evaluate(ctx, model, tests, denoise)
    with average.applied(), fx.gathered(model) as net, torch.no_grad():
        NOISE.set_timesteps(4)
        sample = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(2)).to(ctx.device)
        for time in NOISE.timesteps:
            sample = NOISE.step(net(sample, time).sample, time, sample).prev_sample
    return {"before": before, "after": after, "sampled": list(sample.shape)}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
