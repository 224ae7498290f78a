"""Which process writes into a folder, and whether it still runs."""

import os
import platform
from typing import Any

import attrs

__all__ = ["Owner", "is_running", "owner_from", "this_process"]

_BOOT, _PIDS = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"


@attrs.frozen(kw_only=True)
class Owner:
    """A process, told apart from every other one on any machine.

    Attributes:
        host: Name of its machine, for people.
        machine: Equal for processes that can see each other: the boot of the machine and the
            namespace of process ids, which differs between containers.
        pid: Its number.
        started: When it started, in the kernel's count: a number is given to processes again.
    """

    host: str
    machine: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Owner:
    """The process that asks."""
    pid = os.getpid()
    return Owner(host=platform.node(), machine=_machine(), pid=pid, started=_about(pid)[1])


def owner_from(data: Any) -> Owner:
    """The owner that somebody wrote down with `attrs.asdict`.

    Raises:
        ValueError: it is not one.
    """
    types = {field.name: field.type for field in attrs.fields(Owner)}
    if not isinstance(data, dict) or data.keys() != types.keys():
        raise ValueError(f"{str(data)[:200]!r} is not a process")
    if any(type(data[name]) is not kind for name, kind in types.items()):
        raise ValueError(f"{str(data)[:200]!r} is not a process")
    return Owner(**data)


def is_running(owner: Owner) -> bool | None:
    """Whether a process still runs; None if it runs where this process cannot see it."""
    if owner.machine != _machine():
        return None
    if not 0 < owner.pid < 1 << 31:
        return False
    try:
        os.kill(owner.pid, 0)  # sends nothing: it only looks
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs, as another user
    state, started = _about(owner.pid)
    return state not in ("Z", "X") and started in ("", owner.started)


def _machine() -> str:
    try:
        with open(_BOOT) as file:
            return f"{file.read().strip()} {os.readlink(_PIDS)}"
    except OSError:  # not Linux
        return platform.node()


def _about(pid: int) -> tuple[str, str]:
    """The state of a process and when it started; empty where the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The name, in parentheses, may hold anything.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
