"""Signals that arrive here and are meant for the ranks."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["FORWARDED_SIGNALS", "forward_signals", "signal_children"]

# Those with which a scheduler or a person tells a program something; they end nothing here.
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def forward_signals(numbers: tuple[int, ...], give: Callable[[int], None]) -> Iterator[None]:
    """Give signals on for as long as the block runs.

    Args:
        numbers: Which.
        give: Called with the number of one that came, in the main thread.

    Effects:
        Replaces the handlers of these signals and puts them back.
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
    """Processes that this one has started and that still run, where Linux tells."""
    found = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in found for pid in path.read_text().split()]


def signal_children(number: int) -> None:
    """Send a signal to every child.

    A child that ends in this moment needs no signal.
    """
    for pid in _children():
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
