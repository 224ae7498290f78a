"""transformers, encoder and decoder: a small T5 that learns to copy a number.

    fxtrain launch --ranks 2 examples/recipes/transformers_seq2seq.py

Ends with one JSON line: the loss before and after.
"""

import json
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

import fxtrain as fx
from fxtrain import ops


def main(ctx: fx.DistContext) -> dict[str, float]:
    numbers = torch.randint(2, 12, (128, 4), generator=torch.Generator().manual_seed(0))
    rows: Any = [{"input_ids": row, "labels": row} for row in numbers]
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    config = T5Config(vocab_size=12, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    plan = fx.Plan(batch="global", clip_norm=1.0, seed=1)
    torch.manual_seed(0)
    net = T5ForConditionalGeneration(config)
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(**batch).loss)
    loader = DataLoader(rows, batch_size=16, shuffle=True)
    before = fx.evaluate(ctx, model, loader, fns.loss)
    for epoch in fx.shard(loader, ctx, plan).epochs(4):
        for batch in epoch:
            fx.step(ctx, batch, fns)
    return {"before": before, "after": fx.evaluate(ctx, model, loader, fns.loss)}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
