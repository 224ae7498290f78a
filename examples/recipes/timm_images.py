"""timm: one of its networks and its augmentation, on crops of photographs.

    fxtrain launch --ranks 2 examples/recipes/timm_images.py

The photographs are the two that scikit-learn ships. The workers of the loader augment; every row
gets the same augmentation at any number of ranks and workers. Ends with one JSON line: the accuracy
of the trained weights and of their moving average.
"""

import json

import timm
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data import create_transform
from timm.optim import param_groups_weight_decay
from torch.utils.data import DataLoader, Dataset

import fxtrain as fx
from fxtrain import ops


class Crops(Dataset[tuple[torch.Tensor, int]]):
    """Crops of (3, 32, 32), and which photograph they are from."""

    def __init__(self, columns: range, *, training: bool) -> None:
        photographs = load_sample_images().images
        places = [(row, column) for row in range(0, 416, 32) for column in columns]
        self.crops = [
            (Image.fromarray(image[row : row + 32, column : column + 32]), label)
            for label, image in enumerate(photographs)
            for row, column in places
        ]
        augment = {"auto_augment": "rand-m3", "scale": (0.7, 1.0)} if training else {}
        self.transform = create_transform(32, is_training=training, **augment)

    def __len__(self) -> int:
        return len(self.crops)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.crops[index]
        return self.transform(image), label


def hits(model: fx.Wrapped, batch: fx.Batch) -> torch.Tensor:
    return model(batch[0]).argmax(1) == batch[1]


def main(ctx: fx.DistContext) -> dict[str, float]:
    train = DataLoader(Crops(range(0, 320, 32), training=True), batch_size=32, shuffle=True)
    tests = DataLoader(Crops(range(320, 640, 32), training=False), batch_size=64)
    plan = fx.Plan(batch="global", clip_norm=1.0, seed=3)
    torch.manual_seed(0)
    net = timm.create_model("test_vit", pretrained=False, num_classes=2, img_size=32)
    groups = param_groups_weight_decay(net, weight_decay=0.05)
    model = fx.wrap(net, ctx, plan, optimizer=torch.optim.AdamW(groups, lr=2e-3))
    average = fx.ema(model, decay=0.9)
    fns = fx.StepFns(
        model=model, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1)
    )
    for epoch in fx.shard(train, ctx, plan).epochs(3):
        for batch in epoch:
            average.update(fx.step(ctx, batch, fns))
    accuracy = fx.evaluate(ctx, model, tests, hits)
    with average.applied():
        averaged = fx.evaluate(ctx, model, tests, hits)
    return {"accuracy": accuracy, "averaged": averaged}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
