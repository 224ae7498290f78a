"""One saver at a time in a folder, also where the last one was killed in the middle.

A lock is a small file whose name, with a number, can be created by one process only. It says
who holds it, and changes while its holder lives. Who finds the lock of a process that has ended
creates the next number instead: a name is never taken over, so that two processes that find the
same dead lock cannot both have it. After creating its lock a process looks again, and withdraws
if it sees a live one that was not there before.
"""

import json
import logging
import secrets
import threading
import time

import attrs

from fxtrain._errors import CheckpointError
from fxtrain.checkpoint.local_storage import Storage
from fxtrain.checkpoint.owner import Owner, is_running, owner_from, this_process
from fxtrain.state import parse_json

__all__ = ["Lock", "STALE_S", "acquire"]

_LOG = logging.getLogger(__name__)
_HEARTBEAT_INTERVAL_S = 2.0  # how often a holder shows that it lives
STALE_S = 20.0  # after which a holder on another machine that has shown nothing counts as dead
_POLL_INTERVAL_S = 0.25


@attrs.frozen(kw_only=True, eq=False)
class Lock:
    """A folder that is ours until `release`.

    Attributes:
        folder: Which.
        name: Of the lock.
        owner: This process.
        token: Tells this lock from every other one.
        ended: Set when it is released.
        heartbeats: Thread that shows that we live.
    """

    folder: Storage
    name: str
    owner: Owner
    token: str
    ended: threading.Event = attrs.field(factory=threading.Event)
    heartbeats: list[threading.Thread] = attrs.field(factory=list)

    def check(self) -> None:
        """Make sure that it is still ours.

        Raises:
            CheckpointError: another process has taken the folder, since this one was silent
                for so long that it looked dead.
        """
        if not self.is_ours():
            raise CheckpointError(
                f"Another run took over the lock of {self.folder}, since this process showed no "
                f"sign of life for {STALE_S:.0f} s. Nothing of the other run was changed: save "
                f"again."
            )

    def release(self) -> None:
        """Let others save; a second call does nothing."""
        if self.ended.is_set():
            return
        self.ended.set()
        for thread in self.heartbeats:
            thread.join()
        try:
            ours = self.is_ours()
        except CheckpointError:  # it cannot be read, and we made it
            ours = True
        try:
            if ours:
                self.folder.unlock(self.name)
        except OSError as error:  # the checkpoint is there all the same
            _LOG.warning("The lock %s of %s cannot be removed: %s", self.name, self.folder, error)

    def bytes(self, beat: int) -> bytes:
        """What is in the file, at every count as many bytes."""
        owner = attrs.asdict(self.owner)
        return json.dumps({"token": self.token, "owner": owner, "beat": f"{beat:012d}"}).encode()

    def refresh(self) -> None:
        """Show until the release that this process lives."""
        count = 0
        while not self.ended.wait(_HEARTBEAT_INTERVAL_S):
            count += 1
            try:
                if not self.is_ours():
                    return  # `check` says so before the commit
                self.folder.refresh_lock(self.name, self.bytes(count))
            except (OSError, CheckpointError) as error:
                _LOG.warning("The lock %s of %s: %s", self.name, self.folder, error)

    def is_ours(self) -> bool:
        """Whether nobody has taken the folder since."""
        raw = self.folder.locked(self.name)
        return raw is not None and _read(raw)[0] == self.token


def acquire(folder: Storage) -> Lock:
    """Be the only one that saves in a folder, which is there.

    Raises:
        CheckpointError: another process is saving there.
        OSError: the lock cannot be written.
    """
    seen = set(folder.locks())
    for name in seen:
        _refuse_if_held(folder, name)
    number = 1 + max(map(_number, seen), default=0)
    lock = Lock(
        folder=folder,
        name=_name(number),
        owner=this_process(),
        token=secrets.token_hex(8),
    )
    try:
        folder.lock(lock.name, lock.bytes(0))
    except FileExistsError:
        raise _busy(folder, lock.name) from None
    try:
        for name in set(folder.locks()) - seen - {lock.name}:
            _refuse_if_held(folder, name)
            seen.add(name)
        for name in seen:
            folder.unlock(name)
        lock.check()
    except BaseException:
        lock.release()
        raise
    thread = threading.Thread(target=lock.refresh, name="fxtrain lock", daemon=True)
    lock.heartbeats.append(thread)
    thread.start()
    return lock


def _refuse_if_held(folder: Storage, name: str) -> None:
    """Raise if a process that lives holds this lock."""
    raw = folder.locked(name)
    if raw is None:
        return  # released meanwhile
    owner = _read(raw)[1]
    held = None if owner is None else is_running(owner)
    if held is None:
        held = _changes(folder, name, raw)
    if held:
        raise _busy(folder, name)


def _changes(folder: Storage, name: str, raw: bytes) -> bool:
    """Whether the holder of a lock shows that it lives. No clocks are compared."""
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
    owner = None if raw is None else _read(raw)[1]
    who = "another process" if owner is None else f"{owner}"
    if owner is not None and owner == this_process():
        who += ", which is this one"
    return CheckpointError(
        f"{folder} is being written by {who}. One run at a time saves into a folder: give each "
        f"its own, or wait until the other has saved."
    )


def _read(raw: bytes) -> tuple[str | None, Owner | None]:
    """(token, owner) of a lock; None for what cannot be read, as of one half written."""
    try:
        data = parse_json(raw)
        return data["token"], owner_from(data["owner"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None, None


def _name(number: int) -> str:
    return f"{number:09d}"


def _number(name: str) -> int:
    return int(name) if name.isdecimal() and len(name) < 19 else 0
