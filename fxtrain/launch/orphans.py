"""What ranks have started and left behind: found by a mark that it inherits, and ended.

Every rank has a mark of its launch among its variables, which its children inherit, and theirs,
also those that have become daemons. So they are found whoever their parent is by now, and also
after the launcher was killed. A process that clears its variables is not found, unless it is in
the session of a rank. Linux tells variables and sessions; elsewhere nothing is found.

Run as a file, `python _strays.py PARENT MARK PATIENCE SESSIONS...`, this is the keeper of a
launch: a small process that outlives a launcher that was killed. So only the standard library
is used.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = ["MARK", "end_strays", "kept", "mark_within"]

# Marks of the launches that a process belongs to, the innermost last.
MARK = "FXTRAIN_LAUNCHES"
_POLL_INTERVAL_S = 0.05
_KEEPER_POLL_INTERVAL_S = 0.5
# Processes end at once by SIGKILL, unless the kernel holds them.
_KILLED_S = 5.0


def mark_within(env: Mapping[str, str]) -> str:
    """A new mark for a launch, beside those of the launches that it runs in.

    Example:
        >>> from fxtrain.launch.orphans import mark_within
        >>> mark_within({"FXTRAIN_LAUNCHES": "a1"}).startswith("a1:")
        True
    """
    outer = env.get(MARK, "")
    mine = os.urandom(8).hex()
    return f"{outer}:{mine}" if outer else mine


@contextmanager
def kept(mark: str, *, patience_s: float, sessions: Collection[int] = ()) -> Iterator[None]:
    """Have the ranks of a launch ended should this process be killed within the block.

    Args:
        mark: Of the launch.
        patience_s: Time from the end of this process until they are killed.
        sessions: Process IDs of ranks that lead a session.

    Effects:
        Starts a small process, and ends it. On other systems than Linux, nothing.
    """
    if sys.platform != "linux":
        yield
        return
    words = (str(os.getpid()), mark, str(patience_s), *map(str, sessions))
    with _keeper(words) as keeper:
        try:
            yield
        finally:
            keeper.kill()


def _keeper(words: tuple[str, ...]) -> "subprocess.Popen[bytes]":
    # A process keeps the signals blocked that its parent blocks. Those that a launcher gives on
    # to its children are for the ranks, and would end this one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    try:
        return subprocess.Popen(
            (sys.executable, "-I", "-S", __file__, *words),
            env={},  # so that it does not carry the marks of outer launches
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_strays(mark: str, *, patience_s: float, ask: bool, sessions: Collection[int] = ()) -> None:
    """End what the ranks of a launch have left behind.

    Args:
        mark: Of the launch.
        patience_s: Time that the processes have to end by themselves, before they are killed.
        ask: Send them SIGTERM first.
        sessions: Process IDs of ranks that led a session.

    Effects:
        Sends signals; waits until the processes have ended.
    """
    known = _Launch(mark, sessions)
    if ask:
        known.send(signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while known.found() and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
    deadline = time.monotonic() + _KILLED_S
    while known.found() and time.monotonic() < deadline:
        known.send(signal.SIGKILL)
        time.sleep(_POLL_INTERVAL_S / 10)


class _Launch:
    """The processes of one launch."""

    def __init__(self, mark: str, sessions: Collection[int]) -> None:
        self._mark = mark.encode()
        self._sessions = frozenset(sessions)

    def found(self) -> list[int]:
        """Process IDs of those that run; this process is none of them."""
        if sys.platform != "linux":
            return []
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        return [pid for pid in pids if pid != os.getpid() and self._has(pid)]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to each of them."""
        for pid in self.found():
            try:
                os.kill(pid, number)
            except ProcessLookupError:  # it has ended meanwhile
                continue

    def _has(self, pid: int) -> bool:
        try:
            state, session = _state(pid)
            if state in "ZX":  # ended, and not yet looked at by its parent
                return False
            return session in self._sessions or self._is_marked(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False  # it has ended, or belongs to somebody else

    def _is_marked(self, pid: int) -> bool:
        start = f"{MARK}=".encode()
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(start):
                marks = variable.removeprefix(start)
                return marks == self._mark or marks.startswith(self._mark + b":")
        return False


def _state(pid: int) -> tuple[str, int]:
    """The state of a process and its session, from proc_pid_stat(5)."""
    words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return words[0], int(words[3])


def main() -> None:
    """Wait until the launcher has gone, which ends this process if it can, and end its ranks."""
    parent, mark, patience_s, *sessions = sys.argv[1:]
    while os.getppid() == int(parent):
        time.sleep(_KEEPER_POLL_INTERVAL_S)
    # The ranks have got SIGTERM from the kernel.
    end_strays(mark, patience_s=float(patience_s), ask=False, sessions=[*map(int, sessions)])


if __name__ == "__main__":
    main()
