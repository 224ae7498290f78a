"""A model whose units stream: where their values are, and what brings them to their device."""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain._errors import CheckpointError, PlanError
from fxtrain.backends.offload.device_copies import DeviceCopies
from fxtrain.backends.offload.mapped_files import (
    MappedFile,
    Span,
    check,
    disk_waits,
    fits,
    map_file,
    mapped,
    read,
    spans_of,
)
from fxtrain.backends.offload.offload_folder import write_unit
from fxtrain.backends.offload.read_ahead import ReadAhead, start
from fxtrain.backends.offload.units import PlacedTensor, StreamedUnit
from fxtrain.precision import has_no_memory
from fxtrain.state import Location, Part
from fxtrain.state.placement.placement import DISK

__all__ = ["Streaming", "keep_for_folder", "new_streaming", "place", "set_values"]

_Read = Callable[[Part | None], Tensor]
# Parts of a unit, which threads take in order: small ones, so that what is read at the same time is
# close together, as the system's own read-ahead expects.
_PARTS = 64
_SMALLEST = 1 << 20  # bytes


@attrs.frozen(kw_only=True, eq=False)
class Streaming:
    """What a streamed model keeps beside its module. The tables in it change; see each function.

    Attributes:
        tensors: Every parameter and buffer, by its first name.
        units: Units that stream.
        users: The units of a streamed tensor, by its first name.
        folder: Where tensors on disk are written that no file contains as they are needed.
        locations: By first name, where the values of tensors on disk are.
        sources: By first name, the file from which a tensor was filled.
        digests: Of files, by path, once a checkpoint was saved.
        files: Mapped files by path.
        spans: By unit, the bytes to read for it, once they are known.
        empty: First names of tensors without values.
        waiting: By unit, values that are written to the folder once the unit is complete.
        cached: Units that were in memory when they were used last, so that no thread reads them.
        waits: What `disk_waits` said then.
        copies: What holds units on a device, where that is not the CPU.
        reader: Reads units ahead.
    """

    tensors: dict[str, PlacedTensor]
    units: tuple[StreamedUnit, ...]
    users: dict[str, tuple[int, ...]]
    folder: Path | None
    locations: dict[str, Location] = attrs.field(factory=dict)
    sources: dict[str, Path] = attrs.field(factory=dict)
    digests: dict[Path, str] = attrs.field(factory=dict)
    files: dict[Path, MappedFile] = attrs.field(factory=dict)
    spans: dict[int, tuple[Span, ...]] = attrs.field(factory=dict)
    empty: set[str] = attrs.field(factory=set)
    waiting: dict[int, dict[str, Tensor]] = attrs.field(factory=dict)
    cached: set[int] = attrs.field(factory=set)
    waits: list[int | None] = attrs.field(factory=lambda: [None])
    copies: DeviceCopies | None
    reader: ReadAhead

    def use(self, unit: int) -> None:
        """Bring a unit to its device, and begin with those that come next.

        Raises:
            CheckpointError: a file cannot be read, or was changed.
        """
        if unit not in self.spans:
            self._find_spans()
        check(self.spans[unit])
        if self.copies is not None and self.copies.has(unit):
            return
        if self.copies is not None:
            self.copies.leave()
        elif (waits := disk_waits()) != self.waits[0]:
            self.cached.clear()  # the system has taken pages back
            self.waits[0] = waits
        prepared = self.reader.use(unit)
        if self.copies is not None:
            self.copies.install(unit, prepared[0])
        elif self.waits[0] is not None and all(prepared):
            self.cached.add(unit)

    def ready(self) -> None:
        """Check before a forward that every tensor has values.

        Effects:
            Writes units to the offload folder that are not complete and will not be.

        Raises:
            CheckpointError: tensors have no values.
        """
        for unit in list(self.waiting):
            _write(self, unit)
        if self.copies is not None and not self.empty:
            self.copies.prepare()
        if len(self.spans) < len(self.units):
            self._find_spans()
        if self.empty:
            names = sorted(self.empty)
            more = f" and {len(names) - 5} more" if names[5:] else ""
            raise CheckpointError(
                f"The model was called, but {', '.join(names[:5])}{more} have no values. Fill "
                f"them with fx.load_model(folder, model)."
            )

    def _find_spans(self) -> None:
        for number, unit in enumerate(self.units):
            names = (one.names[0] for one in unit.tensors)
            places = [(name, self.locations[name]) for name in names if name in self.locations]
            self.spans[number] = spans_of(
                (name, self.files[place.path], place) for name, place in places
            )

    def close(self) -> None:
        """End the threads, and leave values where they are held."""
        self.reader.close()
        if self.copies is not None:
            self.copies.close()


def new_streaming(
    tensors: Iterable[PlacedTensor],
    units: tuple[StreamedUnit, ...],
    *,
    folder: Path | None,
    ahead: int,
    pin: bool = True,
    copy: bool | None = None,
) -> Streaming:
    """Prepare to stream units; nothing is read or moved yet.

    Args:
        ahead: Units to read ahead of the one in use.
        pin: Pin host memory, where an accelerator reads it.
        copy: Copy units to their device. By default only if that is not the CPU, which uses them
            where they are.
    """
    if copy is None:
        copy = any(unit.device.type != "cpu" for unit in units)
    copies = DeviceCopies(units=units, ahead=ahead, pin=pin) if copy else None
    spans: dict[int, tuple[Span, ...]] = {}
    cached: set[int] = set()
    table = {one.names[0]: one for one in tensors}
    users: dict[str, tuple[int, ...]] = {}
    for index, unit in enumerate(units):
        for one in unit.tensors:
            users[one.names[0]] = (*users.get(one.names[0], ()), index)
    return Streaming(
        tensors=table,
        units=units,
        users=users,
        folder=folder,
        spans=spans,
        empty={name for name, one in table.items() if has_no_memory(one.tensors[0])},
        cached=cached,
        copies=copies,
        reader=start(functools.partial(_work, spans, cached, copies), len(units), ahead),
    )


def _work(
    spans: dict[int, tuple[Span, ...]], cached: set[int], copies: DeviceCopies | None, unit: int
) -> list[Callable[[], Any]]:
    """What threads do for a unit."""
    if copies is not None:
        return [functools.partial(_read_and_copy, spans.get(unit, ()), copies, unit)]
    work: list[Callable[[], Any]] = []
    for span in () if unit in cached else spans.get(unit, ()):
        size = max(_SMALLEST, -(-(span.stop - span.start) // _PARTS))
        work += [
            functools.partial(read, span, low, min(low + size, span.stop))
            for low in range(span.start, span.stop, size)
        ]
    return work


def _read_and_copy(spans: tuple[Span, ...], copies: DeviceCopies, unit: int) -> Any:
    for span in spans:
        read(span, span.start, span.stop)
    return copies.fetch(unit)


def place(streaming: Streaming, name: str, read: _Read, location: Location | None) -> None:
    """Give a tensor its values: from where they are in a file, or as `read` gives them.

    Args:
        name: Its first name.

    Raises:
        CheckpointError: a file cannot be mapped or written.
        PlanError: values for the disk are in no file, and there is no offload folder.
    """
    one = streaming.tensors[name]
    dtype = one.tensors[0].dtype
    exact = streaming.folder is not None and streaming.copies is None
    if one.held == DISK and location is not None and fits(location, dtype, exact=exact):
        _link(streaming, one, location)
    elif one.held == DISK:
        keep_for_folder(streaming, one, read(None).to(dtype))
    else:
        held = torch.device(one.held)
        for tensor in one.tensors:
            _fill(tensor, read, held)
        if location is not None:
            streaming.sources[name] = location.path
    streaming.empty.discard(name)


def keep_for_folder(streaming: Streaming, one: PlacedTensor, value: Tensor) -> None:
    """Write a tensor to the offload folder, with the rest of its unit."""
    if streaming.folder is None:
        raise PlanError(
            f"The placement has {one.names[0]!r} on disk, and no safetensors file contains it as "
            f"{value.dtype}. Use fx.Offload(offload_folder=...), into which it is written once, or "
            f"take the model from a safetensors file: fx.Offload(source=...)."
        )
    unit = streaming.users[one.names[0]][0]
    waiting = streaming.waiting.setdefault(unit, {})
    waiting[one.names[0]] = value.data
    missing = (other.names[0] for other in streaming.units[unit].tensors)
    if all(name in waiting or name in streaming.locations for name in missing):
        _write(streaming, unit)


def _write(streaming: Streaming, unit: int) -> None:
    assert streaming.folder is not None
    values = streaming.waiting.pop(unit)
    for name, location in write_unit(streaming.folder, values).items():
        _link(streaming, streaming.tensors[name], location)


def _link(streaming: Streaming, one: PlacedTensor, location: Location) -> None:
    """Let a tensor use the bytes of a file."""
    path = location.path
    file = streaming.files.get(path) or streaming.files.setdefault(path, map_file(path))
    value = mapped(file, location)
    for tensor in one.tensors:
        set_values(tensor, value)
    streaming.locations[one.names[0]] = location
    streaming.sources[one.names[0]] = path
    for unit in streaming.users[one.names[0]]:
        streaming.spans.pop(unit, None)


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
