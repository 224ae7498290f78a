"""The memory that a process has allocated, at its peak."""

import ctypes
import gc
import threading
import time
from collections.abc import Callable

__all__ = ["allocated_bytes", "peak_bytes"]


def allocated_bytes() -> int:
    """What this process has allocated and not freed; pages of files do not count."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes that a function has allocated at any time; a thread looks every millisecond."""
    before, done, seen = _settled_bytes(), threading.Event(), [0]

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


def _settled_bytes() -> int:
    """What is allocated once threads of earlier calls have freed what they hold."""
    lowest, unchanged = 2**63, 0
    while unchanged < 6:  # on a busy machine, such a thread may wait for a while
        time.sleep(0.05)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        allocated = allocated_bytes()
        unchanged = unchanged + 1 if lowest - allocated < 2**18 else 0
        lowest = min(lowest, allocated)
    return allocated_bytes()
