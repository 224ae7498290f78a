"""Pretrain a small decoder, dense or with mixtures of experts, on what prepare.py wrote.

    python examples/pretrain/prepare.py --to data
    fxtrain launch --ranks 2 --config examples/pretrain/plans/fsdp.toml \
        examples/pretrain/train.py --data data --folder runs/dense

The plan files beside this script train the same model on one rank, under `FSDP`, `FSDP` with tensor
parallelism, a pipeline, and `FSDP` with expert parallelism; the script has no line about them.
Matrices are updated by Muon, the rest by AdamW. Rows are packed from two blended sources, and
documents do not attend to each other. Experts are balanced by a bias and a small loss. Started
again, a run resumes in `--folder`; `fxtrain report runs/dense` shows loss, tokens/s, MFU and
memory. Ends with one JSON line: the loss per token, the held-out loss, what the model writes after
"def ", and the load of the busiest expert, over the mean.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from model import CHOSEN, SIZES, decoder, router_logits
from tokenizers import Tokenizer
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import fxtrain as fx
from fxtrain import ops
from fxtrain.backends import Params


def optimizers(params: Params, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers; AdamW for embeddings, head, router, experts, norms."""
    others = ("embed_tokens", "lm_head", "router")
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in params.named():
        hidden = parameter.ndim == 2 and name.split(".")[-2] not in others
        (matrices if hidden else rest).append(parameter)
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)]


def schedulers(optimizers: list[torch.optim.Optimizer], updates: int) -> list[LambdaLR]:
    """Warm-up over a twentieth of the run, constant, and decay to a tenth over the last fifth."""

    def rate(update: int) -> float:
        left = 5 * (updates - update) / updates
        return min(1.0, 20 * (update + 1) / updates, 0.1 + 0.9 * left)

    return [LambdaLR(optimizer, rate) for optimizer in optimizers]


def token_losses(model: fx.Wrapped, batch: fx.Batch[Any]) -> Tensor:
    """(rows, length) losses, 0 where there is no label."""
    # Positions restart with every document: transformers makes the mask of attention from them.
    out = model(input_ids=batch["tokens"], position_ids=batch["positions"], use_cache=False)
    losses = F.cross_entropy(
        out.logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="none"
    )
    return losses.view_as(batch["labels"])


def loss(model: fx.Wrapped, batch: fx.Batch[Any]) -> fx.Weighted:
    """The sum over real tokens, and how many those are; with experts, also their balance."""
    kept = batch["labels"] != -100
    with router_logits(model.module) as logits:
        total, count = token_losses(model, batch).sum(), kept.sum()
    if logits:
        balance = fx.experts.balance_loss(logits, model, top_k=CHOSEN, mask=kept)
        total = total + 1e-2 * balance * count
    return fx.Weighted(total, count)


def held_out_loss(model: fx.Wrapped, batch: fx.Batch[Any]) -> dict[str, Tensor]:
    """The mean loss of each row."""
    counts = (batch["labels"] != -100).sum(1).clamp(min=1)
    return {"held_out": token_losses(model, batch).sum(1) / counts}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--folder", default="runs/pretrain")
    parser.add_argument("--model", choices=["dense", "moe"], default="dense")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="rows of all ranks")
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def main(ctx: fx.DistContext, options: argparse.Namespace) -> dict[str, Any]:
    source = {
        name: fx.data.MegatronTokens(path=str(options.data / name))
        for name in ("docs", "code", "docs_held_out", "code_held_out")
    }
    # The share of code grows over the first half of the run.
    code = ((0, 0.3), (options.updates // 2 + 1, 0.6))
    parts = (
        fx.data.BlendPart(name="docs", source=source["docs"], weight=0.5),
        fx.data.BlendPart(name="code", source=source["code"], weight=code),
    )
    rows = partial(fx.tokens, ctx=ctx, length=options.length, batch_size=options.batch)
    loader = rows(fx.data.Blend(parts=parts), packing=fx.data.BestFit())
    unseen = rows(source["code_held_out"], packing=fx.data.BestFit(), shuffle=False)

    tokenizer = Tokenizer.from_file(str(options.data / "tokenizer.json"))
    with torch.device("meta"):  # `fx.wrap` makes the values, of each rank's shard only
        net = decoder(options.model, options.size, tokenizer.get_vocab_size(), options.length)
    update_biases = None
    if options.model == "moe":
        update_biases = fx.experts.balance_bias(net, bias="bias", rate=1e-2)
    model = fx.wrap(
        net,
        ctx,
        optimizer=partial(optimizers, lr=options.lr),
        scheduler=partial(schedulers, updates=options.updates),
    )
    reports = fx.fit(
        ctx,
        fx.StepFns(model=model, loss=loss),
        loader,
        options.folder,
        updates=options.updates,
        save_every=max(1, options.updates // 4),
        keep_last=2,
        evaluate=lambda: fx.evaluate(ctx, model, unseen, held_out_loss),
        evaluate_every=max(1, options.updates // 4),
        settings={name: str(value) for name, value in vars(options).items()},
    )
    losses: list[Tensor] = []
    loads: dict[str, Tensor] = {}
    for report in reports:
        losses.append(report.loss)
        if update_biases and report.applied:
            loads = update_biases(model)
    prompt = torch.tensor([tokenizer.encode("def ").ids], device=ctx.device)
    with torch.no_grad():
        written = model.generate(input_ids=prompt, max_new_tokens=24, do_sample=False)
    busiest = [float(load.max() / load.float().mean()) for load in loads.values()]
    return {
        "loss": float(ops.reduce(torch.stack(losses[-5:]).mean(), ctx)) if losses else None,
        "held_out": fx.evaluate(ctx, model, unseen, held_out_loss)["held_out"],
        "text": tokenizer.decode(written[0].tolist()),
        "busiest": max(busiest, default=None),
    }


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx, read_options())}), ctx)
