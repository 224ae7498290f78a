"""What a placement moves as one: units, with those that share a tensor."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fxtrain.big.unit_sizes import Sizes, UnitSize
from fxtrain.state import PlacedUnit, Placement, Room
from fxtrain.state.placement.placement import DISK, owner_of

__all__ = ["Item", "as_placement", "items_of"]


class Item(NamedTuple):
    """Units that are held in one place: one, or several with a tied tensor.

    Attributes:
        units: In the order of the model.
        bytes: Of their tensors.
        buffers: Of those, what stays where the units compute, wherever they are held.
        reads: Largest number of bytes that one of them computes with.
        working: Room for them where they compute, beside their tensors.
    """

    units: tuple[UnitSize, ...]
    bytes: int
    buffers: int
    reads: int
    working: int

    @property
    def streamed(self) -> int:
        """Bytes that are read in a forward if it is not resident."""
        return self.bytes - self.buffers

    @property
    def beside(self) -> int:
        """Bytes that it takes where it computes, if it is not resident."""
        return self.buffers + self.working


def items_of(
    units: Sequence[UnitSize], tied: Iterable[tuple[str, ...]], working: Mapping[str, int],
    *, offload_buffers: bool,
) -> list[Item]:  # fmt: skip
    """Join units that share tensors, in the order of the first of them."""
    index = {unit.name: PlacedUnit(name=unit.name, device="cpu") for unit in units} if tied else {}
    leader: dict[str, str] = {}

    def lead(name: str) -> str:
        while name in leader:
            name = leader[name]
        return name

    position = {unit.name: number for number, unit in enumerate(units)}
    for group in tied:
        leads = {lead(owner_of(index, name).name) for name in group}
        first = min(leads, key=lambda name: position[name])
        leader.update((other, first) for other in leads - {first})
    members: dict[str, list[UnitSize]] = {}
    for unit in units:
        members.setdefault(lead(unit.name), []).append(unit)
    return [
        Item(
            units=tuple(group),
            bytes=sum(unit.bytes for unit in group),
            buffers=0 if offload_buffers else sum(unit.buffers for unit in group),
            reads=max(unit.reads + (unit.buffers if offload_buffers else 0) for unit in group),
            working=sum(working.get(unit.name, 0) for unit in group),
        )
        for group in members.values()
    ]


def as_placement(
    sizes: Sizes,
    items: Sequence[Item],
    devices: Sequence[str],
    *,
    main: str,
    ahead: int,
    offload_buffers: bool,
    activations: int,
    working: Mapping[str, int],
) -> Placement:
    """The record of items, each on its device."""
    held = {
        unit.name: (unit, device)
        for item, device in zip(items, devices, strict=True)
        for unit in item.units
    }
    streams = [
        item
        for item, device in zip(items, devices, strict=True)
        if device == DISK or (device == "cpu" and main != "cpu")
    ]
    largest = max((item.reads for item in streams), default=0)
    on_disk = any(
        item.streamed and device == DISK for item, device in zip(items, devices, strict=True)
    )
    computing = dict.fromkeys([main, *(one for one in devices if one not in ("cpu", DISK))])
    shared = working.get("", 0)
    rooms = {device: activations + (shared if device == main else 0) for device in computing}
    return Placement(
        units=tuple(
            PlacedUnit(
                name=name,
                device=held[name][1],
                bytes=held[name][0].bytes,
                buffers=0 if offload_buffers else held[name][0].buffers,
                working=working.get(name, 0),
            )
            for name in _in_order(sizes, held)
        ),
        device=main,
        tied=sizes.tied,
        offload_buffers=offload_buffers,
        ahead=ahead,
        room=(1 + ahead) * largest,
        staging=(1 + ahead) * largest if on_disk and main != "cpu" else 0,
        reserved=tuple(Room(device=one, bytes=size) for one, size in rooms.items() if size),
        dtypes=sizes.dtypes,
    )


def _in_order(sizes: Sizes, held: Mapping[str, tuple[UnitSize, str]]) -> list[str]:
    """Names of units as the model has them: tied units were joined."""
    known = [unit.name for unit in sizes.units if unit.name in held]
    return known if len(known) == len(held) else list(held)
