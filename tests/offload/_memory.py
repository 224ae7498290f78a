"""What a function allocates, at its peak: counted as it is allocated, not measured in a process."""

import json
import tempfile
import tracemalloc
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

__all__ = ["peak_bytes"]


def peak_bytes(run: Callable[[], object], mapped: int) -> int:
    """Most bytes that torch, in this thread, and Python have allocated at any time of a call.

    The peaks of the two are added.

    Args:
        run: The function, whose result lives to the end.
        mapped: Bytes of a file. torch counts a file that it maps into memory as if it were
            allocated.
    """
    tracemalloc.start()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            kept = run()
        _, of_python = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del kept
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        trace.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    changes = [
        (event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"
    ]
    assert changes
    own = (size for _, size in sorted(changes, key=lambda one: one[0]) if abs(size) < mapped)
    return max(accumulate(own)) + of_python
