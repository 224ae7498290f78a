"""Processes that ranks started and left behind: found by an inherited mark, and ended.

Every rank has a mark of its launch in its environment, which its children inherit, and theirs,
including daemons. So they are found whoever their parent is by now, even after the launcher was
killed. A process that clears its environment is not found. Linux shows the environment of a
process; on other systems nothing is found.

Run as a file, `python orphans.py PARENT MARK PATIENCE`, this is the keeper of a
launch: a small process that outlives a killed launcher. So it uses only the standard library.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

# Marks of the launches that a process belongs to, the innermost last.
MARK = "FXTRAIN_LAUNCHES"
_POLL_INTERVAL_S = 0.05
_KEEPER_POLL_INTERVAL_S = 0.5
# SIGKILL ends processes at once, unless the kernel blocks them.
_KILLED_S = 5.0


def mark_within(env: Mapping[str, str]) -> str:
    """A new mark for a launch, after those of the launches in which it runs."""
    outer = env.get(MARK, "")
    token = os.urandom(8).hex()
    return f"{outer}:{token}" if outer else token


@contextmanager
def kept(mark: str, *, patience_s: float) -> Iterator[None]:
    """End a launch's ranks `patience_s` after this process was killed in the block; Linux only."""
    if sys.platform != "linux":
        yield
        return
    # A process inherits its parent's blocked signals. Those that a launcher forwards to its
    # children are for the ranks, and would end this process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    try:
        keeper = subprocess.Popen(
            (sys.executable, "-I", "-S", __file__, str(os.getpid()), mark, str(patience_s)),
            env={},  # so that it does not carry the marks of outer launches
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with keeper:
        try:
            yield
        finally:
            keeper.kill()


def end_strays(mark: str, *, patience_s: float, ask: bool) -> None:
    """End processes that ranks left behind, after `patience_s`; with `ask`, send SIGTERM first."""
    if ask:
        _send(signal.SIGTERM, mark)
    deadline = time.monotonic() + patience_s
    while _running(mark) and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
    deadline = time.monotonic() + _KILLED_S
    while _running(mark) and time.monotonic() < deadline:
        _send(signal.SIGKILL, mark)
        time.sleep(_POLL_INTERVAL_S / 10)


def _running(mark: str) -> list[int]:
    """Process IDs of a launch, without this process."""
    if sys.platform != "linux":
        return []
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if pid != os.getpid() and _belongs(pid, mark)]


def _send(number: signal.Signals, mark: str) -> None:
    for pid in _running(mark):
        with suppress(ProcessLookupError):  # it has exited in the meantime
            os.kill(pid, number)


def _belongs(pid: int, mark: str) -> bool:
    try:
        # That of a process that has exited, and is not yet reaped by its parent, is empty.
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False  # it has exited, or belongs to another user
    # Launches within this one add their marks after a colon.
    return any(f"{variable}:".startswith(f"{MARK}={mark}:") for variable in variables)


def main() -> None:
    """Wait until the launcher has exited, which usually ends this process, then end its ranks."""
    parent, mark, patience_s = sys.argv[1:]
    while os.getppid() == int(parent):
        time.sleep(_KEEPER_POLL_INTERVAL_S)
    # The kernel has sent SIGTERM to the ranks.
    end_strays(mark, patience_s=float(patience_s), ask=False)


if __name__ == "__main__":
    main()
