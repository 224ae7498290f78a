"""Whether the kernel killed a process because memory ran out, by its counters."""

import re
from pathlib import Path

import attrs


@attrs.frozen(kw_only=True)
class MemoryKills:
    """Kills by the out-of-memory killer so far.

    Attributes:
        group: In the control group of this process, that is, its container or job.
        machine: On the whole machine.
        limit_bytes: Memory limit of the control group; None without a limit.
        counted: Whether the machine has these counters.
    """

    group: int = 0
    machine: int = 0
    limit_bytes: int | None = None
    counted: bool = False


def count_kills(root: Path = Path("/")) -> MemoryKills:
    """Read the counters.

    Args:
        root: Folder that contains /proc and /sys.

    Effects:
        Reads a few small files of the kernel; a missing file counts as 0.
    """
    group = _group(root)
    events = ("memory.events", "memory.oom_control")  # of control groups version 2 and 1
    limits = ("memory.max", "memory.limit_in_bytes")
    kills = [_count(group / name) for name in events]
    bytes_ = [int(text) for name in limits if (text := _read(group / name).strip()).isdigit()]
    return MemoryKills(
        group=max(kills),
        machine=_count(root / "proc/vmstat"),
        # Version 1 writes a number close to 2^63 for no limit.
        limit_bytes=bytes_[0] if bytes_ and bytes_[0] < 1 << 60 else None,
        counted="oom_kill " in _read(root / "proc/vmstat"),
    )


def tell_kills(before: MemoryKills, after: MemoryKills) -> str:
    """Why a rank was ended by SIGKILL.

    Example:
        >>> from fxtrain.launchers import MemoryKills, tell_kills
        >>> tell_kills(MemoryKills(), MemoryKills(group=1, limit_bytes=2**31)).split(":")[0]
        "That was the kernel's out-of-memory killer"
    """
    did = "That was the kernel's out-of-memory killer: "
    advice = "Use a smaller batch, fewer ranks or fewer loader workers, or request more memory."
    if after.group > before.group:
        limit = "" if after.limit_bytes is None else f" of {after.limit_bytes / 2**30:.3g} GiB"
        return f"{did}the processes of this job exceeded its memory{limit}. {advice}"
    if after.machine > before.machine:
        return f"{did}this machine ran out of memory. {advice}"
    if after.counted:
        return "That was not the kernel's out-of-memory killer: another process sent the signal."
    return ""


def _group(root: Path) -> Path:
    """Folder of the memory controller for this process, as in /proc/self/cgroup."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _inside(mount / "memory", path, "memory.oom_control")
    found = re.search(r"^0::(.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE)
    return _inside(mount, found[1] if found else "", "memory.events")


def _inside(mount: Path, path: str, file: str) -> Path:
    # A container sees its own group at the mount and the host's path in /proc.
    here = mount / path.strip("/")
    return here if (here / file).is_file() else mount


def _count(path: Path) -> int:
    found = re.search(r"^oom_kill (\d+)$", _read(path), re.MULTILINE)
    return int(found[1]) if found else 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
