"""A small GPT that is trained in a folder, and may be left early: by break or by a signal."""

import functools
import os
import signal
import sys
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx

CHARACTERS, LENGTH, WIDTH = 32, 16, 16


class Gpt(nn.Module):
    """(rows, time) character numbers → (rows, time, characters) scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, batch_first=True)  # with dropout
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, x_BT):
        mask = nn.Transformer.generate_square_subsequent_mask(x_BT.shape[1])
        x_BTD = self.embed(x_BT) + self.place.weight[: x_BT.shape[1]]
        return self.head(self.blocks(x_BTD, mask=mask, is_causal=True))


def loss(model, batch):
    scores, codes = model(batch.data[:, :-1]), batch.data[:, 1:]
    return nn.functional.cross_entropy(scores.flatten(0, 1), codes.flatten())


def main(folder, updates, way="runs", batches="0", delay_s="0"):
    plan = fx.Plan(seed=3, accumulate=2, clip_norm=1.0)
    over = threading.Event()
    ways = {"breaks": over.set}
    for name in ("SIGKILL", "SIGTERM"):
        ways[name] = functools.partial(os.kill, os.getpid(), signal.Signals[name])
    with fx.detect(device="cpu") as ctx:
        fx.ops.seed(plan.seed, ctx)
        model = fx.wrap(Gpt(), ctx, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
        text = torch.arange(40 * LENGTH).square().remainder(CHARACTERS).view(40, LENGTH)
        loader = fx.shard(DataLoader(text, batch_size=4, shuffle=True), ctx, plan)
        fns = fx.StepFns(model=model, loss=loss)
        reports = fx.fit(
            ctx, fns, loader, folder, updates=int(updates), save_every=2, keep_last=2, log_every=1
        )
        for count, report in enumerate(reports, 1):
            print(report.position.updates, flush=True)
            if way in ways and count == int(batches):
                threading.Timer(float(delay_s), ways[way]).start()  # maybe inside a later update
            if over.is_set():
                break
        torch.save(model.module.state_dict(), f"{folder}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
