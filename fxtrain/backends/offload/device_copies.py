"""Copies of units on an accelerator, made on a stream of their own while others compute."""

import contextlib
import logging
import queue
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._host_memory import pinned_buffer
from fxtrain.backends.offload.units import StreamedUnit
from fxtrain.state.placement.placement import DISK

__all__ = ["DeviceCopies", "Fetched"]

_LOG = logging.getLogger(__name__)
_ALIGNMENT = 256  # bytes between the starts of tensors, as torch allocates them


@attrs.frozen(kw_only=True, eq=False)
class Fetched:
    """A unit on its device.

    Attributes:
        flat: The bytes of all its tensors.
        copied: Recorded when they have arrived; None where copies are not asynchronous.
    """

    flat: Tensor
    copied: Any


@attrs.frozen(kw_only=True, eq=False)
class _Layout:
    """Where tensors are in the bytes of a unit.

    Attributes:
        starts: Offset of each tensor.
        nbytes: Of the unit.
    """

    starts: tuple[int, ...]
    nbytes: int


@attrs.frozen(kw_only=True, eq=False)
class DeviceCopies:
    """Brings units to devices, and points their parameters there.

    Each copy is memory of its own, which torch's allocator uses again once nothing refers to it:
    neither a parameter nor autograd ever sees a copy that another unit overwrites.

    Attributes:
        units: All streamed units.
        ahead: Units that are copied while one is in use.
        pin: Use pinned host memory.
    """

    units: tuple[StreamedUnit, ...]
    ahead: int
    pin: bool
    _hosts: dict[int, Tensor] = attrs.field(factory=dict, init=False)
    _homes: dict[int, tuple[Tensor, ...]] = attrs.field(factory=dict, init=False)
    _layouts: dict[int, _Layout] = attrs.field(factory=dict, init=False)
    _loaded: dict[int, Fetched] = attrs.field(factory=dict, init=False)
    _active: dict[int, int] = attrs.field(factory=dict, init=False)
    _trained: set[int] = attrs.field(factory=set, init=False)
    _streams: dict[torch.device, Any] = attrs.field(factory=dict, init=False)
    _left: dict[torch.device, Any] = attrs.field(factory=dict, init=False)  # an event on each
    _refused: list[str] = attrs.field(factory=list, init=False)
    _staging: "queue.SimpleQueue[tuple[Tensor, Any]]" = attrs.field(
        factory=queue.SimpleQueue, init=False
    )

    def prepare(self) -> None:
        """Find out where values are held, and make the buffers through which disk units pass.

        Does nothing the second time.
        """
        if self._layouts:
            return
        for index, unit in enumerate(self.units):
            self._homes[index] = tuple(_dense(one.tensors[0].data) for one in unit.tensors)
            self._layouts[index] = _layout(self._homes[index])
            if unit.device not in self._streams and unit.device.type == "cuda":
                self._streams[unit.device] = torch.cuda.Stream(unit.device)
            if all(one.held != DISK for one in unit.tensors):
                self._hosts[index] = self._one_buffer(index)
        disk = [self._layouts[i].nbytes for i in range(len(self.units)) if i not in self._hosts]
        for _ in range(self.ahead + 1 if disk else 0):
            self._staging.put((self._host_buffer(max(disk)), None))

    def fetch(self, unit: int) -> Fetched:
        """Copy a unit to its device; called in a thread."""
        layout, device = self._layouts[unit], self.units[unit].device
        stream = self._streams.get(device)
        host = self._hosts.get(unit)
        buffer = None
        if host is None:
            buffer, free = self._staging.get()
            if free is not None:
                free.synchronize()
            host = buffer[: layout.nbytes]
            self._gather(unit, host)
        try:
            if left := self._left.get(device):
                # Kernels that wait to run still use the memory of the unit before. Without this,
                # the host would run ahead of them, and each copy would take memory of its own.
                left.synchronize()
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                flat = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
                flat.copy_(host, non_blocking=stream is not None)
                copied = None if stream is None else stream.record_event()
        finally:
            if buffer is not None:
                self._staging.put((buffer, None if stream is None else stream.record_event()))
        return Fetched(flat=flat, copied=copied)

    def leave(self) -> None:
        """Point the parameters of units that are not in use back to where they are held.

        Call it before the next copies begin, so that there are `ahead` + 1 copies at most.
        """
        for other in [one for one in self._loaded if not self._active.get(one)]:
            device, copied = self.units[other].device, self._loaded[other].copied
            self._release(other)
            if copied is not None:
                self._left[device] = torch.cuda.current_stream(device).record_event()

    def install(self, unit: int, fetched: Fetched) -> None:
        """Point the parameters of a unit to its copy."""
        if fetched.copied is not None:
            stream = torch.cuda.current_stream(fetched.flat.device)
            stream.wait_event(fetched.copied)
            fetched.flat.record_stream(stream)
        self._loaded[unit] = fetched
        self._point(unit, self._views(unit))
        if unit in self._trained:  # a thread may have copied it before it was changed
            for here, home in self._unit_buffers(unit):
                here.copy_(home)

    def has(self, unit: int) -> bool:
        """Whether a unit is on its device now."""
        return unit in self._loaded

    def begin(self, unit: int) -> None:
        """Keep a unit on its device until `end`."""
        self._active[unit] = self._active.get(unit, 0) + 1
        if any(part.training for part in self.units[unit].owners):
            self._trained.add(unit)

    def end(self, unit: int) -> None:
        """The unit may leave its device when another one comes.

        What training changes in a forward, such as running statistics, is written to where it is
        held: torch counts no version of what batch normalization updates.
        """
        self._active[unit] -= 1
        if unit in self._trained and unit in self._loaded and not self._active[unit]:
            for here, home in self._unit_buffers(unit):
                home.copy_(here)

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """The unit in whose copy a tensor is, and the offset of its storage's first byte there."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return None
        address = tensor.untyped_storage().data_ptr()
        for unit, fetched in self._loaded.items():
            if fetched.flat.untyped_storage().data_ptr() == address:
                return unit, int(tensor.storage_offset()) * tensor.element_size()
        return None

    def bytes_of(self, unit: int) -> Tensor:
        """The bytes of a unit that is on its device."""
        return self._loaded[unit].flat

    def close(self) -> None:
        """Point all parameters to where they are held; give up the copies."""
        for unit in list(self._loaded):
            self._release(unit)
        for stream in self._streams.values():
            stream.synchronize()  # copies that nobody waited for read the buffers
        self._hosts.clear()

    def _release(self, unit: int) -> None:
        del self._loaded[unit]
        self._point(unit, self._homes[unit])
        shared = {name for one in self.units[unit].tensors for name in one.units} - {
            self.units[unit].name
        }
        for other in self._loaded if shared else ():
            if self.units[other].name in shared:
                self._point(other, self._views(other))

    def _unit_buffers(self, unit: int) -> list[tuple[Tensor, Tensor]]:
        """The buffers of a unit that is on its device, and where each is held."""
        pairs = zip(self.units[unit].tensors, self._homes[unit], strict=True)
        return [(one.tensors[0].data, home) for one, home in pairs if one.is_buffer]

    def _point(self, unit: int, values: Sequence[Tensor]) -> None:
        for one, value in zip(self.units[unit].tensors, values, strict=True):
            for tensor in one.tensors:
                tensor.data = value

    def _views(self, unit: int) -> list[Tensor]:
        flat, layout = self._loaded[unit].flat, self._layouts[unit]
        return [
            _view(flat, start, home)
            for start, home in zip(layout.starts, self._homes[unit], strict=True)
        ]

    def _gather(self, unit: int, host: Tensor) -> None:
        for start, home in zip(self._layouts[unit].starts, self._homes[unit], strict=True):
            _view(host, start, home).copy_(home)

    def _one_buffer(self, unit: int) -> Tensor:
        """Move the tensors of a unit on the CPU into one buffer, so that one copy brings all."""
        host = self._host_buffer(self._layouts[unit].nbytes)
        self._gather(unit, host)
        layout, homes = self._layouts[unit], self._homes[unit]
        views = tuple(
            _view(host, start, home) for start, home in zip(layout.starts, homes, strict=True)
        )
        self._point(unit, views)
        self._homes[unit] = views
        return host

    def _host_buffer(self, nbytes: int) -> Tensor:
        pin = self.pin and self._streams and not self._refused
        buffer, refused = pinned_buffer(nbytes, "cuda" if pin else "cpu")
        if refused:
            self._refused.append(refused)
            _LOG.warning(
                "Offload(pin=True): %d MiB of host memory could not be pinned (%s), so units that "
                "follow are in pageable memory, from which copies are slower. Raise the limit of "
                "locked memory (ulimit -l), or pass pin=False.",
                nbytes >> 20,
                refused,
            )
        return buffer


def _layout(tensors: tuple[Tensor, ...]) -> _Layout:
    starts: list[int] = []
    stop = 0
    for tensor in tensors:
        starts.append(stop)
        stop += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    return _Layout(starts=tuple(starts), nbytes=stop)


def _dense(tensor: Tensor) -> Tensor:
    """The tensor without gaps in its memory, in its own order of dims where it has none."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor if tensor.numel() in (0, last + 1) else tensor.contiguous()


def _view(flat: Tensor, start: int, like: Tensor) -> Tensor:
    size = like.numel() * like.element_size()
    part = flat[start : start + size].view(like.dtype)
    return part.as_strided(like.shape, like.stride())
