"""A character-level transformer on real English: Python's own documentation strings.

    fxtrain launch --ranks 2 examples/chars.py

Losses are weighted by characters, so the last short batches count for what they hold. Ends
with one JSON line: the loss in nats per character before and after.
"""

import argparse
import json
import math
import pydoc_data.topics

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fxtrain as fx
from fxtrain import ops

console = Console(stderr=True)


class Text(Dataset[Tensor]):
    """Overlapping windows of a text as character numbers, (length + 1,) each."""

    def __init__(self, codes: Tensor, length: int) -> None:
        self.windows = codes.unfold(0, length + 1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]


class Block(nn.Module):
    """Attention over the past, then a two-layer network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, time, width = x_BTD.shape
        qkv = self.qkv(self.norm1(x_BTD)).view(batch, time, 3, self.heads, -1)
        q_BHTK, k_BHTK, v_BHTK = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class Model(nn.Module):
    """(rows, time) character numbers → (rows, time, characters) scores."""

    def __init__(self, characters: int, length: int, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(depth)])
        self.head = nn.Linear(width, characters)

    def forward(self, x_BT: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x_BT) + self.place[: x_BT.shape[1]]))


def token_loss(model: fx.Wrapped, batch: fx.Batch) -> fx.Weighted:
    """Sum of the losses of real rows' characters, and how many those are."""
    x, y = batch.data[:, :-1], batch.data[:, 1:]
    losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
    real = batch.valid.repeat_interleave(y.shape[1])
    return fx.Weighted((losses * real).sum(), real.sum())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    text = "\n".join(pydoc_data.topics.topics.values())
    alphabet = sorted(set(text))
    numbers = {char: i for i, char in enumerate(alphabet)}
    codes = torch.tensor([numbers[char] for char in text])
    with fx.detect() as ctx:
        plan = fx.Plan(
            batch="global", precision="bf16", clip_norm=1.0, seed=3, recompute=("Block",)
        )
        ops.seed(plan.seed, ctx)
        model = fx.wrap(
            Model(len(alphabet), options.length),
            ctx,
            plan,
            optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        )
        data = Text(codes, options.length)
        loader = fx.shard(DataLoader(data, batch_size=16, shuffle=True), ctx, plan)
        fns = fx.StepFns(model=model, loss=token_loss)
        quiet = not (ctx.is_main and console.is_terminal)
        first = math.nan
        recent: list[Tensor] = []
        batches, total = loader.updates(options.updates), options.updates
        for batch in track(batches, "training", total=total, console=console, disable=quiet):
            report = fx.step(ctx, batch, fns)
            recent = [*recent[-9:], report.loss]
            if report.position.updates == 1:
                first = float(ops.reduce(report.loss, ctx))
        last = float(ops.reduce(torch.stack(recent).mean(), ctx))
        ops.say(json.dumps({"ranks": ctx.world_size, "first": first, "last": last}), ctx)


if __name__ == "__main__":
    main()
