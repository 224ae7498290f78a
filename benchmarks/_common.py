"""Timing and tables shared by the benchmarks."""

import statistics
import sys
import time
from collections.abc import Callable

import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

console = Console(width=100)


def interleaved(
    runs: dict[str, Callable[[], object]],
    *,
    rounds: int,
    each: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Median seconds per call; runs take turns, so that noise meets all of them alike.

    Args:
        before: Called before each run, and not timed, such as a barrier: otherwise a run also pays
            for the rank that was late in the run before.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    turns = list(runs.items())
    for _ in range(rounds):
        turns.append(turns.pop(0))  # each run pays for what another one left in caches
        for name, run in turns:
            before()
            started = time.perf_counter()
            for _ in range(each):
                run()
            times[name].append((time.perf_counter() - started) / each)
    return {name: statistics.median(taken) for name, taken in times.items()}


def for_seconds(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median seconds per call of runs that take turns for about so long.

    Three turns at least, but one where that takes longer.
    """
    for run in runs.values():
        run()  # the first call compiles, packs and allocates
    started = time.perf_counter()
    first = interleaved(runs, rounds=1, each=1)
    each = time.perf_counter() - started
    rounds = max(3, min(25, int(seconds / each)))
    return interleaved(runs, rounds=rounds, each=1) if each < seconds else first


def by_hand(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Callable[[], None]:
    """A training step with clipping, on torch alone."""

    def run() -> None:
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def python_calls(run: Callable[[], object]) -> int:
    """Python functions entered during one call: exact."""
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    run()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def tell(text: str) -> None:
    """Say what runs next, for benchmarks of minutes; on standard error, beside the table."""
    print(text, file=sys.stderr, flush=True)


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    console.print(table)
