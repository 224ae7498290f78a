"""Lock a folder, so that one process at a time writes into it, even after one was killed.

A lock is a file that one process creates. It names its holder, and changes while the holder is
alive. The lock of a process that has ended, or does not change, is replaced.
"""

import json
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import attrs

from fxtrain.checkpoint.storage import Storage
from fxtrain.errors import CheckpointError
from fxtrain.state.parsing import parse_json

_LOG = logging.getLogger(__name__)
_MAX_BYTES = 1 << 16
_HEARTBEAT_INTERVAL_S = 2.0  # between heartbeats of a holder
STALE_S = 20.0  # without a heartbeat, after which a holder is considered dead
_POLL_INTERVAL_S = 0.25
_BOOT, _PIDS = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"


Process = tuple[str, int, str]  # the machine, the process id there, and when it started


def this_process() -> dict[str, Any]:
    """The current process, with its host for messages."""
    try:
        with open(_BOOT) as file:  # different after a restart, and in another container
            machine = f"{file.read().strip()} {os.readlink(_PIDS)}"
    except OSError:  # not Linux
        machine = platform.node()
    pid = os.getpid()
    return {"host": platform.node(), "machine": machine, "pid": pid, "started": _started(pid)}


def process_of(owner: Mapping[str, Any]) -> Process:
    """The process that `this_process` described."""
    return str(owner["machine"]), int(owner["pid"]), str(owner.get("started"))


def is_running(machine: str, pid: int, started: str) -> bool | None:
    """Whether a process runs; None if that cannot be seen here."""
    if machine != this_process()["machine"]:
        return None
    try:
        os.kill(pid, 0)  # signal 0 only checks for existence
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # a process with this number runs as another user
    now = _started(pid)
    return None if now is None else now == started


def _started(pid: int) -> str | None:
    """When a process started, which distinguishes it from later ones with its number."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2].split()[19]
    except OSError:  # not Linux, or hidden from this user
        return None


@attrs.define(kw_only=True, eq=False)
class Lock:
    """A lock on a folder, held by this process until `release`; a thread sends heartbeats."""

    folder: Storage
    name: str
    token: str = attrs.field(factory=secrets.token_hex)  # identifies this lock
    _ended: threading.Event = attrs.field(factory=threading.Event, init=False)
    _thread: threading.Thread | None = attrs.field(default=None, init=False)

    def check(self) -> None:
        """Check that this process still holds the lock.

        Raises:
            CheckpointError: another process took over the folder, because this one sent no
                heartbeat for too long.
        """
        if not self.is_ours():
            raise CheckpointError(
                f"Another run took over the lock of {self.folder}, because this process sent no "
                f"heartbeat for {STALE_S:.0f} s. Checkpoints of the other run were not changed. "
                f"Save again.",
                code="FX605",
            )

    def is_ours(self) -> bool:
        """Whether no other process has taken over the folder."""
        return self.token.encode() in (_read(self.folder, self.name) or b"")

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread is not None:
            self._thread.join()  # in a store, its last heartbeat would create the lock again
        try:
            if self.is_ours():
                self.folder.unlink(self.name)
        except (OSError, CheckpointError) as error:  # the checkpoint is committed nevertheless
            _LOG.warning("The lock %s of %s cannot be removed: %s", self.name, self.folder, error)

    def put(self, beat: int) -> None:
        """Create the file, or replace it by one that differs in `beat`, of the same length."""
        content = {"token": self.token, "owner": this_process(), "beat": f"{beat:012d}"}
        self.folder.put(self.name, json.dumps(content).encode(), new=not beat)

    def start(self) -> None:
        """Start to send heartbeats."""
        self._thread = threading.Thread(
            target=self._send_heartbeats, name="fxtrain lock", daemon=True
        )
        self._thread.start()

    def _send_heartbeats(self) -> None:
        """Change the lock until it is released or lost."""
        beat = 0
        while not self._ended.wait(_HEARTBEAT_INTERVAL_S):
            beat += 1
            try:
                if not self.is_ours():
                    return  # `check` raises before the commit
                self.put(beat)
            except (OSError, CheckpointError) as error:
                _LOG.warning("The lock %s of %s: %s", self.name, self.folder, error)


def acquire(folder: Storage, name: str = ".lock-save") -> Lock:
    """Lock an existing folder.

    Args:
        folder: The folder.
        name: Of the file: a folder may have several locks.

    Raises:
        CheckpointError: another process holds the lock.
        OSError: the lock cannot be written.
    """
    lock = Lock(folder=folder, name=name)
    with folder.exclusive():  # processes that find the same abandoned lock take turns
        earlier = _read(folder, name)
        if earlier is not None and _is_held(folder, name, earlier):
            raise _busy(folder, earlier)
        # A process on another machine may have been faster.
        if earlier is not None and _read(folder, name) == earlier:
            folder.unlink(name)
        try:
            lock.put(0)
        except FileExistsError:
            raise _busy(folder, _read(folder, name)) from None
        try:
            ours = lock.is_ours()  # a store without conditional writes has the other's
        except BaseException:
            with suppress(OSError, CheckpointError):
                folder.unlink(name)
            raise
    if not ours:
        raise _busy(folder, _read(folder, name))
    lock.start()
    return lock


def _read(folder: Storage, name: str) -> bytes | None:
    """The bytes of a lock; None if it does not exist."""
    try:
        return folder.read(name, _MAX_BYTES)
    except FileNotFoundError:
        return None


def _is_held(folder: Storage, name: str, raw: bytes) -> bool:
    """Whether the holder of a lock is alive; compares no clocks."""
    host, process = _owner_of(raw)
    if (running := is_running(*process)) is not None:
        return running
    _LOG.warning(
        "%s has a lock of process %s on %s: waiting up to %.0f s for a sign that it is alive.",
        *(folder, process[1], host, STALE_S),
    )
    deadline = time.monotonic() + STALE_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
        now = _read(folder, name)
        if now != raw:
            return now is not None  # else it was released
    return False


def _busy(folder: Storage, raw: bytes | None) -> CheckpointError:
    host, (_, pid, _) = _owner_of(raw)
    return CheckpointError(
        f"{folder} is in use by process {pid} on {host}. One run at a time can "
        f"write into a folder: use a folder per run, or wait until the other one ends.",
        code="FX605",
    )


def _owner_of(raw: bytes | None) -> tuple[str, Process]:
    """The host and process that a lock names; unknown ones if it is partially written."""
    try:
        owner = parse_json(raw or b"")["owner"]
        return str(owner["host"]), process_of(owner)
    except (ValueError, LookupError, TypeError):
        return "an unknown machine", ("", 0, "")
