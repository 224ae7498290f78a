"""What both programs of the benchmark train, and what they write down of it."""

import json
import os
import time
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

ROWS, WIDTH, BATCH = 4096, 64, 8  # rows of a rank in an update
SAVE_EVERY, KEPT = 10, 3
EPOCHS = 10**6  # it is stopped
UPDATE_S = 0.1  # what a larger model would compute on an accelerator
TIMEOUT_S = 5.0


class Rows(Dataset):
    """Rows that know their number."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": (x.sum() > 0).long(), "index": torch.tensor(index)}


def make_model() -> nn.Module:
    """The same values in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 2))


class Notes:
    """One line an update: which rows it had, and a checksum of the parameters after it."""

    def __init__(self, rank: int, run: str) -> None:
        self.rank = rank
        self.fast = Path(run).with_name("fast")  # exists where only the values count
        self.path = Path(f"notes-{rank}.jsonl")
        self.write(ready=os.getpid())

    def write(self, **values: object) -> None:
        line = json.dumps({"rank": self.rank, "time": time.time(), **values})
        with self.path.open("a") as file:
            file.write(line + "\n")

    def update(self, number: int, rows: list[int], model: nn.Module) -> None:
        crc = 0
        for parameter in model.parameters():
            crc = zlib.crc32(parameter.detach().numpy().tobytes(), crc)
        self.write(update=number, rows=rows, crc=crc)
        if not self.fast.exists():
            time.sleep(UPDATE_S)
