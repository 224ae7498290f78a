"""Host memory: what is free, and what this process uses."""

import importlib
import os
import re
import sys
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_GROUPS_OF_THIS = Path("/proc/self/cgroup")
_STATUS_OF_THIS = Path("/proc/self/status")


def process_memory() -> tuple[int, int]:
    """Resident bytes of this process now, and the most so far; 0 where the system does not say.

    On Linux both are read from one file, since `getrusage` lets other processes run first. Its
    peak may also be that of a parent process.
    """
    if sys.platform == "linux":
        text = _text(_STATUS_OF_THIS)
        sizes = dict(re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB$", text, re.MULTILINE))
        if now := int(sizes.get("VmRSS", 0)) << 10:
            return now, max(now, int(sizes.get("VmHWM", 0)) << 10)
    if sys.platform == "win32":
        return 0, 0
    resource = importlib.import_module("resource")  # not on every system
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = most if sys.platform == "darwin" else most << 10  # there it is in bytes
    return peak, peak


def available_memory() -> tuple[int, int, int]:
    """Bytes that this process and its children may still take, and of how many; the machine's.

    The first two are those of the container or job that the process is in, where it has a limit.
    Zeros where the system does not say.
    """
    sizes = dict(re.findall(r"(\w+):\s+(\d+) kB", _text(Path("/proc/meminfo"))))
    available, total = (int(sizes.get(name, 0)) << 10 for name in ("MemAvailable", "MemTotal"))
    if not sizes and "SC_AVPHYS_PAGES" in os.sysconf_names:
        page = os.sysconf("SC_PAGE_SIZE")
        available, total = (os.sysconf(f"SC_{name}_PAGES") * page for name in ("AVPHYS", "PHYS"))
    rooms, limits = zip((available, total), *_rooms(), strict=True)
    return min(rooms), min(limits), total


def _rooms() -> list[tuple[int, int]]:
    """Free bytes and the limit of each control group that this process is in."""
    rooms: list[tuple[int, int]] = []
    for line in _text(_GROUPS_OF_THIS).splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        base, most, used, cached = _CGROUPS, "max", "current", "inactive_file"
        if kinds:  # the first version of control groups
            base, most, used = base / "memory", "limit_in_bytes", "usage_in_bytes"
            cached = "total_inactive_file"
        # A container may see its own group as the outermost one, under the name outside.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            limit, use = (_text(folder / f"memory.{name}").strip() for name in (most, used))
            if limit.isdecimal() and use.isdecimal():
                counts = dict(re.findall(r"(\w+) (\d+)", _text(folder / "memory.stat")))
                # The kernel drops copies of files that nobody has used lately.
                room = int(limit) - int(use) + int(counts.get(cached, 0))
                rooms.append((max(room, 0), int(limit)))
    return rooms


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
