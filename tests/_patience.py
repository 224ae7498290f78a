"""How much longer tests wait than on a quiet machine, and waiting for an event."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["patience", "wait_for"]

_GIVEN = "TEST_PATIENCE"
_MOST = 10.0
# A pool of two ranks on two quiet cores, once Python's fork server has loaded torch.
_POOL_S = 0.4


def patience(preload: Sequence[str] = ()) -> float:
    """How many times longer than on a quiet machine processes take here: 1 to 10.

    Measured by the first call in a session, which is that of `conftest.py` if tests start
    processes: the time until a pool of two ranks answers, over that on a quiet machine. At least
    the number of processes that are ready to run for each core. The variable TEST_PATIENCE
    overrides it, and has it for the programs that tests start.

    Args:
        preload: What Python's fork server loads as well, if this call starts it.
    """
    if _GIVEN not in os.environ:
        load = os.getloadavg()[0] / _cores()
        measured = max(1.0, min(max(load, _stretch(preload)), _MOST))
        os.environ[_GIVEN] = f"{measured:.2f}"
    return float(os.environ[_GIVEN])


def wait_for(happened: Callable[[], Any], *, timeout_s: float = 60.0) -> Any:
    """Wait until a function returns something true, and return that.

    `timeout_s` is for a quiet machine, and only a failure reaches it.
    """
    deadline = time.monotonic() + timeout_s * patience()
    while not (found := happened()):
        assert time.monotonic() < deadline, f"It did not happen within {timeout_s:g} quiet seconds."
        time.sleep(0.02)
    return found


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _stretch(preload: Sequence[str]) -> float:
    """The time in which two ranks start, over that in which they would if nothing else ran."""
    from fxtrain.testing import Cluster
    from fxtrain.testing.cluster import starter

    start = time.monotonic()
    method = starter(*preload)
    there, here = method.Pipe(duplex=False)
    first = method.Process(target=_send_load_time, args=(here,))
    first.start()
    here.close()  # so that a process that fails is an error
    loading_s = there.recv()
    first.join()
    pool = Cluster(2, timeout_s=60.0)
    try:
        pool.run(_nothing)
    finally:
        pool.close()
    return (time.monotonic() - start) / (loading_s + _POOL_S)


def _send_load_time(pipe: Any) -> None:
    """Send how long a processor has worked to load torch, in this process or its fork server."""
    used = time.process_time()
    if sys.platform == "linux":
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        used = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    pipe.send(used)


def _nothing(ctx: Any) -> None:
    """Answer."""
