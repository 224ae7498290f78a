"""Decide where each unit of a model is held: a pure function of sizes and a budget."""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, NoReturn

import attrs

from fxtrain._display import show_bytes
from fxtrain._record import closest, few
from fxtrain.big.budgets import Budget, device_name
from fxtrain.big.estimating import Speeds
from fxtrain.big.measuring import Sizes
from fxtrain.errors import PlanError
from fxtrain.models.memory_estimates import cache_bytes, layer_of
from fxtrain.state import Placement, Room, Unit
from fxtrain.state.placement import DISK, POLICIES, names_above, owner_of

Policy = Literal["auto", "balanced", "balanced_low_0", "sequential"]
_Group = list[Unit]  # units that share a tensor, so that one device holds all of them


def place(
    sizes: Sizes,
    budget: Budget | None = None,
    *,
    policy: Policy | Mapping[str, str | int] = "auto",
    prefetch: int | None = None,
    offload_buffers: bool = False,
    activations: int = 0,
    batch: int = 1,
    tokens: int = 0,
    speeds: Speeds | None = None,
) -> Placement:
    """Place every unit of a model: as much on the accelerators as fits, then CPU, then disk.

    The result depends only on the arguments. More memory in a
    budget never gives a placement that is slower by `estimate`. The units in front of the model are
    resident, or the largest ones if more fits that way, because room is kept for the largest unit
    that streams. Over several accelerators units keep their order, except that tied units are in
    one place.

    Args:
        sizes: What `fx.big.sizes` measured.
        budget: What `fx.big.budget` allows; needed unless `policy` is a mapping.
        policy: auto, balanced: accelerators hold about the same number of bytes;
            balanced_low_0: the first holds as little as possible; sequential: one is filled
            after another, in the order of the model. Or a mapping from names of modules or tensors
            to devices, the longest name first: `{"": "cuda:0", "layers.3": "disk"}`.
        prefetch: Units to read ahead of the one in use. None is 1, or 0 where that takes less time.
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
        >>> placement = fx.big.place(fx.big.sizes(net), fx.big.budget({"cpu": 768}))
        >>> [unit.device for unit in placement.units], placement.room
        (['cpu', 'disk', 'disk', 'disk'], 512)
    """
    for name, value in {
        "prefetch": prefetch, "activations": activations, "batch": batch, "tokens": tokens
    }.items():  # fmt: skip
        least = 1 if name == "batch" else 0
        if value is not None and (type(value) is not int or value < least):
            raise PlanError(f"place({name}={value!r}): choose a whole number of at least {least}.")
    cache = _cache_of_units(sizes, batch * tokens)
    by_name = isinstance(policy, Mapping)
    units = [
        attrs.evolve(
            unit,
            buffers=0 if offload_buffers else unit.buffers,
            reads=unit.reads + (unit.buffers if offload_buffers else 0),
            working=cache.get(unit.name, 0),
        )
        if offload_buffers or cache
        else unit
        for unit in (_units_of_mapping(sizes, policy) if by_name else sizes.units)
    ]
    groups = _tied_groups(units, sizes.tied)
    if by_name:
        devices = _devices_of_mapping(sizes, units, policy)
        prefetch = 1 if prefetch is None else prefetch
        main = next((name for name in devices.values() if name not in ("cpu", DISK)), "cpu")
        _check_tied(groups, devices)
    else:
        limits = _limits(budget, policy, activations, cache.get("", 0))
        main = limits.devices[0]
        counts = (1, 0) if prefetch is None else (prefetch,)
        orders = [order for count in counts for order in _orders(groups, policy, count)]
        choices = [choice for order in orders if (choice := _choose(order, limits, policy, speeds))]
        if not choices:
            _refuse(sizes, groups, _orders(groups, policy, prefetch or 0), limits, policy)
        _, prefetch, numbered = min(choices, key=lambda choice: choice[0])  # the first of equals
        devices = {unit.name: numbered[n] for n, group in enumerate(groups) for unit in group}
    streaming = [
        unit for unit in units if devices[unit.name] == DISK or devices[unit.name] == "cpu" != main
    ]
    room = (1 + prefetch) * max((unit.reads for unit in streaming), default=0)
    on_disk = any(devices[unit.name] == DISK and unit.bytes > unit.buffers for unit in streaming)
    computing = dict.fromkeys([main, *(n for n in devices.values() if n not in ("cpu", DISK))])
    reserved = {name: activations + (cache.get("", 0) if name == main else 0) for name in computing}
    placement = Placement(
        units=tuple(attrs.evolve(unit, device=devices[unit.name]) for unit in units),
        device=main,
        tied=sizes.tied,
        offload_buffers=offload_buffers,
        prefetch=prefetch,
        room=room,
        staging=room if on_disk and main != "cpu" else 0,
        reserved=tuple(Room(device=name, bytes=size) for name, size in reserved.items() if size),
        dtypes=sizes.dtypes,
    )
    if by_name and budget is not None:
        _check_budget(placement, budget)
    return placement


def _cache_of_units(sizes: Sizes, tokens: int) -> dict[str, int]:
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
        if layer_of(f"{unit.name}.weight") == unit.name:
            layers.setdefault(unit.kind, []).append(unit.name)
    for names in layers.values():
        if len(names) == sizes.cache.layers:
            return dict.fromkeys(names, -(-total // len(names)))
    return {"": total}


def _tied_groups(units: Sequence[Unit], tied: Iterable[tuple[str, ...]]) -> list[_Group]:
    """Units, with those that share a tensor in one group, in the order of the first of them."""
    index = {unit.name: unit for unit in units}
    group_of = {unit.name: [unit] for unit in units}
    for tensors in tied:
        first, *others = dict.fromkeys(owner_of(index, tensor).name for tensor in tensors)
        joined = group_of[first]
        for other in others:
            if group_of[other] is not joined:
                joined += group_of[other]
                group_of.update((unit.name, joined) for unit in group_of[other])
    return list({id(group): group for group in group_of.values()}.values())


class _Limits(NamedTuple):
    """The devices of a budget, and their room for units.

    Attributes:
        devices: The accelerators, or the CPU where there are none; units stream to the first.
        sizes: Bytes of each for units.
        reserved: Bytes of the first for something else.
        cpu: Bytes beside accelerators; None holds nothing, and lets any unit pass through.
        disk: Bytes; None is any number.
    """

    devices: list[str]
    sizes: list[int]
    reserved: int
    cpu: int | None
    disk: int | None


def _limits(budget: Budget | None, policy: str, activations: int, shared: int) -> _Limits:
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
    rooms = {room.device: room.bytes for room in budget.accelerators}
    cpu = budget.allowed("cpu")
    if not rooms:
        if not cpu:
            raise PlanError(
                "place: the budget allows nothing of any device, and nothing computes on disk. "
                "Allow memory of an accelerator or of 'cpu'."
            )
        rooms, cpu = {"cpu": cpu}, None
    sizes = [size - activations for size in rooms.values()]
    sizes[0] -= shared
    return _Limits(list(rooms), sizes, activations + shared, cpu, budget.allowed(DISK))


class _Order(NamedTuple):
    """Groups in the order in which they become resident, with sums over those in front or behind.

    Attributes:
        numbers: Of the groups, in this order.
        total: Bytes of each group, with its room for a key-value cache.
        prefetch: Units to read ahead.
        still: How many in front stream nothing, so that they are resident anyway.
        resident: By how many are resident: the bytes that those take.
        streamed: Bytes of the groups in front, if they stream.
        passing: Room in which the others stream.
        beside: What the others take where they compute, beside that room.
    """

    numbers: list[int]
    total: list[int]
    prefetch: int
    still: int
    resident: list[int]
    streamed: list[int]
    passing: list[int]
    beside: list[int]


def _orders(groups: list[_Group], policy: str, prefetch: int) -> list[_Order]:
    """The order of the model; and with the largest units first, which need most room to stream.

    Neither depends on a budget. More memory only lets more of each be resident, so that it never
    makes the faster one slower.
    """
    total = [sum(unit.bytes + unit.working for unit in group) for group in groups]
    streamed = [sum(unit.bytes - unit.buffers for unit in group) for group in groups]
    reads = [
        max(unit.reads for unit in group) if size else 0
        for group, size in zip(groups, streamed, strict=True)
    ]
    orders: list[_Order] = []
    largest = max(reads, default=0)
    for first in dict.fromkeys((0, largest)) if policy != "sequential" else (0,):
        # Sorting is stable: within each part, groups keep the order of the model.
        keys = [
            (size > 0, not first or read < first)
            for size, read in zip(streamed, reads, strict=True)
        ]
        numbers = sorted(range(len(groups)), key=keys.__getitem__)
        behind = numbers[::-1]
        most = [*itertools.accumulate((reads[number] for number in behind), max, initial=0)]
        order = _Order(
            numbers=numbers,
            total=total,
            prefetch=prefetch,
            still=streamed.count(0),
            resident=_sums(total[number] for number in numbers),
            streamed=_sums(streamed[number] for number in numbers),
            passing=[(1 + prefetch) * size for size in reversed(most)],
            beside=_sums(total[number] - streamed[number] for number in behind)[::-1],
        )
        orders.append(order)
    return orders


def _sums(values: Iterable[int]) -> list[int]:
    return list(itertools.accumulate(values, initial=0))


def _choose(
    order: _Order, limits: _Limits, policy: str, speeds: Speeds | None
) -> tuple[float, int, list[str]] | None:
    """The placement with most resident: the seconds that it takes, `prefetch`, each group's device.

    With fewer resident, no byte would move to a faster place.
    """
    resident = _resident(order, limits, policy)
    if resident is None:
        return None
    count, devices = resident
    end, start = count, order.streamed[count]  # where the CPU ends and the disk begins
    if limits.cpu is not None:
        end = len(order.numbers)
        if order.streamed[end] - start > limits.cpu:
            staging = order.passing[count]
            if staging > limits.cpu:
                return None
            end = max(bisect_right(order.streamed, start + limits.cpu - staging) - 1, count)
    if limits.disk is not None and order.streamed[-1] - order.streamed[end] > limits.disk:
        return None
    for number in order.numbers[count:end]:
        devices[number] = "cpu"
    speeds = speeds or Speeds()
    in_memory = order.streamed[end] - order.streamed[count]
    on_disk = order.streamed[-1] - order.streamed[end]
    seconds = in_memory / speeds.bus + on_disk / min(speeds.disk, speeds.bus)
    return seconds * (1 if order.prefetch else 2), order.prefetch, devices


def _resident(order: _Order, limits: _Limits, policy: str) -> tuple[int, list[str]] | None:
    """How many groups are resident, and the devices of all, with the others on disk; None if the
    first device has too little room for the others to stream.
    """
    total = sum(max(size, 0) for size in limits.sizes)
    for count in range(len(order.numbers), order.still - 1, -1):
        room = order.passing[count] + order.beside[count]
        if room > limits.sizes[0] or order.resident[count] + room > total:
            continue
        numbers = sorted(order.numbers[:count])
        sums = _sums(order.total[number] for number in numbers)
        ends = _spread(sums, [limits.sizes[0] - room, *limits.sizes[1:]], policy)
        if ends is not None:
            devices = [DISK] * len(order.total)
            for name, start, end in zip(limits.devices, [0, *ends], ends, strict=False):
                for number in numbers[start:end]:
                    devices[number] = name
            return count, devices
    return None


def _spread(sums: list[int], sizes: list[int], policy: str) -> list[int] | None:
    """Where each device's part of the resident groups ends; None if they do not fit."""

    def ends_of(sizes: list[int]) -> list[int] | None:
        ends: list[int] = []
        start = 0
        for size in sizes:
            start = bisect_right(sums, sums[start] + max(size, 0), lo=start) - 1
            ends.append(start)
        return ends if start == len(sums) - 1 else None

    def smallest(sizes_of: Callable[[int], list[int]], most: int) -> list[int]:
        fits = bisect_left(range(most), 1, key=lambda size: ends_of(sizes_of(size)) is not None)
        return sizes_of(fits)

    if ends_of(sizes) is None or len(sizes) == 1 or policy == "sequential":
        return ends_of(sizes)
    if policy == "balanced_low_0":
        first, *others = smallest(lambda size: [size, *sizes[1:]], max(sizes[0], 0))
        return ends_of(
            smallest(lambda most: [first, *(min(size, most) for size in others)], max(sizes))
        )
    return ends_of(smallest(lambda most: [min(size, most) for size in sizes], max(sizes)))


def _refuse(
    sizes: Sizes, groups: list[_Group], orders: list[_Order], limits: _Limits, policy: str
) -> NoReturn:
    """Raise for a model that fits no placement: what needs how much, and where."""
    main, room, cpu, disk = limits.devices[0], limits.sizes[0], limits.cpu, limits.disk
    fitting = [(order, held[0]) for order in orders if (held := _resident(order, limits, policy))]
    if fitting:
        passing = [
            min(order.passing[count], streamed)
            for order, count in fitting
            for streamed in [order.streamed[-1] - order.streamed[count]]
            if disk is None or streamed <= disk
        ]
        if cpu is not None and passing:
            raise PlanError(
                f"place: {sizes.source} needs {show_bytes(sizes.bytes)}. {main} holds "
                f"{show_bytes(max(room, 0))}, and units on disk pass through the CPU, which allows "
                f"{show_bytes(cpu)} and needs {show_bytes(min(passing))} for "
                f"{1 + orders[0].prefetch} at a time. Allow at least {show_bytes(min(passing))} on "
                f"'cpu'."
            )
        tiers = {"cpu": cpu, DISK: disk}
        rest = ", ".join(f"{name} {show_bytes(n)}" for name, n in tiers.items() if n is not None)
        raise PlanError(
            f"place: {sizes.source} needs {show_bytes(sizes.bytes)}. {main} holds "
            f"{show_bytes(max(room, 0))}, and the rest does not fit in {rest}. Allow more of "
            f"them, or leave out the limit of the disk."
        )
    units = [unit for group in groups for unit in group]
    largest = max(units, key=lambda unit: unit.reads)
    beside = sum(unit.buffers + unit.working for unit in units) + limits.reserved
    needed = limits.reserved + min(
        order.resident[count] + order.passing[count] + order.beside[count]
        for order in orders
        for count in range(order.still, len(order.numbers) + 1)
    )
    kind = f" ({largest.kind})" if largest.kind else ""
    raise PlanError(
        f"place: {main} allows {show_bytes(room + limits.reserved)}, but to compute with one "
        f"unit at a time takes {show_bytes(needed)}: the largest unit, {largest.name!r}{kind}, "
        f"needs {show_bytes(largest.reads)}, and activations, key-value cache and buffers "
        f"{show_bytes(beside)}. Allow at least {show_bytes(needed)} on {main}, reduce batch, "
        f"tokens or activations, or split larger units with fx.big.sizes(..., no_split=())."
    )


def _units_of_mapping(sizes: Sizes, names: Mapping[str, object]) -> Sequence[Unit]:
    """The units of a model, and those that names inside of units cut off from them."""
    prefixes = {name for tensor in sizes.tensors for name in names_above(tensor)} | {""}
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
    index = {unit.name: unit for unit in sizes.units}
    parents = {prefix for name in index for prefix in names_above(name)}
    finer = [name for name in names if name not in parents and name]
    if not finer:
        return sizes.units
    inside: dict[str, list[str]] = {}
    owners = {name: name for name in (*index, *finer)}
    for tensor in sizes.tensors:
        inside.setdefault(owner_of(owners, tensor), []).append(tensor)
    first = {name: group[0] for group in sizes.tied for name in group}
    return [
        Unit(
            name=name,
            kind=index[name].kind if name in index else "",
            bytes=sum(sizes.tensors[tensor] for tensor in tensors),
            buffers=sum(sizes.tensors[tensor] for tensor in tensors if tensor in sizes.buffers),
            reads=sum(
                sizes.tensors[tensor]
                for tensor in {first.get(tensor, tensor) for tensor in tensors}
                if tensor not in sizes.buffers
            ),
        )
        for name, tensors in inside.items()
    ]


def _devices_of_mapping(
    sizes: Sizes, units: Sequence[Unit], policy: Mapping[str, str | int]
) -> dict[str, str]:
    """The device of each unit: that of the longest name which it is under."""
    devices = {name: device_name(device) for name, device in policy.items()}
    uncovered = [
        unit.name for unit in units if not any(name in devices for name in names_above(unit.name))
    ]
    if uncovered:
        raise PlanError(
            f"place(policy={{...}}): the mapping does not cover these units of {sizes.source}: "
            f"{', '.join(map(repr, uncovered[:5]))}"
            f"{', ...' if len(uncovered) > 5 else ''}. Name them, or add '' for all others."
        )
    return {unit.name: owner_of(devices, unit.name) for unit in units}


def _check_tied(groups: list[_Group], devices: Mapping[str, str]) -> None:
    """Raise where units that share a tensor are on several devices."""
    for group in groups:
        if len({devices[unit.name] for unit in group}) > 1:
            places = ", ".join(f"{unit.name!r} on {devices[unit.name]}" for unit in group)
            raise PlanError(
                f"place(policy={{...}}): {places}: these units share a tied tensor. Place them on "
                f"one device."
            )


def _check_budget(placement: Placement, budget: Budget) -> None:
    """Raise where a mapping takes more of a device than is allowed."""
    for device in placement.devices:
        allowed, needed = budget.allowed(device), placement.bytes_on(device)
        if allowed is not None and needed > allowed:
            units = [unit for unit in placement.units if unit.device == device]
            largest = max(units, key=lambda unit: unit.bytes, default=None)
            hint = (
                f" The largest unit there is {largest.name!r}, {show_bytes(largest.bytes)}."
                if largest
                else ""
            )
            raise PlanError(
                f"place(policy={{...}}): the mapping needs {show_bytes(needed)} on {device}, which "
                f"allows {show_bytes(allowed)}.{hint} Move units to another device, or allow more."
            )
