"""Accumulation for language models: sequences of unequal length, and a mean over tokens.

    python examples/features/accumulate_tokens.py
    fxtrain launch --ranks 2 examples/features/accumulate_tokens.py

A mean over the tokens of each micro-batch, averaged over micro-batches and ranks, is not the mean
over all tokens, since short sequences count for too much. `fx.Weighted(total, weight)` makes it
exact. Ends with one JSON line: how far the parameters are from those of one large batch on one
process, with weights and without.
"""

import json
from collections.abc import Callable, Iterable
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import ops

WINDOW, UPDATES, PADDING = 16, 6, -100
TEXTS = [text.encode()[: 8 + 5 * n % 60] for n, text in enumerate(topics.values())]
Model = nn.Module | fx.Wrapped
TextBatch = fx.Batch[dict[str, Tensor]]
Loss = Callable[[fx.Wrapped, TextBatch], Tensor | fx.Weighted]


def collate(texts: list[bytes]) -> dict[str, Tensor]:
    """Bytes of (rows, time), padded to the longest, and the next byte of each."""
    rows = [torch.tensor(list(text)) for text in texts]
    inputs = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
    wanted = [row[1:] for row in rows]
    targets = nn.utils.rnn.pad_sequence(wanted, batch_first=True, padding_value=PADDING)
    return {"inputs": inputs, "targets": targets}


def network() -> nn.Module:
    """Guesses each byte from the one before: (rows, time) → (rows, time, 256)."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, 16), nn.Tanh(), nn.Linear(16, 256)).double()


def adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


def losses(model: Model, batch: TextBatch | dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the losses of all tokens, and how many tokens that is."""
    targets = batch["targets"]
    logits = model(batch["inputs"]).flatten(0, 1)
    total = F.cross_entropy(logits, targets.flatten(), ignore_index=PADDING, reduction="sum")
    return total, (targets != PADDING).sum()


def by_tokens(model: fx.Wrapped, batch: TextBatch) -> fx.Weighted:
    return fx.Weighted(*losses(model, batch))


def by_batches(model: fx.Wrapped, batch: TextBatch) -> Tensor:
    total, count = losses(model, batch)
    return total / count


def train(ctx: fx.DistContext, loss: Loss) -> list[Tensor]:
    """Four micro-batches of four rows of all ranks to an update."""
    plan = fx.Plan(accumulate=4, batch="global")
    model = fx.wrap(network(), ctx, plan, optimizer=adam)
    fns = fx.StepFns(model=model, loss=loss)
    data: Any = TEXTS[:WINDOW] * UPDATES  # any sequence; torch's annotation says Dataset
    for batch in fx.shard(DataLoader(data, batch_size=4, collate_fn=collate), ctx, plan):
        fx.step(ctx, batch, fns)
    return [parameter.detach() for parameter in model.parameters()]


def raw() -> list[Tensor]:
    """One process, and one batch to an update."""
    net = network()
    optimizer = adam(net.parameters())
    for _ in range(UPDATES):
        total, count = losses(net, collate(TEXTS[:WINDOW]))
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def main(ctx: fx.DistContext) -> dict[str, float]:
    def apart(loss: Loss) -> float:
        pairs = zip(train(ctx, loss), raw(), strict=True)
        return max((a.cpu() - b).abs().max().item() for a, b in pairs)

    return {"by_tokens": apart(by_tokens), "by_batches": apart(by_batches)}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
