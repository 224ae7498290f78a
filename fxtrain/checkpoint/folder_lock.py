"""Lock a folder, so that one process at a time writes into it, even after one was killed.

A folder has two locks: one is held while a checkpoint is saved, the other while a run is open.

A lock is a small file with a numbered name, which only one process can create. It names its
holder and changes while the holder is alive. A process that finds the lock of a dead process
creates the next number, so two processes that find the same dead lock cannot both acquire it.
After creating its lock, a process looks again and withdraws if a live one has appeared.
"""

import json
import logging
import secrets
import threading
import time

import attrs

from fxtrain.checkpoint.owner import Owner, is_running, owner_from, this_process
from fxtrain.checkpoint.storage import Storage
from fxtrain.errors import CheckpointError
from fxtrain.state import parse_json

_LOG = logging.getLogger(__name__)
_HEARTBEAT_INTERVAL_S = 2.0  # between heartbeats of a holder
STALE_S = 20.0  # without a heartbeat, after which a holder on another machine is considered dead
_POLL_INTERVAL_S = 0.25
_RUN = "run-"  # how names of locks of runs begin


@attrs.frozen(kw_only=True, eq=False)
class Lock:
    """A lock on a folder, held by this process until `release`.

    Attributes:
        folder: The locked folder.
        name: Name of the lock.
        owner: This process.
        token: Identifies this lock uniquely.
        ended: Set on release.
        heartbeats: The heartbeat thread.
    """

    folder: Storage
    name: str
    owner: Owner
    token: str
    ended: threading.Event = attrs.field(factory=threading.Event)
    heartbeats: list[threading.Thread] = attrs.field(factory=list)

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
        if self.ended.is_set():
            return
        self.ended.set()
        for thread in self.heartbeats:
            thread.join()
        try:
            ours = self.is_ours()
        except (CheckpointError, OSError):  # unreadable, but created by this process
            ours = True
        try:
            if ours:
                self.folder.unlock(self.name)
        except OSError as error:  # the checkpoint is committed nevertheless
            _LOG.warning("The lock %s of %s cannot be removed: %s", self.name, self.folder, error)

    def bytes(self, beat: int) -> bytes:
        """The content of the file; its length does not depend on `beat`."""
        owner = attrs.asdict(self.owner)
        return json.dumps({"token": self.token, "owner": owner, "beat": f"{beat:012d}"}).encode()

    def refresh(self) -> None:
        """Send heartbeats until the lock is released."""
        count = 0
        while not self.ended.wait(_HEARTBEAT_INTERVAL_S):
            count += 1
            try:
                if not self.is_ours():
                    return  # `check` raises before the commit
                self.folder.refresh_lock(self.name, self.bytes(count))
            except (OSError, CheckpointError) as error:
                _LOG.warning("The lock %s of %s: %s", self.name, self.folder, error)

    def is_ours(self) -> bool:
        """Whether no other process has taken over the folder."""
        raw = self.folder.locked(self.name)
        return raw is not None and read_lock(raw)[0] == self.token


def acquire(folder: Storage, *, for_run: bool = False) -> Lock:
    """Lock an existing folder for saving, or for a run.

    Raises:
        CheckpointError: another process is saving there, or has a run there.
        OSError: the lock cannot be written.
    """
    dead = {name: folder.locked(name) for name in _locks(folder, for_run=for_run)}
    for name in dead:
        _refuse_if_held(folder, name)
    number = 1 + max(map(_number, dead), default=0)
    lock = Lock(
        folder=folder,
        name=_RUN * for_run + f"{number:09d}",
        owner=this_process(),
        token=secrets.token_hex(8),
    )
    try:
        folder.lock(lock.name, lock.bytes(0))
    except FileExistsError:
        raise _busy(folder, lock.name) from None
    try:
        for name in _locks(folder, for_run=for_run) - {lock.name}:
            # Also a number that was given again, after the dead lock and its successor had gone.
            if folder.locked(name) != dead.get(name):
                _refuse_if_held(folder, name)
            folder.unlock(name)
        lock.check()
    except BaseException:
        lock.release()
        raise
    thread = threading.Thread(target=lock.refresh, name="fxtrain lock", daemon=True)
    lock.heartbeats.append(thread)
    thread.start()
    return lock


def _locks(folder: Storage, *, for_run: bool) -> set[str]:
    """Names of the locks of one of the two kinds."""
    return {name for name in folder.locks() if name.startswith(_RUN) == for_run}


def _refuse_if_held(folder: Storage, name: str) -> None:
    """Raise if a live process holds this lock."""
    raw = folder.locked(name)
    if raw is None:
        return  # already released
    owner = read_lock(raw)[1]
    held = None if owner is None else is_running(owner)
    if held is None:
        _LOG.warning(
            "%s has a lock of %s: waiting up to %.0f s for a sign that it is alive.",
            *(folder, owner or "another process", STALE_S),
        )
        held = _changes(folder, name, raw)
    if held:
        raise _busy(folder, name)


def _changes(folder: Storage, name: str, raw: bytes) -> bool:
    """Whether the holder of a lock sends heartbeats; compares no clocks."""
    deadline = time.monotonic() + STALE_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
        now = folder.locked(name)
        if now is None:
            return False
        if now != raw:
            return True
    return False


def _busy(folder: Storage, name: str) -> CheckpointError:
    raw = folder.locked(name)
    owner = None if raw is None else read_lock(raw)[1]
    who = "another process" if owner is None else f"{owner}"
    if owner is not None and owner == this_process():
        who += ", this process"
    if name.startswith(_RUN):
        return CheckpointError(
            f"{folder} is the folder of a run that is open in {who}. One run at a time can write "
            f"into a folder: use a folder per run, or wait until the other run ends.",
            code="FX605",
        )
    return CheckpointError(
        f"{folder} is being written by {who}. One run at a time can save into a folder: use a "
        f"folder per run, or wait until the other save ends.",
        code="FX605",
    )


def read_lock(raw: bytes) -> tuple[str | None, Owner | None]:
    """(token, owner) of a lock; None if malformed, for example partially written."""
    try:
        data = parse_json(raw)
        return data["token"], owner_from(data["owner"])
    except (ValueError, LookupError, TypeError):
        return None, None


def _number(name: str) -> int:
    name = name.removeprefix(_RUN)
    return int(name) if name.isdecimal() and len(name) < 19 else 0
