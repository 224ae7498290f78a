"""A log of allocated and freed storages, from which the memory of a rank is computed."""

import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxtrain.state import Memory
from fxtrain.state.dry_runs import PARTS

_SMALL = 1000  # changes below 1/1000 of the peak are invisible in a plot
_ACTIVATIONS, _OTHER = PARTS.index("activations"), PARTS.index("other")


class MemoryLog:
    """Storages by number, in the order of their first use.

    The log records only when bytes are allocated and freed. A storage is assigned to a part once
    a module, a gradient or an optimizer is found to contain it; the assignment covers its whole
    lifetime, and sums are computed at the end.

    Args:
        fakes: The mode whose tensors count like real ones. Other modes' tensors are ignored.
    """

    def __init__(self, fakes: FakeTensorMode | None = None) -> None:
        self._fakes = fakes
        self.changes: list[tuple[int, int]] = []
        self._sizes: list[int] = []
        self._parts: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._refs: dict[int, Any] = {}
        self._outside: set[int] = set()

    def see(self, tensor: Tensor) -> tuple[int, ...]:
        """The numbers of a tensor's storages; new ones are added to the log."""
        if tensor.device.type == "meta":
            return ()
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is not self._fakes:
            return ()
        return tuple(self._number(storage) for storage in _storages(tensor))

    def hold(self, part: str, tensors: Iterable[Any]) -> None:
        """Assign tensors to a part; the first assignment of a storage stays."""
        index = PARTS.index(part)
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                for number in self.see(tensor):
                    self._parts.setdefault(number, index)

    def leave_out(self, tensors: Iterable[Any]) -> None:
        """Exclude tensors that are not on the device."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._outside.update(self.see(tensor))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Log the new size of a known storage."""
        number = self._numbers.get(storage._cdata)
        if number is not None:
            self._change(number, storage.nbytes())

    def peak(self, start: int, stop: int) -> int:
        """Peak bytes between two positions in the log."""
        return max((sum(sizes) for sizes in self._moments(start, stop)), default=0)

    def most(self, start: int, stop: int) -> Memory:
        """The peak of each part between two positions in the log."""
        found = zip(*self._moments(start, stop), strict=True)
        return Memory(**dict(zip(PARTS, map(max, found), strict=True)))

    def moments(self, start: int, stop: int, *, most: int) -> tuple[Memory, ...]:
        """The peaks of at most `most` intervals between two positions in the log.

        Changes too small to be visible in a plot are ignored.
        """
        found: list[tuple[int, ...]] = []
        least = self.peak(start, stop) // _SMALL
        for sizes in self._moments(start, stop):
            if not found or abs(sum(sizes) - sum(found[-1])) > least:
                found.append(sizes)
        width = max(1, -(-len(found) // most))
        fullest = [max(found[i : i + width], key=sum) for i in range(0, len(found), width)]
        return tuple(Memory(**dict(zip(PARTS, sizes, strict=True))) for sizes in fullest)

    def _moments(self, start: int, stop: int) -> Iterator[tuple[int, ...]]:
        alive: dict[int, int] = {}
        for number, change in self._counted(0, start):
            alive[number] = alive.get(number, 0) + change
        parts = {number: _OTHER for number, size in alive.items() if size} | self._parts
        now = [0] * len(PARTS)
        for number, size in alive.items():
            if size:
                now[parts[number]] += size
        yield tuple(now)
        for number, change in self._counted(start, stop):
            now[parts.get(number, _ACTIVATIONS)] += change
            yield tuple(now)

    def _counted(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        return (entry for entry in self.changes[start:stop] if entry[0] not in self._outside)

    def _number(self, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._sizes)
            self._sizes.append(0)
            self._refs[number] = weakref.ref(storage, partial(self._gone, number, key))
            self._change(number, storage.nbytes())
        return number

    def _gone(self, number: int, key: int, _: Any) -> None:
        self._change(number, 0)
        del self._numbers[key], self._refs[number]

    def _change(self, number: int, size: int) -> None:
        if size != self._sizes[number]:
            self.changes.append((number, size - self._sizes[number]))
            self._sizes[number] = size


def _storages(tensor: Tensor) -> set[torch.UntypedStorage]:
    """The storages of a tensor, or of the tensors that it wraps at any depth."""
    if not is_traceable_wrapper_subclass(tensor):
        return {tensor.untyped_storage()}
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return set().union(*(_storages(part) for part in parts if isinstance(part, Tensor)))
