"""The program of the benchmark, with Accelerate: `train_accelerate.py FOLDER`.

It saves as often, and continues from the newest checkpoint that can be loaded.
"""

import shutil
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from benchmarks.chaos import _training as t


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("update-*"), key=lambda path: int(path.name.split("-")[1]))


def restore(accelerator: Accelerator, folder: Path) -> int:
    """Load the newest checkpoint that can be loaded; its update."""
    for path in reversed(checkpoints(folder)):
        try:
            accelerator.load_state(path)
        except Exception as error:
            print(f"{path} was not loaded: {error!r}", file=sys.stderr, flush=True)
        else:
            return int(path.name.split("-")[1])
    return 0


def main() -> None:
    folder = Path(sys.argv[1])
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=t.TIMEOUT_S))],
    )
    set_seed(7)
    notes = t.Notes(accelerator.process_index, sys.argv[1])
    model = t.make_model()
    loader = DataLoader(t.Rows(), batch_size=t.BATCH, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    update = restore(accelerator, folder)
    for epoch in range(update // len(loader), t.EPOCHS):
        loader.set_epoch(epoch)
        left = accelerator.skip_first_batches(loader, update - epoch * len(loader))
        for batch in left:
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            update += 1
            notes.update(update, batch["index"].tolist(), accelerator.unwrap_model(model))
            if not update % t.SAVE_EVERY:
                accelerator.save_state(folder / f"update-{update}")
                if accelerator.is_main_process:
                    for old in checkpoints(folder)[: -t.KEPT]:
                        shutil.rmtree(old)


main()
