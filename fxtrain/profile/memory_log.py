"""What a rank holds, as a log of storages made and freed."""

import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxtrain.state import PARTS, Memory

__all__ = ["MemoryLog"]

_SMALL = 1000  # a change of less than one part of so many of the most is not seen
_ACTIVATIONS, _OTHER = PARTS.index("activations"), PARTS.index("other")


class MemoryLog:
    """Storages by number, in the order of their first use.

    The log says only when bytes came and went. What they are is often known later, when a
    module, a gradient or an optimizer turns out to hold them; so each storage gets a part
    when that is seen, for its whole life, and sums are made at the end.

    Args:
        fakes: The mode whose tensors count as if they were real; those of others have shapes only.
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
        """The numbers of a tensor's storages, which are entered if they are new."""
        if tensor.device.type == "meta":
            return ()
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is not self._fakes:
            return ()
        return tuple(self._number(storage) for storage in _storages(tensor))

    def hold(self, part: str, tensors: Iterable[Any]) -> None:
        """Say what these tensors are; the first word about a storage stays."""
        place = PARTS.index(part)
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                for number in self.see(tensor):
                    self._parts.setdefault(number, place)

    def leave_out(self, tensors: Iterable[Any]) -> None:
        """Do not count these: they are not on the device."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._outside.update(self.see(tensor))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Enter that a storage which is known has another size now."""
        number = self._numbers.get(storage._cdata)
        if number is not None:
            self._change(number, storage.nbytes())

    def peak(self, start: int, stop: int) -> int:
        """Most bytes between two places in the log."""
        return max((sum(sizes) for sizes in self._moments(start, stop)), default=0)

    def most(self, start: int, stop: int) -> Memory:
        """The most of each part between two places in the log."""
        found = zip(*self._moments(start, stop), strict=True)
        return Memory(**dict(zip(PARTS, map(max, found), strict=True)))

    def moments(self, start: int, stop: int, *, most: int) -> tuple[Memory, ...]:
        """The fullest moments of so many stretches between two places in the log.

        Changes too small to be seen in a picture do not make a stretch longer.
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
    """Of a tensor, or of those that it wraps, however deep."""
    if not is_traceable_wrapper_subclass(tensor):
        return {tensor.untyped_storage()}
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return set().union(*(_storages(part) for part in parts if isinstance(part, Tensor)))
