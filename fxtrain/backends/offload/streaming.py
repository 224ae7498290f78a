"""A model whose units stream: where their values are, and what brings them to their device."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain.backends.offload.device_copies import DeviceCopies
from fxtrain.backends.offload.mapped_files import (
    MappedFile,
    check,
    disk_waits,
    fits,
    map_file,
    mapped,
    read,
    write_tensor,
)
from fxtrain.backends.offload.units import PlacedTensor, StreamedUnit
from fxtrain.errors import CheckpointError, PlanError
from fxtrain.precision.plain_tensors import has_no_memory
from fxtrain.state import Location, TensorIndex
from fxtrain.state.placement import DISK

_Read = Callable[[TensorIndex | None], Tensor]
_THREADS = 4
# Bytes that a thread reads at once: few, so that what is read at the same time is close together,
# as the read-ahead of the system expects.
_PART = 1 << 20


@attrs.define(kw_only=True, eq=False)
class Streaming:
    """The state of a streamed model beside its module.

    Threads prepare units in the order in which they were used before. The next unit is predicted
    from the last two in use, which distinguishes forward from backward, and the first use of a unit
    from its second. A wrong prediction only costs time.

    Attributes:
        tensors: Every parameter and buffer, by its first name.
        units: Units that stream, in the order of the model.
        folder: Where tensors on disk are written that no file contains as they are needed.
        prefetch: Units to prepare while one is in use.
        copies: Copies of units on a device; None if they compute on the CPU.
        empty: First names of tensors without values.
        pool: The threads; the first begins with the first unit in use.
        following: The number of the unit that followed two others the last time.
        pending: By number of a unit, what prepares it.
        last: The numbers of the two units that were used last, in order.
        digests: Of files, by path, once a checkpoint was saved.
        files: Mapped files by path.
        waits: The value of `disk_waits` when units were last known to be in memory.
    """

    tensors: dict[str, PlacedTensor]
    units: tuple[StreamedUnit, ...]
    folder: Path | None
    prefetch: int
    copies: DeviceCopies | None
    empty: set[str]
    pool: ThreadPoolExecutor = attrs.field(
        init=False, factory=lambda: ThreadPoolExecutor(_THREADS, "fxtrain-offload")
    )
    following: dict[tuple[int, int], int] = attrs.field(factory=dict, init=False)
    pending: dict[int, list[Future[Any]]] = attrs.field(factory=dict, init=False)
    last: tuple[int, int] = attrs.field(default=(-1, -1), init=False)
    digests: dict[Path, str] = attrs.field(factory=dict, init=False)
    files: dict[Path, MappedFile] = attrs.field(factory=dict, init=False)
    waits: int | None = attrs.field(default=None, init=False)

    def use(self, unit: StreamedUnit) -> None:
        """Bring a unit to its device, and begin with those that come next.

        Raises:
            CheckpointError: a file cannot be read, or was changed.
        """
        for location, name in {place.path: (place, n) for n, place in _stored(unit)}.values():
            check(self.files[location.path], name, location.start)
        copies = self.copies
        if copies is not None:
            if unit.flat is None:
                copies.leave()
                ((flat, copied),) = self._prepared(unit.number)
                copies.install(unit, flat, copied)
            return
        if (waits := disk_waits()) != self.waits:
            for other in self.units:
                other.in_memory = False  # the system has taken pages back
            self.waits = waits
        self._prepared(unit.number)
        unit.in_memory = waits is not None

    def ready(self) -> None:
        """Check before the first forward that every tensor has values.

        Raises:
            CheckpointError: tensors have no values.
        """
        if names := sorted(self.empty):
            more = f" and {len(names) - 5} more" if names[5:] else ""
            raise CheckpointError(
                f"The model was called, but {', '.join(names[:5])}{more} have no values. Fill "
                f"them with fx.load_model(folder, model)."
            )
        if self.copies is not None:
            self.copies.prepare()

    def close(self) -> None:
        """End the threads, and leave values where they are held."""
        self.pending.clear()
        self.pool.shutdown(wait=True, cancel_futures=True)
        if self.copies is not None:
            self.copies.close()

    def _prepared(self, number: int) -> list[Any]:
        """Wait until a unit is prepared, and begin with those that come next."""
        self.following[self.last] = number
        self.last = (self.last[1], number)
        running = self.pending.pop(number, None) or self._begin(number)
        coming = list(dict.fromkeys(self._predict()))
        for stale in self.pending.keys() - coming:
            for future in self.pending.pop(stale):
                future.cancel()
        for other in coming:
            if other not in self.pending:
                self.pending[other] = self._begin(other)
        try:
            return [future.result() for future in running]
        except Exception:
            self.pending.clear()  # what failed in advance is tried again when it is needed
            raise

    def _predict(self) -> Iterator[int]:
        before, now = self.last
        for _ in range(min(self.prefetch, len(self.units) - 1)):
            step = 1 if now >= before else -1
            before, now = now, self.following.get((before, now), (now + step) % len(self.units))
            if now != self.last[1]:
                yield now

    def _begin(self, number: int) -> list[Future[Any]]:
        """Let threads read a unit, or copy it to its device."""
        unit = self.units[number]
        stored = sorted(_stored(unit), key=lambda named: (named[1].path, named[1].start))
        parts = [
            (self.files[place.path], name, low, min(low + _PART, place.start + place.nbytes))
            for name, place in (() if unit.in_memory else stored)
            for low in range(place.start, place.start + place.nbytes, _PART)
        ]
        if self.copies is not None:
            return [self.pool.submit(_read_and_copy, parts, self.copies, unit)]
        return [self.pool.submit(read, *part) for part in parts]


def _stored(unit: StreamedUnit) -> list[tuple[str, Location]]:
    """The tensors of a unit that are on disk, and where."""
    return [(held.names[0], held.location) for held in unit.tensors if held.location is not None]


def _read_and_copy(parts: Iterable[Any], copies: DeviceCopies, unit: StreamedUnit) -> Any:
    for part in parts:
        read(*part)
    return copies.fetch(unit)


def place(streaming: Streaming, name: str, read: _Read, location: Location | None) -> None:
    """Give the tensor of a first name its values: from where they are in a file, or by `read`.

    Raises:
        CheckpointError: a file cannot be mapped or written.
        PlanError: values for the disk are in no file, and there is no offload folder.
    """
    placed = streaming.tensors[name]
    dtype = placed.tensors[0].dtype
    exact = streaming.folder is not None and streaming.copies is None
    if placed.held == DISK and location is not None and fits(location, dtype, exact=exact):
        _link(streaming, placed, location)
    elif placed.held == DISK:
        keep_in_folder(streaming, placed, read(None).to(dtype))
    else:
        home = torch.device(placed.held)
        for tensor in placed.tensors:
            _fill(tensor, read, home)
        if location is not None:
            placed.source = location.path
    streaming.empty.discard(name)


def keep_in_folder(streaming: Streaming, placed: PlacedTensor, value: Tensor) -> None:
    """Write a tensor to the offload folder, and use it from there."""
    if streaming.folder is None:
        raise PlanError(
            f"The placement has {placed.names[0]!r} on disk, and no safetensors file contains it "
            f"as {value.dtype}. Use fx.Offload(offload_folder=...), into which it is written once, "
            f"or take the model from a safetensors file: fx.Offload(source=...)."
        )
    _link(streaming, placed, write_tensor(streaming.folder, placed.names[0], value.data))


def _link(streaming: Streaming, placed: PlacedTensor, location: Location) -> None:
    """Let a tensor use the bytes of a file."""
    path = location.path
    file = streaming.files.get(path) or streaming.files.setdefault(path, map_file(path))
    value = mapped(file, location)
    for tensor in placed.tensors:
        set_values(tensor, value)
    placed.location, placed.source = location, path


@torch.no_grad()
def _fill(tensor: Tensor, read: _Read, device: torch.device) -> None:
    if has_no_memory(tensor):
        set_values(tensor, torch.empty_like(tensor.data, device=device))
    tensor.copy_(read(None))


def set_values(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor other memory; it stays the same object, for ties and optimizers."""
    if not tensor.is_meta:
        tensor.data = value
        return
    fresh = value
    if isinstance(tensor, nn.Parameter):
        fresh = nn.Parameter(value, requires_grad=tensor.requires_grad)
    vars(fresh).update(vars(tensor))
    torch.utils.swap_tensors(tensor, fresh)
