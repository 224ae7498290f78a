"""One process: what `fx.fit` and trackers add to a loop of `fx.step`.

python -m benchmarks.fit

The title has the time of a loop of 1000 additions in Python, since microseconds of Python depend on
the machine. Background threads of trackers need Python's lock as the training thread does: their
time is what they add where nothing else, such as a matrix product, releases the lock meanwhile.
"""

import functools
import itertools
import statistics
import tempfile
import time
import timeit
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from benchmarks._common import python_calls, show

ROUNDS, STEPS = 400, 10  # one entry of the trackers in each round
_DRAINED_S = 0.5  # trackers have written everything by then
BASE = "fx.step by hand"


def _made(ctx: fx.DistContext) -> tuple[Any, Any]:
    net = nn.Linear(4, 1)
    model = fx.wrap(net, ctx, optimizer=lambda params: torch.optim.SGD(params, lr=1e-3))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
    rows: Any = torch.randn(2 * (ROUNDS + 30) * STEPS, 4)
    return fns, fx.shard(DataLoader(rows, batch_size=2), ctx)


def _by_hand(ctx: fx.DistContext) -> Iterator[fx.Report]:
    fns, loader = _made(ctx)
    for batch in loader:
        yield fx.step(ctx, batch, fns)


def _fitted(ctx: fx.DistContext, folder: str, **how: Any) -> Iterator[fx.Report]:
    fns, loader = _made(ctx)
    return fx.fit(ctx, fns, loader, folder, epochs=1, **how)


def _steps(reports: Iterator[fx.Report]) -> None:
    for _ in itertools.islice(reports, STEPS):
        pass


def _timed(loops: Mapping[str, Iterator[fx.Report]]) -> dict[str, tuple[float, float]]:
    """Microseconds per step, by the clock and of the training thread's processor time.

    Of the fastest tenth of the rounds, since other programs only ever make a step slower. Loops
    take turns, and a pause lets the trackers of one finish before the next is measured.
    """
    taken: dict[str, list[list[float]]] = {name: [[], []] for name in loops}
    for _ in range(ROUNDS):
        for name, reports in loops.items():
            time.sleep(0.003)
            start, began = time.perf_counter(), time.thread_time()
            _steps(reports)
            used, took = time.thread_time() - began, time.perf_counter() - start
            for found, seconds in zip(taken[name], (took, used), strict=True):
                found.append(1e6 * seconds / STEPS)
    return {name: (_fastest(took), _fastest(used)) for name, (took, used) in taken.items()}


def _in_background(reports: Iterator[fx.Report]) -> float:
    """Microseconds of processor time per step in all threads but this one."""
    started = time.process_time() - time.thread_time()
    for _ in itertools.islice(reports, 10 * STEPS):
        pass
    time.sleep(_DRAINED_S)
    return 1e6 * (time.process_time() - time.thread_time() - started) / (10 * STEPS)


def _calibration() -> float:
    """Microseconds of the fastest of many loops of 1000 additions."""
    return 1e6 * min(
        timeit.repeat("for i in r: x += i", "x = 0; r = range(1000)", number=1, repeat=500)
    )


def _fastest(values: list[float]) -> float:
    return statistics.mean(sorted(values)[: len(values) // 10])


def main() -> None:
    torch.set_num_threads(1)
    with fx.detect({}, device="cpu") as ctx, tempfile.TemporaryDirectory() as folder:
        to = [fx.JsonLines(), fx.TensorBoard()]
        loops = {
            BASE: _by_hand(ctx),
            "fx.fit without trackers": _fitted(ctx, f"{folder}/a", to=(), show=False),
            "JSON lines, TensorBoard, progress": _fitted(ctx, f"{folder}/b", to=to),
            "the same, at every step": _fitted(ctx, f"{folder}/c", to=to, log_every=1),
        }
        calls = {
            name: python_calls(functools.partial(_steps, one)) / STEPS
            for name, one in loops.items()
        }
        time.sleep(_DRAINED_S)
        behind = {name: _in_background(one) for name, one in loops.items()}
        for one in loops.values():  # entries are written in the middle of a round
            _ = list(itertools.islice(one, STEPS // 2))
        times = _timed(loops)
        for one in loops.values():
            one.close()  # pyright: ignore[reportAttributeAccessIssue] - a generator
    show(
        f"A step of a linear layer, and what the loop adds to it; 1000 additions: "
        f"{_calibration():.0f} µs",
        [
            "loop",
            "calls added",
            "µs",
            "µs added",
            "in this thread",
            "of a step",
            "in other threads",
        ],
        [
            [
                key,
                f"{calls[key] - calls[BASE]:.1f}",
                f"{took:.0f}",
                f"{took - times[BASE][0]:.1f}",
                f"{used - times[BASE][1]:.1f}",
                f"{(used - times[BASE][1]) / times[BASE][1]:.1%}",
                f"{behind[key] - behind[BASE]:.1f}",
            ]
            for key, (took, used) in times.items()
        ],
    )


if __name__ == "__main__":
    main()
