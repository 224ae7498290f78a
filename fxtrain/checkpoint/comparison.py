"""Compare two checkpoints leaf by leaf, bit for bit."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._reading import StrPath
from fxtrain.checkpoint.folders import read_manifest
from fxtrain.checkpoint.manifest import StoredTensor
from fxtrain.checkpoint.reading import Reader, open_reader
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
    first_storage, second_storage = open_storage(left), open_storage(right)
    one, other = read_manifest(first_storage), read_manifest(second_storage)
    yield from _values("position", unstructure(one.position), unstructure(other.position))
    yield from _values("extra", one.extra, other.extra)
    yield from _values("", one.models, other.models)
    with open_reader(first_storage, one) as first, open_reader(second_storage, other) as second:
        yield from _tables("", one.tensors, other.tensors, first, second)
        if len(one.own) != len(other.own):
            yield Difference(path="ranks", left=str(len(one.own)), right=str(len(other.own)))
        for rank, (ours, theirs) in enumerate(zip(one.own, other.own, strict=False)):
            yield from _tables(f"rank {rank}: ", ours, theirs, first, second)


def count_leaves(path: StrPath) -> int:
    """Number of tensors and plain values in a checkpoint."""
    found = read_manifest(open_storage(path))
    plain = sum(1 for _ in _leaves([found.extra, found.models, unstructure(found.position)]))
    return plain + len(found.tensors) + sum(map(len, found.own))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    else:
        yield value


def _values(path: str, left: Any, right: Any) -> Iterator[Difference]:
    if isinstance(left, dict) and isinstance(right, dict):
        for key in {**left, **right}:
            inside = f"{path}.{key}" if path else str(key)
            yield from _values(inside, left.get(key, _ABSENT), right.get(key, _ABSENT))
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            yield from _values(f"{path}.{i}", a, b)
    elif type(left) is not type(right) or left != right:
        yield Difference(path=path, left=_words(left), right=_words(right))


def _tables(
    prefix: str,
    left: Mapping[str, StoredTensor],
    right: Mapping[str, StoredTensor],
    first: Reader,
    second: Reader,
) -> Iterator[Difference]:
    for name in {**left, **right}:
        a, b = left.get(name), right.get(name)
        if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
            yield Difference(path=prefix + name, left=_entry_summary(a), right=_entry_summary(b))
            continue
        one, other = first.new_entry(a, name), second.new_entry(b, name)
        found = _difference(one, other)
        if found is not None:
            yield Difference(path=prefix + name, left=found[0], right=found[1])


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
    where = f" at {first} of {one.numel()}, {count} differ"
    a, b = one.reshape(-1)[first].item(), other.reshape(-1)[first].item()
    return f"{a!r}{where}", repr(b)


def _entry_summary(entry: StoredTensor | None) -> str:
    return "nothing" if entry is None else f"{entry.dtype} {list(entry.shape)}"


def _words(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


_ABSENT = object()
