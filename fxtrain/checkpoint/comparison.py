"""Compare two checkpoints leaf by leaf, bit for bit."""

from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._reading import StrPath
from fxtrain.checkpoint.folders import read_manifest
from fxtrain.checkpoint.manifest import Manifest, StoredTensor
from fxtrain.checkpoint.reading import open_reader
from fxtrain.checkpoint.storage import open_storage
from fxtrain.state import unstructure


@attrs.frozen(kw_only=True)
class Difference:
    """A leaf that differs between two checkpoints.

    Attributes:
        path: Path of the leaf.
        left: Its value in the first checkpoint, as text.
        right: Its value in the second.
    """

    path: str
    left: str
    right: str


def compare(left: StrPath, right: StrPath) -> Iterator[Difference]:
    """Yield every leaf in which two checkpoints differ in any bit.

    Yields differences in the position, user state, plans and plain values first, then in
    tensors, then in per-rank tensors.

    Args:
        left: A checkpoint.
        right: Another checkpoint, whose tensors may be sharded differently.

    Effects:
        Reads both, one tensor at a time. No collectives: call it on one rank.

    Raises:
        CheckpointError: a checkpoint is damaged.

    Example:
        >>> import fxtrain as fx, tempfile, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        ...     one = fx.save(tempfile.mkdtemp(), ctx, model, extra=1).result()
        ...     other = fx.save(tempfile.mkdtemp(), ctx, model, extra=2).result()
        ...     [found.path for found in fx.checkpoint.compare(one, other)]
        ['extra']
    """
    storages = open_storage(left), open_storage(right)
    one, other = map(read_manifest, storages)
    for mine, theirs in zip(_values(one), _values(other), strict=True):
        for path in {**mine, **theirs}:
            a, b = mine.get(path, _ABSENT), theirs.get(path, _ABSENT)
            if type(a) is not type(b) or a != b:
                yield Difference(path=path, left=_shown(a), right=_shown(b))
    stored, others = _tensors(one), _tensors(other)
    with open_reader(storages[0], one) as first, open_reader(storages[1], other) as second:
        for name in {**stored, **others}:
            a, b = stored.get(name), others.get(name)
            if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
                yield Difference(path=name, left=_summary(a), right=_summary(b))
            elif texts := _difference(first.new(name, a), second.new(name, b)):
                yield Difference(path=name, left=texts[0], right=texts[1])


def count_leaves(path: StrPath) -> int:
    """Number of tensors and plain values in a checkpoint."""
    manifest = read_manifest(open_storage(path))
    leaves = [leaf for part in _values(manifest) for leaf in part.values()]
    return len(_tensors(manifest)) + sum(not isinstance(leaf, dict | list) for leaf in leaves)


def _values(manifest: Manifest) -> list[dict[str, Any]]:
    """The plain values of the position, of the user and of the models, by path."""
    parts = {
        "position": unstructure(manifest.position),
        "extra": manifest.extra,
        "": manifest.models,
    }
    return [dict(_leaves(path, value)) for path, value in parts.items()]


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not value or not isinstance(value, dict | list):
        yield path, value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(f"{path}.{key}" if path else str(key), inner)


def _tensors(manifest: Manifest) -> dict[str, StoredTensor]:
    own = {
        f"rank {rank}: {name}": entry
        for rank, entries in enumerate(manifest.own)
        for name, entry in entries.items()
    }
    return {**manifest.tensors, **own}


def _difference(one: Tensor, other: Tensor) -> tuple[str, str] | None:
    """The first element whose bits differ: equal NaNs are equal, 0.0 and -0.0 are not."""
    if not one.numel():
        return None
    raw, more = (t.reshape(-1).view(torch.uint8).reshape(t.numel(), -1) for t in (one, other))
    unequal = (raw != more).any(1)
    count = int(unequal.sum())
    if not count:
        return None
    first = int(unequal.nonzero()[0])
    a, b = one.reshape(-1)[first].item(), other.reshape(-1)[first].item()
    return f"{a!r} at {first} of {one.numel()}, {count} differ", repr(b)


def _summary(entry: StoredTensor | None) -> str:
    return "nothing" if entry is None else f"{entry.dtype} {list(entry.shape)}"


def _shown(value: Any) -> str:
    text = "nothing" if value is _ABSENT else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


_ABSENT = object()
