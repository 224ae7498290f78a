"""Search the placement that reads least, among some that do not depend on the budget.

Because the candidates are the same for every budget, and more memory only makes more of them fit,
more memory never makes the best one slower.
"""

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import attrs

from fxtrain.big.budgets import Budget
from fxtrain.big.items import Item
from fxtrain.big.speeds import Speeds
from fxtrain.state import Room
from fxtrain.state.placement.placement import DISK

__all__ = ["Choice", "Demand", "least_memory", "least_staging", "search"]

_LARGEST = 8  # sizes of which the largest units may be resident before those in front


@attrs.frozen(kw_only=True)
class Demand:
    """What is to be placed, and within what.

    Attributes:
        items: In the order of the model.
        main: The device to which items stream.
        budget: What devices allow.
        reserved: Bytes of every accelerator for something else, and more of `main`.
        speeds: Of disk and bus.
        policy: As in `place`.
    """

    items: tuple[Item, ...]
    main: str
    budget: Budget
    reserved: dict[str, int]
    speeds: Speeds
    policy: str

    @property
    def capacities(self) -> list[tuple[str, int]]:
        """Bytes for items of the devices that compute, `main` first."""
        names = [room.device for room in self.budget.accelerators] or ["cpu"]
        return [
            (name, (self.budget.allowed(name) or 0) - self.reserved.get(name, 0)) for name in names
        ]


class Choice(NamedTuple):
    """A placement that fits.

    Attributes:
        seconds: What it takes by the estimate.
        devices: Of each item.
        ahead: Items read ahead.
    """

    seconds: float
    devices: list[str]
    ahead: int


class _Order(NamedTuple):
    """Items in the order in which they become resident, with sums over those in front or behind.

    Attributes:
        items: Numbers of the items.
        always: How many in front stream nothing, so that they are resident anyway.
        resident: By how many are resident: the bytes that those take.
        beside: What the others take where they compute.
        streamed: Bytes of the items in front.
        largest: Most that one of the others computes with.
    """

    items: list[int]
    always: int
    resident: list[int]
    beside: list[int]
    streamed: list[int]
    largest: list[int]


def search(demand: Demand, aheads: Sequence[int]) -> Choice | None:
    """The fastest placement; None if none fits."""
    found: list[Choice] = []
    for order in _orders(demand):
        for ahead in aheads:
            choice = _best(demand, order, ahead)
            if choice is not None:
                found.append(choice)
    return min(found, key=lambda choice: choice.seconds, default=None)  # the first of equal ones


def least_memory(demand: Demand, ahead: int) -> int:
    """Bytes of `main` that suffice if nothing else computes and the other tiers are unlimited."""
    return min(
        order.resident[count] + order.beside[count] + (1 + ahead) * order.largest[count]
        for order in _orders(demand)
        for count in range(order.always, len(order.items) + 1)
    )


def least_staging(demand: Demand, ahead: int) -> int | None:
    """Bytes of the CPU that suffice to pass units on to disk; None if more do not help."""
    rooms = [room for room in demand.budget.rooms if room.device != "cpu"]
    if search(attrs.evolve(demand, budget=Budget(rooms=tuple(rooms))), (ahead,)) is None:
        return None

    def fits(size: int) -> Choice | None:
        cpu = Room(device="cpu", bytes=size)
        return search(attrs.evolve(demand, budget=Budget(rooms=(*rooms, cpu))), (ahead,))

    return _smallest(fits, sum(item.streamed for item in demand.items))


def _orders(demand: Demand) -> Iterator[_Order]:
    """In the order of the model; and with the largest first, which need most room to stream."""
    items = demand.items
    numbers = range(len(items))
    still = [number for number in numbers if not items[number].streamed]
    moving = [number for number in numbers if items[number].streamed]
    yield _order(items, still, moving)
    if demand.policy == "sequential":
        return
    most = heapq.nlargest(_LARGEST, {items[number].reads for number in moving})
    for least in most[:-1] if len(most) > 1 else []:
        large = [number for number in moving if items[number].reads >= least]
        small = [number for number in moving if items[number].reads < least]
        if small:
            yield _order(items, still, large + small)


def _order(items: Sequence[Item], still: list[int], moving: list[int]) -> _Order:
    numbers = still + moving
    behind = [items[number] for number in reversed(numbers)]
    return _Order(
        items=numbers,
        always=len(still),
        resident=_sums(items[number].bytes + items[number].working for number in numbers),
        beside=_sums(item.beside for item in behind)[::-1],
        streamed=_sums(items[number].streamed for number in numbers),
        largest=list(itertools.accumulate((item.reads for item in behind), max, initial=0))[::-1],
    )


def _sums(values: Iterable[int]) -> list[int]:
    return list(itertools.accumulate(values, initial=0))


def _best(demand: Demand, order: _Order, ahead: int) -> Choice | None:
    """The placement with most resident: with fewer, no byte moves to a faster place."""
    capacities = demand.capacities
    total, first = sum(max(size, 0) for _, size in capacities), capacities[0][1]
    for count in range(len(order.items), order.always - 1, -1):
        room = (1 + ahead) * order.largest[count] + order.beside[count]
        if room > first or order.resident[count] + room > total:
            continue
        resident = sorted(order.items[:count])
        homes = _spread(demand, resident, [(capacities[0][0], first - room), *capacities[1:]])
        if homes is None:
            continue
        end = _on_cpu(demand, order, count, ahead)
        if end is None:
            return None
        devices = [DISK] * len(demand.items)
        for number in order.items[count:end]:
            devices[number] = "cpu"
        for number, device in zip(resident, homes, strict=True):
            devices[number] = device
        return Choice(_seconds(demand, order, count, end, ahead), devices, ahead)
    return None


def _seconds(demand: Demand, order: _Order, count: int, end: int, ahead: int) -> float:
    bus, disk = demand.speeds.bus, min(demand.speeds.disk, demand.speeds.bus)
    cpu = order.streamed[end] - order.streamed[count]
    least = (order.streamed[-1] - order.streamed[end]) / disk + cpu / bus
    return least * (1 if ahead else 2)


def _on_cpu(demand: Demand, order: _Order, count: int, ahead: int) -> int | None:
    """Where in the order the CPU ends and the disk begins; None if the two are too small."""
    end = count
    if demand.main != "cpu" and (allowed := demand.budget.allowed("cpu")) is not None:
        staging = (1 + ahead) * order.largest[count]
        start = order.streamed[count]
        end = len(order.items)
        if order.streamed[end] - start > allowed:
            if staging > allowed:
                return None
            end = bisect_right(order.streamed, start + allowed - staging) - 1
            end = max(end, count)
    on_disk = demand.budget.allowed(DISK)
    needed = order.streamed[-1] - order.streamed[end]
    return None if on_disk is not None and needed > on_disk else end


def _spread(
    demand: Demand, resident: list[int], capacities: list[tuple[str, int]]
) -> list[str] | None:
    """The devices of resident items, which keep their order; None if they do not fit."""
    sums = _sums(demand.items[number].bytes + demand.items[number].working for number in resident)
    sizes = [size for _, size in capacities]
    ends = _fill(sums, sizes)
    if ends is None:
        return None
    if len(sizes) > 1 and demand.policy != "sequential":
        low = demand.policy == "balanced_low_0"
        if low:
            least = _smallest(lambda size: _fill(sums, [min(size, sizes[0]), *sizes[1:]]), sizes[0])
            sizes = [least, *sizes[1:]]
        cap = _smallest(lambda size: _fill(sums, _capped(sizes, size, low)), max(sizes))
        ends = _fill(sums, _capped(sizes, cap, low))
        assert ends is not None
    starts = [0, *ends[:-1]]
    return [
        name
        for (name, _), start, end in zip(capacities, starts, ends, strict=True)
        for _ in range(end - start)
    ]


def _fill(sums: list[int], sizes: list[int]) -> list[int] | None:
    """Where each device ends if all are filled in turn; None if items are left."""
    ends: list[int] = []
    start = 0
    for size in sizes:
        start = bisect_right(sums, sums[start] + max(size, 0), lo=start) - 1
        ends.append(start)
    return ends if start == len(sums) - 1 else None


def _capped(sizes: list[int], most: int, low: bool) -> list[int]:  # noqa: FBT001
    """Capacities of at most so many bytes; the first as it is if it is to stay low."""
    first = sizes[0] if low else min(sizes[0], most)
    return [first, *(min(size, most) for size in sizes[1:])]


def _smallest(fits: Callable[[int], object], most: int) -> int:
    """The smallest number up to one that fits, that fits."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) is not None else (middle + 1, high)
    return high
