"""Lock a folder, so that one process at a time writes into it, even after one was killed.

A folder has two locks: one is held while a checkpoint is saved, the other while a run is open. A
lock is a file that one process creates. It names its holder, and changes while the holder is
alive. The lock of a process that has ended is replaced.
"""

import json
import logging
import os
import platform
import secrets
import threading
import time
from typing import Any

import attrs
from attrs.validators import instance_of

from fxtrain.checkpoint.storage import Storage
from fxtrain.errors import CheckpointError
from fxtrain.state.parsing import parse_json

_LOG = logging.getLogger(__name__)
_SAVE, _RUN = ".lock-save", ".lock-run"
_MAX_BYTES = 1 << 16
_HEARTBEAT_INTERVAL_S = 2.0  # between heartbeats of a holder
STALE_S = 20.0  # without a heartbeat, after which a holder on another machine is considered dead
_POLL_INTERVAL_S = 0.25
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

    host: str = attrs.field(validator=instance_of(str))
    machine: str = attrs.field(validator=instance_of(str))
    pid: int = attrs.field(validator=instance_of(int))
    started: str = attrs.field(validator=instance_of(str))

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
    try:
        return Owner(**data)
    except TypeError:
        raise ValueError(f"{str(data)[:200]!r} does not describe a process") from None


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


@attrs.define(kw_only=True, eq=False)
class Lock:
    """A lock on a folder, held by this process until `release`; a thread sends heartbeats."""

    folder: Storage
    name: str
    owner: Owner
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

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread is not None:
            self._thread.join()  # in a store, its last heartbeat would create the lock again
        try:
            ours = self.is_ours()
        except (CheckpointError, OSError):  # unreadable, but created by this process
            ours = True
        try:
            if ours:
                self.folder.unlink(self.name)
        except OSError as error:  # the checkpoint is committed nevertheless
            _LOG.warning("The lock %s of %s cannot be removed: %s", self.name, self.folder, error)

    def bytes(self, beat: int) -> bytes:
        """The content of the file; its length does not depend on `beat`."""
        owner = attrs.asdict(self.owner)
        return json.dumps({"token": self.token, "owner": owner, "beat": f"{beat:012d}"}).encode()

    def start(self) -> None:
        """Start to send heartbeats."""
        self._thread = threading.Thread(
            target=self._send_heartbeats, name="fxtrain lock", daemon=True
        )
        self._thread.start()

    def _send_heartbeats(self) -> None:
        """Change the lock until it is released or lost."""
        count = 0
        while not self._ended.wait(_HEARTBEAT_INTERVAL_S):
            count += 1
            try:
                if not self.is_ours():
                    return  # `check` raises before the commit
                self.folder.put(self.name, self.bytes(count), new=False)
            except (OSError, CheckpointError) as error:
                _LOG.warning("The lock %s of %s: %s", self.name, self.folder, error)

    def is_ours(self) -> bool:
        """Whether no other process has taken over the folder."""
        return self.token.encode() in (_read(self.folder, self.name) or b"")


def acquire(folder: Storage, *, for_run: bool = False) -> Lock:
    """Lock an existing folder for saving, or for a run.

    Raises:
        CheckpointError: another process is saving there, or has a run there.
        OSError: the lock cannot be written.
    """
    lock = Lock(folder=folder, name=_RUN if for_run else _SAVE, owner=this_process())
    with folder.exclusive():  # processes that find the same abandoned lock take turns
        abandoned = _read(folder, lock.name)
        if abandoned is not None and _is_held(folder, lock.name, abandoned):
            raise _busy(folder, lock.name)
        # A process on another machine may have been faster.
        if abandoned is not None and _read(folder, lock.name) == abandoned:
            folder.unlink(lock.name)
        try:
            folder.put(lock.name, lock.bytes(0), new=True)
        except FileExistsError:
            raise _busy(folder, lock.name) from None
    try:
        ours = lock.is_ours()  # a store without conditional writes has the other's
    except BaseException:
        lock.release()
        raise
    if not ours:
        raise _busy(folder, lock.name)
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
    owner = owner_of(raw)
    running = None if owner is None else is_running(owner)
    if running is not None:
        return running
    _LOG.warning(
        "%s has a lock of %s: waiting up to %.0f s for a sign that it is alive.",
        *(folder, owner or "another process", STALE_S),
    )
    deadline = time.monotonic() + STALE_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
        now = _read(folder, name)
        if now != raw:
            return now is not None  # else it was released
    return False


def _busy(folder: Storage, name: str) -> CheckpointError:
    owner = owner_of(_read(folder, name))
    who = "another process" if owner is None else f"{owner}"
    if owner is not None and owner == this_process():
        who += ", this process"
    if name == _RUN:
        text = (
            f"{folder} is the folder of a run that is open in {who}. One run at a time can write "
            f"into a folder: use a folder per run, or wait until the other run ends."
        )
    else:
        text = (
            f"{folder} is being written by {who}. One run at a time can save into a folder: use a "
            f"folder per run, or wait until the other save ends."
        )
    return CheckpointError(text, code="FX605")


def owner_of(raw: bytes | None) -> Owner | None:
    """The owner that a lock names; None if it does not, for example if it is partially written."""
    try:
        return owner_from(parse_json(raw or b"")["owner"])
    except (ValueError, LookupError, TypeError):
        return None
