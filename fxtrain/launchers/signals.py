"""Forwards signals to the ranks."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Signals by which a scheduler or a person notifies a program; they end nothing here.
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def forward_signals(numbers: tuple[int, ...], give: Callable[[int], None]) -> Iterator[None]:
    """Forward signals while the block runs.

    Args:
        numbers: The signals.
        give: Called with the number of each signal received, in the main thread.

    Effects:
        Replaces the handlers of these signals and restores them.
    """

    def handle(number: int, frame: Any) -> None:
        give(number)

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is a handler that was not set by Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _children() -> list[int]:
    """Processes that this one has started and that still run, where Linux shows them."""
    found = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in found for pid in path.read_text().split()]


def signal_children(number: int) -> None:
    """Send a signal to every child.

    A child that has just exited needs no signal.
    """
    for pid in _children():
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
