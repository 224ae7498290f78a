"""transformers, decoder: a small Llama on text, with the mean over tokens exact, and `generate`.

    fxtrain launch --ranks 2 examples/recipes/transformers_decoder.py

The model returns the mean loss of its batch; `fx.Weighted` gives it the weight of its tokens, so
that batches and ranks with unequal lengths add up. Ends with one JSON line: the loss per token
before and after, and how many tokens were generated.
"""

import json
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import fxtrain as fx
from fxtrain import ops

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def collate(texts: list[bytes]) -> dict[str, Tensor]:
    """Bytes of (rows, time), shifted by one for padding (0), and labels without it (-100)."""
    rows = [torch.tensor(list(text)) + 1 for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": ids.masked_fill(ids == 0, -100),
    }


def loss(model: fx.Wrapped, batch: fx.Batch) -> fx.Weighted:
    """The sum over predicted tokens, and how many those are: all but the first of each row."""
    count = (batch["labels"][:, 1:] != -100).sum()
    return fx.Weighted(model(**batch).loss * count, count)


def main(ctx: fx.DistContext) -> dict[str, float]:
    texts: Any = [text.encode()[: 40 + number % 24] for number, text in enumerate(topics.values())]
    plan = fx.Plan(batch="global", accumulate=2, clip_norm=1.0)
    torch.manual_seed(0)
    net = LlamaForCausalLM(
        LlamaConfig(vocab_size=257, max_position_embeddings=128, **SIZES, **HEADS)
    )
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    fns = fx.StepFns(model=model, loss=loss)
    texts = DataLoader(texts[:64], batch_size=8, collate_fn=collate)
    before = fx.evaluate(ctx, model, texts, loss)
    for epoch in fx.shard(texts, ctx, plan).epochs(3):
        for batch in epoch:
            fx.step(ctx, batch, fns)
    after = fx.evaluate(ctx, model, texts, loss)
    with fx.gathered(model) as net, torch.no_grad():
        prompt = collate([b"The"])["input_ids"].to(ctx.device)
        answer = net.eval().generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    return {"before": before, "after": after, "generated": answer.shape[1] - prompt.shape[1]}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
