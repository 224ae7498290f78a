"""Memory of a rank's device, or of its process on the CPU."""

import os
import re
import sys
from typing import Any

import attrs
import torch

from fxtrain.state import DistContext

if sys.platform == "win32":
    resource = None
else:
    import resource

_STATUS = re.compile(rb"^(VmHWM|VmRSS):\s+(\d+) kB$", re.MULTILINE)


@attrs.frozen(kw_only=True)
class Memory:
    """Bytes in use on one rank.

    Attributes:
        now: Allocated by torch on an accelerator; resident memory of the process on a CPU. 0 where
            neither is known.
        peak: The largest value of `now` so far.
        total: Of the device; None where it is unknown.
    """

    now: int
    peak: int
    total: int | None = None


def memory(ctx: DistContext) -> Memory:
    """How much memory this rank uses. Waits for no device.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     found = fx.memory(ctx)
        >>> 0 < found.now <= found.peak
        True
    """
    kind = ctx.device.type
    if kind == "cpu":
        return _process_memory()
    if kind in ("meta", "xla"):
        return Memory(now=0, peak=0)
    device: Any = torch.get_device_module(ctx.device)
    if not hasattr(device, "memory_allocated") and kind != "mps":  # a device of another package
        return Memory(now=0, peak=0)
    if kind == "mps":
        now = device.current_allocated_memory()
        return Memory(now=now, peak=max(now, device.driver_allocated_memory()))
    return Memory(
        now=device.memory_allocated(ctx.device),
        peak=device.max_memory_allocated(ctx.device),
        total=device.get_device_properties(ctx.device).total_memory,
    )


def _process_memory() -> Memory:
    """Memory of this process.

    On Linux, one read of a file tells both, since `getrusage` lets other processes run first: on
    a busy machine it was seen to take milliseconds. Its peak may also be that of a parent process.
    """
    found = _status_entries() if sys.platform == "linux" else {}
    if now := found.get(b"VmRSS"):
        return Memory(now=now, peak=max(now, found.get(b"VmHWM", 0)))
    if resource is None:
        return Memory(now=0, peak=0)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = most if sys.platform == "darwin" else most << 10  # there it is in bytes
    return Memory(now=peak, peak=peak)


def _status_entries() -> dict[bytes, int]:
    """Bytes by name in `/proc/self/status`: VmHWM, its peak, only where the kernel gives it."""
    file = os.open("/proc/self/status", os.O_RDONLY)  # `open` takes twice as long
    try:
        text = os.read(file, 8192)
    finally:
        os.close(file)
    return {name: int(size) << 10 for name, size in _STATUS.findall(text)}
