"""Copies of units on an accelerator, made on a stream of their own while others compute."""

import contextlib
import logging
import queue
from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

from fxtrain._host_memory import pinned_buffer
from fxtrain.backends.offload.units import StreamedUnit
from fxtrain.state.placement import DISK

_LOG = logging.getLogger(__name__)
_ALIGNMENT = 256  # bytes between the starts of tensors, as torch allocates them


class Fetched(NamedTuple):
    """A unit on its device.

    Attributes:
        flat: The bytes of all its tensors.
        copied: Recorded when they have arrived; None where copies are not asynchronous.
    """

    flat: Tensor
    copied: Any


@attrs.define(kw_only=True, eq=False)
class _Copy:
    """What is known of the copies of one unit.

    Attributes:
        homes: Where the values of its tensors are held.
        starts: Offset of each tensor in the bytes of the unit.
        nbytes: Of the unit.
        host: One buffer with all of it, if no part is on disk.
        users: How many of its modules run.
        trained: One of its modules has run in training mode.
    """

    homes: tuple[Tensor, ...]
    starts: tuple[int, ...]
    nbytes: int
    host: Tensor | None = None
    users: int = 0
    trained: bool = False

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the unit in its bytes."""
        views: list[Tensor] = []
        for start, home in zip(self.starts, self.homes, strict=True):
            part = flat[start : start + home.numel() * home.element_size()].view(home.dtype)
            views.append(part.as_strided(home.shape, home.stride()))
        return tuple(views)

    def gather(self, host: Tensor) -> None:
        """Copy the values to a buffer."""
        for view, home in zip(self.views(host), self.homes, strict=True):
            view.copy_(home)


@attrs.define(kw_only=True, eq=False)
class DeviceCopies:
    """Brings units to devices, and points their parameters there.

    Each copy is memory of its own, which torch's allocator uses again once nothing refers to it:
    neither a parameter nor autograd ever sees a copy that another unit overwrites.

    Attributes:
        units: All streamed units.
        prefetch: Units that are copied while one is in use.
        pin: Use pinned host memory; False once the system has refused it.
        copies: By unit, what is known of its copies; empty before `prepare`.
        loaded: Units that are on their devices.
        streams: On each device, the stream on which units are copied.
        left: On each device, an event after the last use of a unit that has left it.
        staging: Buffers through which units on disk pass, each with an event after its last use.
    """

    units: tuple[StreamedUnit, ...]
    prefetch: int
    pin: bool
    copies: list[_Copy] = attrs.field(factory=list, init=False)
    loaded: dict[int, Fetched] = attrs.field(factory=dict, init=False)
    streams: dict[torch.device, Any] = attrs.field(factory=dict, init=False)
    left: dict[torch.device, Any] = attrs.field(factory=dict, init=False)
    staging: "queue.SimpleQueue[tuple[Tensor, Any]]" = attrs.field(
        factory=queue.SimpleQueue, init=False
    )

    def prepare(self) -> None:
        """Find out where values are held, and make the buffers through which disk units pass.

        Does nothing the second time.
        """
        if self.copies:
            return
        passing: list[int] = []
        for number, unit in enumerate(self.units):
            homes = tuple(_dense(one.tensors[0].data) for one in unit.tensors)
            starts: list[int] = []
            nbytes = 0
            for home in homes:
                starts.append(nbytes)
                nbytes += -(-home.numel() * home.element_size() // _ALIGNMENT) * _ALIGNMENT
            copy = _Copy(homes=homes, starts=tuple(starts), nbytes=nbytes)
            self.copies.append(copy)
            if unit.device not in self.streams and unit.device.type == "cuda":
                self.streams[unit.device] = torch.cuda.Stream(unit.device)
            if any(one.held == DISK for one in unit.tensors):
                passing.append(nbytes)
            else:  # one buffer, so that one copy brings all
                copy.host = self.host_buffer(nbytes)
                copy.gather(copy.host)
                copy.homes = copy.views(copy.host)
                self._point(number, copy.homes)
        for _ in range(self.prefetch + 1 if passing else 0):
            self.staging.put((self.host_buffer(max(passing)), None))

    def fetch(self, unit: int) -> Fetched:
        """Copy a unit to its device; called in a thread."""
        copy, device = self.copies[unit], self.units[unit].device
        stream = self.streams.get(device)
        host = copy.host
        buffer = None
        if host is None:
            buffer, free = self.staging.get()
            if free is not None:
                free.synchronize()
            host = buffer[: copy.nbytes]
            copy.gather(host)
        try:
            if left := self.left.get(device):
                # Kernels that wait to run still use the memory of the unit before. Without this,
                # the host would run ahead of them, and each copy would take memory of its own.
                left.synchronize()
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                flat = torch.empty(copy.nbytes, dtype=torch.uint8, device=device)
                flat.copy_(host, non_blocking=stream is not None)
                copied = None if stream is None else stream.record_event()
        finally:
            if buffer is not None:
                self.staging.put((buffer, None if stream is None else stream.record_event()))
        return Fetched(flat=flat, copied=copied)

    def leave(self) -> None:
        """Point the parameters of units that are not in use back to where they are held.

        Call it before the next copies begin, so that there are `prefetch` + 1 copies at most.
        """
        for unit in [unit for unit in self.loaded if not self.copies[unit].users]:
            device, copied = self.units[unit].device, self.loaded[unit].copied
            self._release(unit)
            if copied is not None:
                self.left[device] = torch.cuda.current_stream(device).record_event()

    def install(self, unit: int, fetched: Fetched) -> None:
        """Point the parameters of a unit to its copy."""
        if fetched.copied is not None:
            stream = torch.cuda.current_stream(fetched.flat.device)
            stream.wait_event(fetched.copied)
            fetched.flat.record_stream(stream)
        self.loaded[unit] = fetched
        self._point(unit, self.copies[unit].views(fetched.flat))
        if self.copies[unit].trained:  # a thread may have copied it before it was changed
            for here, home in self._buffers_of(unit):
                here.copy_(home)

    def begin(self, unit: int) -> None:
        """Keep a unit on its device until `end`."""
        copy = self.copies[unit]
        copy.users += 1
        copy.trained = copy.trained or any(part.training for part in self.units[unit].owners)

    def end(self, unit: int) -> None:
        """The unit may leave its device when another one comes.

        What training changes in a forward, such as running statistics, is written to where it is
        held: torch counts no version of what batch normalization updates.
        """
        copy = self.copies[unit]
        copy.users -= 1
        if copy.trained and unit in self.loaded and not copy.users:
            for here, home in self._buffers_of(unit):
                home.copy_(here)

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """The unit in whose copy a tensor is, and the offset of its storage's first byte there."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return None
        address = tensor.untyped_storage().data_ptr()
        for unit, fetched in self.loaded.items():
            if fetched.flat.untyped_storage().data_ptr() == address:
                return unit, int(tensor.storage_offset()) * tensor.element_size()
        return None

    def close(self) -> None:
        """Point all parameters to where they are held; give up the copies."""
        for unit in list(self.loaded):
            self._release(unit)
        for stream in self.streams.values():
            stream.synchronize()  # copies that nobody waited for read the buffers
        for copy in self.copies:
            copy.host = None

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

    def _release(self, unit: int) -> None:
        del self.loaded[unit]
        self._point(unit, self.copies[unit].homes)
        shared = {name for one in self.units[unit].tensors for name in one.units}
        for other, fetched in self.loaded.items() if len(shared) > 1 else ():
            if self.units[other].name in shared:
                self._point(other, self.copies[other].views(fetched.flat))

    def _buffers_of(self, unit: int) -> list[tuple[Tensor, Tensor]]:
        """The buffers of a unit that is on its device, and where each is held."""
        pairs = zip(self.units[unit].tensors, self.copies[unit].homes, strict=True)
        return [(one.tensors[0].data, home) for one, home in pairs if one.is_buffer]

    def _point(self, unit: int, values: Sequence[Tensor]) -> None:
        for one, value in zip(self.units[unit].tensors, values, strict=True):
            for tensor in one.tensors:
                tensor.data = value


def _dense(tensor: Tensor) -> Tensor:
    """The tensor without gaps in its memory, in its own order of dims where it has none."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor if tensor.numel() in (0, last + 1) else tensor.contiguous()
