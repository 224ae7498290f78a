"""Prints as JSON how many frames of fxtrain common calls enter; `benchmarks.size` runs it."""

import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx

FOLDER = str(Path(fx.__file__).parent)


def frames(run: Callable[[], object]) -> list[int]:
    """Frames of fxtrain that one call enters in this thread, their files, and stays in a file."""
    files: list[str] = []

    def profile(frame: object, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
            files.append(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [len(files), len(set(files)), len([*itertools.groupby(files)])]


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def main() -> None:
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    with fx.detect({}, device="cpu") as ctx, tempfile.TemporaryDirectory() as folder:
        plan = fx.Plan(clip_norm=1.0)

        def wrap():
            return fx.wrap(nn.Linear(64, 10), ctx, plan, optimizer=adam)

        models = [wrap()]

        def shard():
            return fx.shard(DataLoader(TensorDataset(x, y), batch_size=8), ctx, plan)

        loaders = [shard()]
        batches = iter(loaders[0])
        fns = fx.StepFns(model=models[0], loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
        batch = next(batches)
        fx.step(ctx, batch, fns)
        counts = {
            "wrap": frames(lambda: models.append(wrap())),
            "shard": frames(lambda: loaders.append(shard())),
            "step": frames(lambda: fx.step(ctx, next(batches), fns)),
            "gather": frames(lambda: fx.ops.gather(x, ctx)),
            "save": frames(
                lambda: fx.save(f"{folder}/first", ctx, models[0], position=batch.position)
            ),
            "restore": frames(lambda: fx.restore(f"{folder}/first", ctx, models[0])),
        }
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
