"""Data and networks of the scripts beside this file, and their options."""

import argparse
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, default=16, help="rows in a batch of one rank")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--in-order", action="store_true", help="do not shuffle")
parser.add_argument("--folder", default="runs/coming_from", help="for checkpoints")
OPTIONS = parser.parse_args()
SHUFFLE = not OPTIONS.in_order


def sentences() -> list[dict[str, Tensor]]:
    """128 rows of 12 tokens, labelled by which of the first two is larger."""
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


def images() -> TensorDataset:
    """256 handwritten digits."""
    x, y = (torch.tensor(column[:256]) for column in load_digits(return_X_y=True))
    return TensorDataset(x.float().view(-1, 1, 8, 8) / 16, y)


def convolutions() -> nn.Module:
    """A small network for them, with the same values each time."""
    torch.manual_seed(1)
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(128, 10))


def norms(parameters: Iterable[nn.Parameter]) -> list[float]:
    """A number for each parameter, by which runs are compared."""
    return [round(parameter.detach().norm().item(), 4) for parameter in parameters]
