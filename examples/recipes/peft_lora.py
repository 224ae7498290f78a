"""peft: LoRA adapters on a small Llama; only they are trained, and saved in peft's format.

    fxtrain launch --ranks 2 examples/recipes/peft_lora.py

Ends with one JSON line: the loss before and after, the trained parameters, and how far the outputs
are from those of peft's own `PeftModel.from_pretrained`.
"""

import json
import tempfile
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import fxtrain as fx
from fxtrain import ops


def base() -> LlamaForCausalLM:
    """The pretrained model, here one of random values, the same on every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=4, **sizes))


def main(ctx: fx.DistContext) -> dict[str, float]:
    rows = torch.arange(64).unsqueeze(1).add(torch.arange(8)) % 64  # each counts upwards
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    plan = fx.Plan(batch="global", clip_norm=1.0, seed=1)
    net = get_peft_model(base(), LoraConfig(r=8, target_modules="all-linear"))
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=2e-2))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(**batch).loss)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    before = fx.evaluate(ctx, model, loader, fns.loss)
    for epoch in fx.shard(loader, ctx, plan).epochs(8):
        for batch in epoch:
            fx.step(ctx, batch, fns)
    after = fx.evaluate(ctx, model, loader, fns.loss)

    apart = 0.0
    with tempfile.TemporaryDirectory() as folder, fx.gathered(model, ranks="main") as net:
        if net is not None:
            net.save_pretrained(folder)
            plain = PeftModel.from_pretrained(base(), folder).eval().to(ctx.device)
            tokens = rows[:4].to(ctx.device)
            with torch.no_grad():
                apart = (plain(tokens).logits - net.eval()(tokens).logits).abs().max().item()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    apart = ops.broadcast_object(apart, ctx)
    return {"before": before, "after": after, "trained": trained, "apart": apart}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
