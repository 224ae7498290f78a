"""Decide what of a model is held where: a pure function of sizes and a budget."""

from collections.abc import Mapping
from typing import Literal, NoReturn

import attrs

from fxtrain._byte_units import show_bytes
from fxtrain._errors import PlanError
from fxtrain._record import closest
from fxtrain.big.budgets import Budget
from fxtrain.big.items import Item, as_placement, items_of
from fxtrain.big.prescribed import check_tied, devices_of, units_for
from fxtrain.big.searching import Demand, least_memory, least_staging, search
from fxtrain.big.speeds import Speeds
from fxtrain.big.unit_sizes import Sizes
from fxtrain.models.memory_estimates import cache_bytes
from fxtrain.state import Placement
from fxtrain.state.placement.offload import POLICIES
from fxtrain.state.placement.placement import DISK

__all__ = ["place"]

Policy = Literal["auto", "balanced", "balanced_low_0", "sequential"]


def place(
    sizes: Sizes,
    budget: Budget | None = None,
    *,
    policy: Policy | Mapping[str, str | int] = "auto",
    ahead: int | None = None,
    offload_buffers: bool = False,
    activations: int = 0,
    batch: int = 1,
    tokens: int = 0,
    speeds: Speeds | None = None,
) -> Placement:
    """Place every unit of a model: as much on the accelerators as fits, then CPU, then disk.

    The result depends only on the arguments. Among equal budgets but for more memory, no
    placement is slower by `estimate`. Resident are the units in front of the model, or the largest
    ones where more fits then, because room is kept for the largest unit that streams. Over
    several accelerators units keep their order, except that tied units are in one place.

    Args:
        sizes: What `fx.big.sizes` measured.
        budget: What `fx.big.budget` allows; needed unless `policy` is a mapping.
        policy: auto, balanced: accelerators hold about the same number of bytes;
            balanced_low_0: the first holds as little as possible; sequential: one is filled
            after another, in the order of the model. Or a mapping from names of modules or tensors
            to devices, the longest name first: `{"": "cuda:0", "layers.3": "disk"}`.
        ahead: Units to read ahead of the one in use. None is 1, or 0 where that takes less time.
        offload_buffers: Stream buffers with parameters, rather than keep them.
        activations: Bytes of every accelerator that stay free for activations.
        batch: Sequences for whose key-value cache to keep room.
        tokens: Their length; 0 keeps no room.
        speeds: Of disk and bus; those of a usual machine by default.

    Raises:
        PlanError: the model does not fit, which says what needs how much and where; or a mapping
            does not cover the model, or an argument is invalid.

    Example:
        >>> import fxtrain as fx, torch
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
        >>> found = fx.big.place(fx.big.sizes(net), fx.big.budget({"cpu": 768}))
        >>> [unit.device for unit in found.units], found.room
        (['cpu', 'disk', 'disk', 'disk'], 512)
    """
    _check(ahead=ahead, activations=activations, batch=batch, tokens=tokens)
    working = _working(sizes, batch * tokens)
    if isinstance(policy, Mapping):
        units = units_for(sizes, policy)
        held = devices_of(sizes, units, policy)
        items = items_of(units, sizes.tied, working, offload_buffers=offload_buffers)
        check_tied(items, held)
        devices = [held[item.units[0].name] for item in items]
        ahead, main = 1 if ahead is None else ahead, _main(devices)
    else:
        items = items_of(sizes.units, sizes.tied, working, offload_buffers=offload_buffers)
        demand = _demand(items, budget, policy, activations, working, speeds)
        choice = search(demand, (1, 0) if ahead is None else (ahead,))
        if choice is None:
            _refuse(sizes, demand, ahead or 0)
        devices, ahead, main = choice.devices, choice.ahead, demand.main
    placement = as_placement(
        sizes, items, devices, main=main, ahead=ahead, offload_buffers=offload_buffers,
        activations=activations, working=working,
    )  # fmt: skip
    if budget is not None and isinstance(policy, Mapping):
        _check_budget(placement, budget)
    return placement


def _check(**given: int | None) -> None:
    for name, value in given.items():
        least = 1 if name == "batch" else 0
        if value is not None and (type(value) is not int or value < least):
            raise PlanError(f"place({name}={value!r}): choose a whole number of at least {least}.")


def _main(devices: list[str]) -> str:
    """Where units compute that no device holds: the first accelerator, or the CPU."""
    return next((device for device in devices if device not in ("cpu", DISK)), "cpu")


def _demand(
    items: list[Item], budget: Budget | None, policy: str, activations: int,
    working: Mapping[str, int], speeds: Speeds | None,
) -> Demand:  # fmt: skip
    if policy not in POLICIES:
        raise PlanError(
            f"place(policy={policy!r}): choose one of {', '.join(map(repr, POLICIES))}, or a "
            f"mapping from names to devices.{closest(policy, POLICIES)}"
        )
    if budget is None:
        raise PlanError(
            f"place(policy={policy!r}): no budget. Pass fx.big.budget() to measure this machine, "
            f"or fx.big.budget({{'cuda:0': '10GiB'}})."
        )
    computing = [room.device for room in budget.accelerators] or ["cpu"]
    if computing == ["cpu"] and not budget.allowed("cpu"):
        raise PlanError(
            "place: the budget allows nothing of any device, and nothing computes on disk. Allow "
            "memory of an accelerator or of 'cpu'."
        )
    reserved = dict.fromkeys(computing, activations)
    reserved[computing[0]] += working.get("", 0)
    return Demand(
        items=tuple(items), main=computing[0], budget=budget, reserved=reserved,
        speeds=speeds or Speeds(), policy=policy,
    )  # fmt: skip


def _working(sizes: Sizes, tokens: int) -> dict[str, int]:
    """Bytes of the key-value cache by unit; those of the model as a whole under ""."""
    if not tokens:
        return {}
    if sizes.cache is None:
        raise PlanError(
            f"place(tokens=...): the shape of the key-value cache of {sizes.source} is unknown, "
            f"because it has no config. Pass activations=... with room for the cache instead."
        )
    total = round(cache_bytes(sizes.cache, max(2, sizes.itemsize), tokens))
    layers: dict[str, list[str]] = {}
    for unit in sizes.units:
        if unit.whole:
            layers.setdefault(unit.kind, []).append(unit.name)
    for names in layers.values():
        if len(names) == sizes.cache.layers:
            return dict.fromkeys(names, -(-total // len(names)))
    return {"": total}


def _check_budget(placement: Placement, budget: Budget) -> None:
    """Raise where a mapping takes more of a device than is allowed."""
    for device in placement.devices:
        allowed, needed = budget.allowed(device), placement.bytes_on(device)
        if allowed is not None and needed > allowed:
            there = [unit for unit in placement.units if unit.device == device]
            largest = max(there, key=lambda unit: unit.bytes, default=None)
            told = (
                f" The largest unit there is {largest.name!r}, {show_bytes(largest.bytes)}."
                if largest
                else ""
            )
            raise PlanError(
                f"place(policy={{...}}): the mapping needs {show_bytes(needed)} on {device}, which "
                f"allows {show_bytes(allowed)}.{told} Move units to another device, or allow more."
            )


def _refuse(sizes: Sizes, demand: Demand, ahead: int) -> NoReturn:
    """Raise for a model that fits no placement: what needs how much, and where."""
    main, room = demand.capacities[0]
    computing = [name for name, _ in demand.capacities]
    rooms = tuple(room for room in demand.budget.rooms if room.device in computing)
    if search(attrs.evolve(demand, budget=Budget(rooms=rooms)), (ahead,)) is not None:
        staging = least_staging(demand, ahead) if main != "cpu" else None
        if staging is not None:
            raise PlanError(
                f"place: {sizes.source} needs {show_bytes(sizes.bytes)}. {main} holds "
                f"{show_bytes(max(room, 0))}, and units on disk pass through the CPU, which allows "
                f"{show_bytes(demand.budget.allowed('cpu') or 0)} and needs {show_bytes(staging)} "
                f"for {1 + ahead} at a time. Allow at least {show_bytes(staging)} on 'cpu'."
            )
        tiers = [name for name in ("cpu", DISK) if demand.budget.allowed(name) is not None]
        told = ", ".join(f"{name} {show_bytes(demand.budget.allowed(name) or 0)}" for name in tiers)
        raise PlanError(
            f"place: {sizes.source} needs {show_bytes(sizes.bytes)}. {main} holds "
            f"{show_bytes(max(room, 0))}, and the rest does not fit in {told}. Allow more of "
            f"them, or leave out the limit of the disk."
        )
    largest = max(demand.items, key=lambda item: item.reads)
    unit = max(largest.units, key=lambda unit: unit.reads)
    beside = sum(item.beside for item in demand.items) + demand.reserved[main]
    needed = least_memory(demand, ahead) + demand.reserved[main]
    kind = f" ({unit.kind})" if unit.kind else ""
    raise PlanError(
        f"place: {main} allows {show_bytes(room + demand.reserved[main])}, but to compute with one "
        f"unit at a time takes {show_bytes(needed)}: the largest unit, {unit.name!r}{kind}, needs "
        f"{show_bytes(unit.reads)}, and activations, key-value cache and buffers "
        f"{show_bytes(beside)}. Allow at least {show_bytes(needed)} on {main}, reduce batch, "
        f"tokens or activations, or split larger units with fx.big.sizes(..., no_split=())."
    )
