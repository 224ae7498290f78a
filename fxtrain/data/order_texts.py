"""What the order of an epoch depends on, as text: ranks compare it, and positions keep it."""

import hashlib
import itertools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from fxtrain._words import canonical_text
from fxtrain.data.order import HEAD

STREAM_ROWS = 16  # the same of a stream, of which these rows are compared
_VALUES = 16  # of a floating-point tensor in a row
_DEPTH = 8  # of containers in a row


class KnownRows(Dataset[Any]):
    """A dataset that says what its rows depend on.

    Attributes:
        order_text: That, as text that is equal for equal rows.
    """

    order_text: str = ""


def text_of_units(unit: str, length: int | None, units: Iterable[Any]) -> str:
    """An order of units: how many there are, and a digest of the first of them."""
    count = "an unknown number of" if length is None else str(length)
    head = list(itertools.islice(units, HEAD))
    plain = set(map(type, head)) <= {int}  # as most are, and faster
    return f"{count} {unit}s {_digest(repr(head) if plain else _content(head, 0))}"


def text_of_dataset(dataset: Any) -> str:
    """What is known of the rows of a dataset without loading one; empty if nothing is.

    Of a `Subset`, a digest of its indices. Of a map-style dataset of Hugging Face, which has no
    indices where it is a slice of a table, a digest of its first row as it is stored.
    """
    if isinstance(dataset, KnownRows):
        return dataset.order_text
    if isinstance(dataset, Subset):
        inner = text_of_dataset(dataset.dataset)
        text = text_of_units("row", len(dataset.indices), dataset.indices)
        return f"a Subset of {text}{inner and f' of {inner}'}"
    if isinstance(dataset, ConcatDataset):
        return " and ".join(filter(None, map(text_of_dataset, dataset.datasets)))
    is_table = hasattr(dataset, "with_format") and hasattr(dataset, "__len__")  # and no stream
    if is_table and type(dataset).__module__.startswith("datasets."):
        row = dataset.with_format("arrow")[:1] if len(dataset) else None
        return f"rows from {_digest(canonical_text(row and row.to_pydict()))}"
    return ""


def chained(before: str, row: Any) -> str:
    """The text of a stream after one more row: a digest of its rows so far."""
    return f"rows {_digest(before + _content(row, 0))}"


def text_of_ranks(numbers: list[int]) -> str:
    """The text of an order that differs between ranks; empty if one of them has no number."""
    return f"rows of each rank {_digest(repr(numbers))}" if all(numbers) else ""


def _digest(text: str) -> str:
    return "#" + hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


def _content(value: Any, depth: int) -> str:
    """A row or an index as text.

    Floating-point values are rounded, since machines differ in the last bits of what they
    compute. Of objects that are no data, only the type counts.
    """
    if isinstance(value, bool | int | str | bytes | None):
        return repr(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if depth > _DEPTH:
        return "..."
    if isinstance(value, Tensor):
        return _text_of_tensor(value)
    if isinstance(value, Mapping):
        parts = [f"{_content(key, depth + 1)}: {_content(value[key], depth + 1)}" for key in value]
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, list | tuple | range):
        return f"[{', '.join(_content(item, depth + 1) for item in value)}]"
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        if value.dtype.kind == "f":
            return _text_of_tensor(torch.as_tensor(numpy.array(value, "f8"), device="cpu"))
        return canonical_text(value)
    name = type(value).__qualname__
    to_bytes = getattr(value, "tobytes", None)  # an image, for example
    return f"{name} {_digest(repr(to_bytes()))}" if callable(to_bytes) else name


def _text_of_tensor(value: Tensor) -> str:
    if not value.is_floating_point():
        return canonical_text(value)
    flat = value.detach().to_dense().reshape(-1)
    places = torch.linspace(0, max(0, len(flat) - 1), _VALUES, device="cpu").long()
    some = flat[places.to(flat.device)].tolist() if len(flat) else []
    return f"{list(value.shape)} {' '.join(f'{each:.3g}' for each in some)}"
