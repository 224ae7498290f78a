"""The memory that a process has allocated, at its peak."""

import ctypes
import gc
import threading
from collections.abc import Callable

__all__ = ["allocated_bytes", "peak_bytes"]


def allocated_bytes() -> int:
    """What this process has allocated and not freed; pages of files do not count."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes that a function has allocated at any time; a thread looks every millisecond."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, done, seen = allocated_bytes(), threading.Event(), [0]

    def look() -> None:
        while not done.wait(0.001):
            seen.append(allocated_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        kept = run()
    finally:
        done.set()
        thread.join()
    seen.append(allocated_bytes())
    del kept
    return max(seen) - before
