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
from fxtrain.state.placement import DISK

_LOG = logging.getLogger(__name__)
_ALIGNMENT = 256  # bytes between the starts of tensors, as torch allocates them


@attrs.define(kw_only=True, eq=False)
class DeviceCopies:
    """Brings units to devices, and points their parameters there.

    Each copy is memory of its own, which torch's allocator uses again once nothing refers to it:
    neither a parameter nor autograd ever sees a copy that another unit overwrites.

    Attributes:
        units: All streamed units.
        prefetch: Units that are copied while one is in use.
        pin: Use pinned host memory; False once the system has refused it.
        loaded: Units that are on their devices.
        streams: On each device, the stream on which units are copied.
        left: On each device, an event after the last use of a unit that has left it.
        staging: Buffers through which units on disk pass, each with an event after its last use.
    """

    units: tuple[StreamedUnit, ...]
    prefetch: int
    pin: bool
    loaded: list[StreamedUnit] = attrs.field(factory=list, init=False)
    streams: dict[torch.device, Any] = attrs.field(factory=dict, init=False)
    left: dict[torch.device, Any] = attrs.field(factory=dict, init=False)
    staging: "queue.SimpleQueue[tuple[Tensor, Any]]" = attrs.field(
        factory=queue.SimpleQueue, init=False
    )

    def prepare(self) -> None:
        """Find out where values are held, and make the buffers through which disk units pass."""
        passing: list[int] = []
        for unit in self.units:
            unit.homes = tuple(_dense(placed.tensors[0].data) for placed in unit.tensors)
            starts: list[int] = []
            for home in unit.homes:
                starts.append(unit.nbytes)
                unit.nbytes += -(-home.numel() * home.element_size() // _ALIGNMENT) * _ALIGNMENT
            unit.starts = tuple(starts)
            if unit.device not in self.streams and unit.device.type == "cuda":
                self.streams[unit.device] = torch.cuda.Stream(unit.device)
            if any(placed.held == DISK for placed in unit.tensors):
                passing.append(unit.nbytes)
            else:  # one buffer, so that one copy brings all
                unit.host = self.host_buffer(unit.nbytes)
                unit.gather(unit.host)
                unit.homes = unit.views(unit.host)
                _point(unit, unit.homes)
        for _ in range(self.prefetch + 1 if passing else 0):
            self.staging.put((self.host_buffer(max(passing)), None))

    def fetch(self, unit: StreamedUnit) -> tuple[Tensor, Any]:
        """Copy a unit to its device; called in a thread.

        Returns:
            Its bytes there, and an event when they have arrived, as in `StreamedUnit`.
        """
        stream = self.streams.get(unit.device)
        host = unit.host
        buffer = None
        if host is None:
            buffer, free = self.staging.get()
            if free is not None:
                free.synchronize()
            host = buffer[: unit.nbytes]
            unit.gather(host)
        try:
            if left := self.left.get(unit.device):
                # Kernels that wait to run still use the memory of the unit before. Without this,
                # the host would run ahead of them, and each copy would take memory of its own.
                left.synchronize()
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                flat = torch.empty(unit.nbytes, dtype=torch.uint8, device=unit.device)
                flat.copy_(host, non_blocking=stream is not None)
                copied = None if stream is None else stream.record_event()
        finally:
            if buffer is not None:
                self.staging.put((buffer, None if stream is None else stream.record_event()))
        return flat, copied

    def leave(self) -> None:
        """Point the parameters of units that are not in use back to where they are held.

        Call it before the next copies begin, so that there are `prefetch` + 1 copies at most.
        """
        for unit in [unit for unit in self.loaded if not unit.users]:
            copied = unit.copied
            self._release(unit)
            if copied is not None:
                self.left[unit.device] = torch.cuda.current_stream(unit.device).record_event()

    def install(self, unit: StreamedUnit, flat: Tensor, copied: Any) -> None:
        """Point the parameters of a unit to its copy, as `fetch` returned it."""
        if copied is not None:
            stream = torch.cuda.current_stream(flat.device)
            stream.wait_event(copied)
            flat.record_stream(stream)
        unit.flat, unit.copied = flat, copied
        self.loaded.append(unit)
        _point(unit, unit.views(flat))
        for here, home in _buffers_of(unit):  # a thread may have copied it before it was changed
            here.copy_(home)

    def end(self, unit: StreamedUnit) -> None:
        """A module of the unit ends; without others, it may leave when another unit comes.

        What training changes in a forward, such as running statistics, is written to where it is
        held: torch counts no version of what batch normalization updates.
        """
        unit.users -= 1
        if unit.flat is not None and not unit.users and any(p.training for p in unit.owners):
            for here, home in _buffers_of(unit):
                home.copy_(here)

    def find(self, tensor: Tensor) -> tuple[StreamedUnit, int] | None:
        """The unit in whose copy a tensor is, and the offset of its storage's first byte there."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return None
        address = tensor.untyped_storage().data_ptr()
        for unit in self.loaded:
            if unit.flat is not None and unit.flat.untyped_storage().data_ptr() == address:
                return unit, int(tensor.storage_offset()) * tensor.element_size()
        return None

    def close(self) -> None:
        """Point all parameters to where they are held; give up the copies."""
        for unit in list(self.loaded):
            self._release(unit)
        for stream in self.streams.values():
            stream.synchronize()  # copies that nobody waited for read the buffers
        for unit in self.units:
            unit.host = None

    def host_buffer(self, nbytes: int) -> Tensor:
        """A buffer that an accelerator reads, pinned if the system allows it."""
        buffer, refused = pinned_buffer(nbytes, "cuda" if self.pin and self.streams else "cpu")
        if refused:
            self.pin = False
            _LOG.warning(
                "Offload(pin=True): %d MiB of host memory could not be pinned (%s), so units that "
                "follow are in pageable memory, from which copies are slower. Raise the limit of "
                "locked memory (ulimit -l), or pass pin=False.",
                nbytes >> 20,
                refused,
            )
        return buffer

    def _release(self, unit: StreamedUnit) -> None:
        self.loaded.remove(unit)
        unit.flat = unit.copied = None
        _point(unit, unit.homes)
        shared = {name for placed in unit.tensors for name in placed.units}
        for other in self.loaded if len(shared) > 1 else ():
            if other.name in shared and other.flat is not None:
                _point(other, other.views(other.flat))


def _buffers_of(unit: StreamedUnit) -> list[tuple[Tensor, Tensor]]:
    """The buffers of a unit that is on its device, and where each is held."""
    pairs = zip(unit.tensors, unit.homes, strict=True)
    return [(tensor.tensors[0].data, home) for tensor, home in pairs if tensor.is_buffer]


def _point(unit: StreamedUnit, values: Sequence[Tensor]) -> None:
    for placed, value in zip(unit.tensors, values, strict=True):
        for tensor in placed.tensors:
            tensor.data = value


def _dense(tensor: Tensor) -> Tensor:
    """The tensor without gaps in its memory, in its own order of dims where it has none."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor if tensor.numel() in (0, last + 1) else tensor.contiguous()
