"""How much memory a model may take: passed by the caller, or measured on this machine."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch

from fxtrain._display import read_bytes
from fxtrain._record import record
from fxtrain.errors import PlanError
from fxtrain.state import Limit, Room
from fxtrain.state.placement import DISK, limits_of, share_of

_CGROUPS = (  # limit and use of a container's memory
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


K = TypeVar("K", bound="int | str | torch.device")


@record
class Budget:
    """Bytes that a model may take, by device: accelerators in order, then "cpu" and "disk".

    Attributes:
        rooms: What each allows. The CPU holds nothing where it is not listed; the disk holds
            any number of bytes where it is not.

    Example:
        >>> import fxtrain as fx
        >>> fx.big.budget({"cpu": "1GB", "cuda:0": "10GB"}).devices
        ('cuda:0', 'cpu')
    """

    rooms: tuple[Room, ...]

    def __attrs_post_init__(self) -> None:
        if len(set(self.devices)) < len(self.rooms):
            raise PlanError(f"Budget: {', '.join(self.devices)}: a device is listed twice.")

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices, in order."""
        return tuple(room.device for room in self.rooms)

    @property
    def accelerators(self) -> tuple[Room, ...]:
        """What accelerators allow, without those that allow nothing."""
        return tuple(
            room for room in self.rooms if room.device not in ("cpu", DISK) and room.bytes > 0
        )

    def allowed(self, device: str) -> int | None:
        """Bytes of a device; None if it is not listed."""
        return next((room.bytes for room in self.rooms if room.device == device), None)


def budget(
    limits: Mapping[K, int | str] | Iterable[Limit] | None = None,
    *,
    keep_free: float = 0.1,
) -> Budget:
    """The memory that a model may take.

    Args:
        limits: Bytes by device, "cpu" and "disk", as numbers, as "10GiB", or as "50%" of what is
            free. Only what is named is used, and the disk as well unless it is 0. None, or
            nothing, measures every accelerator and the CPU.
        keep_free: Of what is measured, the part that is not used.

    Effects:
        Asks the drivers and the operating system for free memory where it is not given in bytes.

    Raises:
        PlanError: a device or size is invalid, or free memory is unknown.

    Example:
        >>> import fxtrain as fx
        >>> fx.big.budget({0: "10GiB", "cpu": 500}).rooms[0]
        Room(device='cuda:0', bytes=10737418240)
        >>> fx.big.budget().allowed("cpu") > 0
        True
    """
    if not limits:
        rooms = [
            Room(device=device, bytes=int(_free(device) * (1 - keep_free)))
            for device in (*_accelerators(), "cpu")
        ]
    else:
        listed: Any = limits if isinstance(limits, Mapping) else tuple(limits)
        rooms = [
            _resolved(attrs.evolve(limit, device=device_name(limit.device)))
            for limit in limits_of(listed)
        ]
    return Budget(rooms=tuple(sorted(rooms, key=_order)))


def device_name(device: Any) -> str:
    """A device as placements call it: with its index, or "cpu" or "disk".

    Raises:
        PlanError: torch knows no such device.

    Example:
        >>> from fxtrain.big.budgets import device_name
        >>> device_name(1), device_name("cuda"), device_name("disk")
        ('cuda:1', 'cuda:0', 'disk')
    """
    text = str(device)
    if text == DISK:
        return text
    try:
        named = torch.device(f"cuda:{text}" if text.isdecimal() else text)
    except RuntimeError:
        raise PlanError(
            f"{text!r} is not a device. Choose 'cuda:0' or another of torch's names, 'cpu' or "
            f"'disk'."
        ) from None
    return "cpu" if named.type == "cpu" else f"{named.type}:{named.index or 0}"


def _order(room: Room) -> tuple[int, str, int]:
    if room.device in ("cpu", DISK):
        return (1 if room.device == "cpu" else 2), "", 0
    kind, _, index = room.device.partition(":")
    return 0, kind, int(index)


def _resolved(limit: Limit) -> Room:
    share = share_of(limit.bytes)
    if share is None:
        size = 0 if limit.bytes == 0 else read_bytes(limit.bytes, f"memory[{limit.device!r}]")
        return Room(device=limit.device, bytes=size or 0)
    if limit.device == DISK:
        raise PlanError(
            f"budget: disk={limit.bytes!r}: pass bytes. Files of a model that are on disk already "
            f"take no more of it."
        )
    return Room(device=limit.device, bytes=int(_free(limit.device) * share))


def _accelerators() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    return [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]


def _free(device: str) -> int:
    """Bytes that are free now."""
    if device == "cpu":
        return _free_memory()
    kind, _, index = device.partition(":")
    if device not in _accelerators():
        raise PlanError(
            f"budget: this machine has no {device}, so that its free memory is unknown. It has "
            f"{', '.join([*_accelerators(), 'cpu'])}. Pass bytes to plan for another machine."
        )
    module: Any = getattr(torch, kind)
    if kind == "mps":
        return module.recommended_max_memory() - module.driver_allocated_memory()
    if not hasattr(module, "mem_get_info"):
        raise PlanError(f"budget: torch.{kind} does not tell free memory. Pass bytes for {device}.")
    return module.mem_get_info(int(index))[0]


def _free_memory() -> int:
    """Free memory of this machine, or of the container that this process is in."""
    names = re.findall(r"MemAvailable:\s+(\d+) kB", _text("/proc/meminfo"))
    if names:
        free = int(names[0]) * 1024
    elif "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        raise PlanError("budget: this system does not tell free memory. Pass bytes for 'cpu'.")
    for limit, use in _CGROUPS:
        most, now = _text(limit).strip(), _text(use).strip()
        if most.isdecimal() and now.isdecimal():
            free = min(free, max(int(most) - int(now), 0))
    return free


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
