"""Identify the process that writes into a folder, and check whether it still runs."""

import os
import platform
from typing import Any

import attrs

_BOOT, _PIDS = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"


@attrs.frozen(kw_only=True)
class Owner:
    """A process, identified uniquely across machines.

    Attributes:
        host: Name of its machine, for messages.
        machine: Boot id and PID namespace; equal for processes that can see each other, and
            different between containers.
        pid: Process id.
        started: Start time as counted by the kernel, since process ids are reused.
    """

    host: str
    machine: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Owner:
    """The current process."""
    pid = os.getpid()
    return Owner(host=platform.node(), machine=_machine(), pid=pid, started=_about(pid)[1])


def owner_from(data: Any) -> Owner:
    """The owner that `attrs.asdict` turned into a dict.

    Raises:
        ValueError: the data does not describe an owner.
    """
    types = {field.name: field.type for field in attrs.fields(Owner)}
    if not isinstance(data, dict) or data.keys() != types.keys():
        raise ValueError(f"{str(data)[:200]!r} does not describe a process")
    if any(type(data[name]) is not kind for name, kind in types.items()):
        raise ValueError(f"{str(data)[:200]!r} does not describe a process")
    return Owner(**data)


def is_running(owner: Owner) -> bool | None:
    """Whether a process still runs; None if it runs where this process cannot see it."""
    if owner.machine != _machine():
        return None
    if not 0 < owner.pid < 1 << 31:
        return False
    try:
        os.kill(owner.pid, 0)  # signal 0 only checks for existence
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs as another user
    state, started = _about(owner.pid)
    return state not in ("Z", "X") and started in ("", owner.started)


def _machine() -> str:
    try:
        with open(_BOOT) as file:
            return f"{file.read().strip()} {os.readlink(_PIDS)}"
    except OSError:  # not Linux
        return platform.node()


def _about(pid: int) -> tuple[str, str]:
    """The state and start time of a process; empty if the system does not report them."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The name, in parentheses, may contain any character.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
