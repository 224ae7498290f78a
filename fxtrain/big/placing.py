"""Decide where each unit of a model is held: a pure function of sizes and a budget."""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NoReturn

import attrs

from fxtrain._display import show_bytes
from fxtrain._record import closest, few
from fxtrain.big.budgets import device_name
from fxtrain.big.estimating import seconds_of
from fxtrain.big.measuring import Sizes, layer_of
from fxtrain.errors import PlanError
from fxtrain.state import Placement, Unit
from fxtrain.state.placement import DISK, POLICIES, names_above, unit_of

Policy = Literal["auto", "balanced", "balanced_low_0", "sequential"]
_Group = list[Unit]  # units that share a tensor, so that one device holds all of them


def place(
    sizes: Sizes,
    budget: Mapping[str, int] | None = None,
    *,
    policy: Policy | Mapping[str, str | int] = "auto",
    resident: Iterable[str] = (),
    prefetch: int | None = None,
    offload_buffers: bool = False,
    activations: int = 0,
    batch: int = 1,
    tokens: int = 0,
) -> Placement:
    """Place every unit of a model: as much on the accelerators as fits, then CPU, then disk.

    The result depends only on the arguments. Units keep the order of the model, except that tied
    units are in one place: the first ones are resident. More memory in a budget never gives a
    placement that takes longer.

    Args:
        sizes: What `fx.big.sizes` measured.
        budget: What `fx.big.budget` allows; needed unless `policy` is a mapping.
        policy: auto, balanced: accelerators hold about the same number of bytes;
            balanced_low_0: the first holds as little as possible; sequential: one is filled
            after another, in the order of the model. Or a mapping from names of modules or tensors
            to devices, the longest name first: `{"": "cuda:0", "layers.3": "disk"}`.
        resident: Names of modules and tensors that stay where they compute, such as adapters, which
            could not be trained otherwise. They are units of their own. A mapping names devices
            for them itself.
        prefetch: Units to read ahead of the one in use. None is 1, or 0 where that takes less time.
        offload_buffers: Stream buffers with parameters, rather than keep them.
        activations: Bytes of every accelerator that stay free for activations.
        batch: Sequences for whose key-value cache to keep room.
        tokens: Their length; 0 keeps no room.

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
    cache = _cache_of_units(sizes, batch * tokens)
    by_name = isinstance(policy, Mapping)
    named = dict(policy) if by_name else dict.fromkeys(resident)
    units = [
        attrs.evolve(
            unit,
            buffers=0 if offload_buffers else unit.buffers,
            reads=unit.reads + (unit.buffers if offload_buffers else 0),
            working=cache.get(unit.name, 0),
        )
        for unit in (_cut_units(sizes, named) if named else sizes.units)
    ]
    groups = _tied_groups(units, sizes.tied)
    if by_name:
        devices = _devices_of_mapping(sizes, units, policy)
        prefetch = 1 if prefetch is None else prefetch
        main = next((name for name in devices.values() if name not in ("cpu", DISK)), "cpu")
        _check_tied(groups, devices)
    else:
        reserved = activations, cache.get("", 0)
        main, devices, prefetch = _automatic(
            sizes, groups, named, budget, policy, reserved, prefetch
        )
    streaming = [
        unit for unit in units if devices[unit.name] == DISK or devices[unit.name] == "cpu" != main
    ]
    room = (1 + prefetch) * max((unit.reads for unit in streaming), default=0)
    on_disk = any(devices[unit.name] == DISK and unit.bytes > unit.buffers for unit in streaming)
    computing = dict.fromkeys([main, *(n for n in devices.values() if n not in ("cpu", DISK))])
    free = {name: activations + (cache.get("", 0) if name == main else 0) for name in computing}
    placement = Placement(
        units=tuple(attrs.evolve(unit, device=devices[unit.name]) for unit in units),
        device=main,
        tied=sizes.tied,
        offload_buffers=offload_buffers,
        prefetch=prefetch,
        room=room,
        staging=room if on_disk and main != "cpu" else 0,
        reserved=tuple((name, size) for name, size in free.items() if size),
        dtypes=sizes.dtypes,
    )
    if by_name and budget is not None:
        _check_budget(placement, budget)
    return placement


def _automatic(
    sizes: Sizes,
    groups: list[_Group],
    resident: Mapping[str, object],
    budget: Mapping[str, int] | None,
    policy: str,
    reserved: tuple[int, int],
    prefetch: int | None,
) -> tuple[str, dict[str, str], int]:
    """The first device that computes, the device of each unit, and how many to read ahead.

    Args:
        reserved: Bytes that stay free on every device that computes, and on the first one beside.
    """
    parts: tuple[list[_Group], list[_Group]] = [], []
    for group in groups:
        parts[any(_is_under(unit, resident) for unit in group)].append(group)
    groups, kept = parts
    # Which of the devices will hold them is not known yet.
    stay = sum(unit.bytes + unit.working for group in kept for unit in group)
    activations, shared = reserved
    rooms, cpu, disk = _limits(budget, policy, activations + stay, shared)
    main = next(iter(rooms))
    taken = activations + stay + shared
    if kept and rooms[main] < 0:
        raise PlanError(
            f"place(resident=...): {show_bytes(stay)} stay on {main}, which allows "
            f"{show_bytes(rooms[main] + taken)}. Allow more of it, or name fewer tensors."
        )
    tries = (1, 0) if prefetch is None else (prefetch,)
    choices = [
        (*fit, count)
        for count in tries
        if (fit := _fill(groups, rooms, cpu, disk, policy, count)) is not None
    ]
    if not choices:
        _refuse(sizes, groups, rooms, cpu, disk, policy, taken, tries[-1])
    _, held, prefetch = min(choices, key=lambda choice: choice[0])  # the first of equals
    devices = {unit.name: held[n] for n, group in enumerate(groups) for unit in group}
    devices |= {
        unit.name: _beside(group[0].name, devices, main) for group in kept for unit in group
    }
    return main, devices, prefetch


def _cache_of_units(sizes: Sizes, tokens: int) -> dict[str, int]:
    """Bytes of the key-value cache by unit; those of the model as a whole under ""."""
    if not tokens:
        return {}
    if sizes.cache is None:
        raise PlanError(
            f"place(tokens=...): the shape of the key-value cache of {sizes.source} is unknown, "
            f"because it has no config. Pass activations=... with room for the cache instead."
        )
    total = round(sizes.cache.nbytes(max(2, sizes.itemsize), tokens))
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
        first, *others = dict.fromkeys(unit_of(index, tensor).name for tensor in tensors)
        joined = group_of[first]
        for other in others:
            if group_of[other] is not joined:
                joined += group_of[other]
                group_of.update((unit.name, joined) for unit in group_of[other])
    return list({id(group): group for group in group_of.values()}.values())


def _is_under(unit: Unit, names: Mapping[str, object]) -> bool:
    return any(name in names for name in names_above(unit.name))


def _beside(name: str, devices: Mapping[str, str], main: str) -> str:
    """The device that computes what a part is in."""
    device = next((devices[above] for above in names_above(name) if above in devices), main)
    return main if device in ("cpu", DISK) else device


def _limits(
    budget: Mapping[str, int] | None, policy: str, activations: int, shared: int
) -> tuple[dict[str, int], int | None, int | None]:
    """Bytes for units on each device that computes, on the CPU beside these, and on disk."""
    if policy not in POLICIES:
        raise PlanError(
            f"place(policy={policy!r}): choose one of {', '.join(map(repr, POLICIES))}, or a "
            f"mapping from names to devices.{closest(policy, POLICIES)}"
        )
    budget = budget or {}
    free = {name: size for name, size in budget.items() if name not in ("cpu", DISK) and size > 0}
    if not (free or budget.get("cpu")):
        raise PlanError(
            f"place(policy={policy!r}): the budget allows nothing of any device. Pass "
            f"fx.big.budget() to measure this machine, or fx.big.budget({{'cuda:0': '10GiB'}})."
        )
    rooms = {name: size - activations for name, size in free.items()}
    cpu = budget.get("cpu")
    if not rooms:
        rooms, cpu = {"cpu": (cpu or 0) - activations}, None
    rooms[next(iter(rooms))] -= shared
    return rooms, cpu, budget.get(DISK)


def _needs(
    groups: list[_Group], prefetch: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Memory needed, indexed by the number of leading groups kept on the device.

    Returns:
        The bytes of those in front, with their room for a key-value cache; how many of these would
        stream otherwise; the room in which the groups behind stream; and the whole room that those
        take where they compute.
    """
    total = _sums(sum(unit.bytes + unit.working for unit in group) for group in groups)
    streamed = _sums(sum(unit.bytes - unit.buffers for unit in group) for group in groups)
    reads = (
        max(unit.reads for unit in group) if any(u.bytes > u.buffers for u in group) else 0
        for group in reversed(groups)
    )
    passing = [(1 + prefetch) * most for most in itertools.accumulate(reads, max, initial=0)][::-1]
    taken = [
        room + (total[-1] - total[n]) - (streamed[-1] - streamed[n])
        for n, room in enumerate(passing)
    ]
    return total, streamed, passing, taken


def _sums(values: Iterable[int]) -> list[int]:
    return list(itertools.accumulate(values, initial=0))


def _fill(
    groups: list[_Group],
    rooms: Mapping[str, int],
    cpu: int | None,
    disk: int | None,
    policy: str,
    prefetch: int,
) -> tuple[float, list[str]] | None:
    """Fill devices in the order of the model, with as many groups resident as possible.

    Args:
        rooms: Bytes for units on each device that computes; units stream to the first.
        cpu: Bytes beside accelerators; None holds nothing, and lets any unit pass through.
        disk: Bytes; None is any number.

    Returns:
        The seconds that a forward takes and the device of each group; None if they do not fit.
    """
    total, streamed, passing, taken = _needs(groups, prefetch)
    first, *others = rooms.values()
    for count in range(len(groups), -1, -1):
        left = [first - taken[count], *others]
        if left[0] < 0 or total[count] > sum(max(size, 0) for size in left):
            continue
        if (ends := _spread(total[: count + 1], left, policy)) is not None:
            break
    else:
        return None
    end = count  # where the CPU ends and the disk begins
    if cpu is not None:
        end = len(groups)
        if streamed[end] - streamed[count] > cpu:
            if passing[count] > cpu:
                return None
            most = streamed[count] + cpu - passing[count]
            end = max(bisect_right(streamed, most) - 1, count)
    on_disk = streamed[-1] - streamed[end]
    if disk is not None and on_disk > disk:
        return None
    held = [DISK] * len(groups)
    held[count:end] = ["cpu"] * (end - count)
    for name, start, stop in zip(rooms, [0, *ends], ends, strict=False):
        held[start:stop] = [name] * (stop - start)
    seconds = seconds_of(streamed[end] - streamed[count], on_disk)
    return seconds * (1 if prefetch else 2), held  # without, the device waits for each unit


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
    sizes: Sizes,
    groups: list[_Group],
    rooms: Mapping[str, int],
    cpu: int | None,
    disk: int | None,
    policy: str,
    reserved: int,
    prefetch: int,
) -> NoReturn:
    """Raise for a model that fits no placement: what needs how much, and where."""
    total, _, passing, taken = _needs(groups, prefetch)
    main, room = next(iter(rooms.items()))
    needed = reserved + min(front + behind for front, behind in zip(total, taken, strict=True))
    if _fill(groups, rooms, None, None, policy, prefetch) is not None:
        tiers = {"cpu": cpu, DISK: disk}
        rest = ", ".join(f"{name} {show_bytes(n)}" for name, n in tiers.items() if n is not None)
        what = f"the rest does not fit in {rest}. Allow more of them"
        enough = passing[0]
        if (cpu or 0) < enough and _fill(groups, rooms, enough, disk, policy, prefetch):
            what = (
                f"units on disk pass through the CPU, which allows {show_bytes(cpu or 0)}. Allow "
                f"at least {show_bytes(enough)} on 'cpu'"
            )
        raise PlanError(
            f"place: {sizes.source} needs {show_bytes(sizes.bytes)}. {main} holds "
            f"{show_bytes(max(room, 0))}, and {what}."
        )
    largest = max((unit for group in groups for unit in group), key=lambda unit: unit.reads)
    kind = f" ({largest.kind})" if largest.kind else ""
    raise PlanError(
        f"place: {main} allows {show_bytes(room + reserved)}, but to compute with one "
        f"unit at a time takes {show_bytes(needed)}, activations, key-value cache and buffers "
        f"included: the largest unit, {largest.name!r}{kind}, needs {show_bytes(largest.reads)}. "
        f"Allow at least {show_bytes(needed)} on {main}, reduce batch, tokens or activations, or "
        f"split larger units with fx.big.sizes(..., no_split=())."
    )


def _cut_units(sizes: Sizes, names: Mapping[str, object]) -> Sequence[Unit]:
    """The units of a model, and those that names inside of units cut off from them."""
    prefixes = {name for tensor in sizes.tensors for name in names_above(tensor)} | {""}
    if unknown := [name for name in names if name not in prefixes]:
        raise PlanError(
            "\n".join(
                few(
                    f"place: {sizes.source} has no module or tensor "
                    f"{name!r}.{closest(name, prefixes)}"
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
        inside.setdefault(unit_of(owners, tensor), []).append(tensor)
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
    return {unit.name: unit_of(devices, unit.name) for unit in units}


def _check_tied(groups: list[_Group], devices: Mapping[str, str]) -> None:
    """Raise where units that share a tensor are on several devices."""
    for group in groups:
        if len({devices[unit.name] for unit in group}) > 1:
            places = ", ".join(f"{unit.name!r} on {devices[unit.name]}" for unit in group)
            raise PlanError(
                f"place(policy={{...}}): {places}: these units share a tied tensor. Place them on "
                f"one device."
            )


def _check_budget(placement: Placement, budget: Mapping[str, int]) -> None:
    """Raise where a mapping takes more of a device than is allowed."""
    for device in placement.devices:
        allowed, needed = budget.get(device), placement.bytes_on(device)
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
