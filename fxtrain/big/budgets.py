"""How much memory a model may take: passed by the caller, or measured on this machine."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch

from fxtrain._display import read_bytes
from fxtrain._host_memory import available_memory
from fxtrain.errors import PlanError
from fxtrain.state.placement import DISK, as_share, check_limit

K = TypeVar("K", bound="int | str | torch.device")


def budget(
    limits: Mapping[K, int | str] | Iterable[tuple[K, int | str]] | None = None,
    *,
    keep_free: float = 0.1,
) -> dict[str, int]:
    """The memory that a model may take: bytes by device, accelerators first, in order.

    The CPU holds nothing where it is not listed; the disk holds any number of bytes where it is
    not.

    Args:
        limits: Bytes by device, "cpu" and "disk", as numbers, as "10GiB", or as "50%" of what is
            free. Only what is named is used, and the disk as well unless it is 0. None, or
            nothing, measures every accelerator and the CPU.
        keep_free: Of what is measured, the part that is not used.

    Effects:
        Asks the drivers and the operating system for free memory where it is not given in bytes.

    Raises:
        PlanError: a device or size is invalid, a device is listed twice, or free memory is unknown.

    Example:
        >>> import fxtrain as fx
        >>> fx.big.budget({"cpu": 500, 0: "10GiB"})
        {'cuda:0': 10737418240, 'cpu': 500}
        >>> fx.big.budget()["cpu"] > 0
        True
    """
    pairs = limits.items() if isinstance(limits, Mapping) else limits or ()
    listed = [(device_name(device), size) for device, size in pairs]
    allowed = {device: _resolved(device, size) for device, size in listed}
    if len(allowed) < len(listed):
        names = ", ".join(device for device, _ in listed)
        raise PlanError(f"budget: {names}: a device is listed twice.")
    if not allowed:
        measured = (*_accelerators(), "cpu")
        allowed = {device: int(_free(device) * (1 - keep_free)) for device in measured}
    return {device: allowed[device] for device in sorted(allowed, key=_order)}


def device_name(device: Any) -> str:
    """A device as placements call it: with its index, or "cpu" or "disk".

    Raises:
        PlanError: torch knows no such device.
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


def _order(device: str) -> tuple[int, str, int]:
    if device in ("cpu", DISK):
        return (1 if device == "cpu" else 2), "", 0
    kind, _, index = device.partition(":")
    return 0, kind, int(index)


def _resolved(device: str, limit: Any) -> int:
    """The bytes of a limit."""
    try:
        check_limit(limit)
    except ValueError as problem:
        raise PlanError(f"budget: memory[{device!r}]={limit!r}: {problem}") from None
    share = as_share(limit)
    if share is None:
        return read_bytes(limit, f"memory[{device!r}]") or 0 if limit else 0
    if device == DISK:
        raise PlanError(
            f"budget: disk={limit!r}: pass bytes. Files of a model that are on disk already take "
            f"no more of it."
        )
    return int(_free(device) * share)


def _accelerators() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    return [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]


def _free(device: str) -> int:
    """Bytes that are free now."""
    if device == "cpu":
        free, total, _ = available_memory()
        if not total:
            raise PlanError("budget: the system does not report free memory. Pass bytes for 'cpu'.")
        return free
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
        raise PlanError(
            f"budget: torch.{kind} does not report free memory. Pass bytes for {device}."
        )
    return module.mem_get_info(int(index))[0]
