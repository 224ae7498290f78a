"""Placements by hand: devices by names of modules and tensors."""

from collections.abc import Mapping

from fxtrain._errors import PlanError
from fxtrain._record import closest, few
from fxtrain.big.budgets import device_name
from fxtrain.big.items import Item
from fxtrain.big.unit_sizes import Sizes, UnitSize
from fxtrain.state import PlacedUnit
from fxtrain.state.placement.placement import owner_of

__all__ = ["check_tied", "devices_of", "units_for"]


def units_for(sizes: Sizes, names: Mapping[str, object]) -> list[UnitSize]:
    """The units of a model, and those that names inside of units cut off from them.

    Raises:
        PlanError: a name is that of no module or tensor.
    """
    known = {unit.name: unit for unit in sizes.units}
    prefixes = {""}
    for tensor in sizes.tensors:
        while tensor and tensor not in prefixes:
            prefixes.add(tensor)
            tensor = tensor.rpartition(".")[0]
    if unknown := [name for name in names if name not in prefixes]:
        raise PlanError(
            "\n".join(
                few(
                    f"place(policy={{{name!r}: ...}}): {sizes.source} has no module or tensor of "
                    f"this name.{closest(name, prefixes)}"
                    for name in unknown
                )
            )
        )
    parents = {prefix for unit in known for prefix in _above(unit)}
    finer = [name for name in names if name not in known and name not in parents]
    if not finer:
        return list(sizes.units)
    owners = {name: PlacedUnit(name=name, device="cpu") for name in (*known, *finer)}
    first = {name: group[0] for group in sizes.tied for name in group}
    found: dict[str, list[str]] = {}
    for tensor in sizes.tensors:
        found.setdefault(owner_of(owners, tensor).name, []).append(tensor)
    return [
        UnitSize(
            name=name,
            kind=known[name].kind if name in known else "",
            bytes=sum(sizes.tensors[tensor] for tensor in tensors),
            buffers=sum(sizes.tensors[one] for one in tensors if one in sizes.buffers),
            reads=sum(
                sizes.tensors[one]
                for one in {first.get(tensor, tensor) for tensor in tensors}
                if one not in sizes.buffers
            ),
        )
        for name, tensors in found.items()
    ]


def devices_of(
    sizes: Sizes, units: list[UnitSize], policy: Mapping[str, str | int]
) -> dict[str, str]:
    """The device of each unit: that of the longest name which it is under.

    Raises:
        PlanError: a unit is under none of the names, or a device is none.
    """
    devices = {name: device_name(device) for name, device in policy.items()}
    given = {name: PlacedUnit(name=name, device=device) for name, device in devices.items()}
    uncovered = [unit.name for unit in units if not any(one in given for one in _above(unit.name))]
    if uncovered:
        raise PlanError(
            f"place(policy={{...}}): the mapping does not cover these units of {sizes.source}: "
            f"{', '.join(map(repr, uncovered[:5]))}"
            f"{', ...' if len(uncovered) > 5 else ''}. Name them, or add '' for all others."
        )
    return {unit.name: owner_of(given, unit.name).device for unit in units}


def check_tied(items: list[Item], devices: Mapping[str, str]) -> None:
    """Raise where units that share a tensor are on several devices."""
    for item in items:
        places = {unit.name: devices[unit.name] for unit in item.units}
        if len(set(places.values())) > 1:
            told = ", ".join(f"{name!r} on {device}" for name, device in places.items())
            raise PlanError(
                f"place(policy={{...}}): {told}: these units share a tied tensor. Place them on "
                f"one device."
            )


def _above(name: str) -> list[str]:
    """A name and everything that it is under."""
    found = [name]
    while name:
        name = name.rpartition(".")[0]
        found.append(name)
    return found
