"""What failures cost a run of many ranks: goodput by interval of checkpoints and number of spares.

A run is simulated from failure to failure: ranks fail at random, the work since the last checkpoint
is lost, a spare takes the place of the rank or the run waits for a repair, and the run starts
again. Without repairs this is the model of Young and Daly, whose formulas give the best interval.
"""

import heapq
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import attrs
from attrs import validators
from rich.table import Table

from fxtrain._drawing import make_figure, make_table
from fxtrain._record import above, record
from fxtrain.errors import PlanError
from fxtrain.state import DryRun
from fxtrain.state.mesh import resolve_mesh
from fxtrain.state.registry import strategy_of

_INTERVALS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of Daly's, in a table
_MOST_FAILURES = 100_000
_HOUR = 3600.0


@record
class Failures:
    """How often ranks fail, and what it takes to continue.

    Attributes:
        ranks: Ranks of the run; one failure stops all of them.
        rank_mtbf_s: Mean time between failures of one rank, in seconds.
        checkpoint_s: Time that a checkpoint stops the run, in seconds.
        restart_s: Time from a failure, or from a repair that it waits for, to the first update.
        repair_s: Time until a rank that failed can be used again, as a spare; 0 at once.
        spares: Ranks that stand by at the start.

    Example:
        >>> from fxtrain.profiling import Failures
        >>> setup = Failures(ranks=1000, rank_mtbf_s=36e6, checkpoint_s=60, restart_s=300)
        >>> setup.mtbf_s, round(setup.young_interval_s), round(setup.daly_goodput(2078), 3)
        (36000.0, 2078, 0.936)
    """

    ranks: int = attrs.field(validator=validators.ge(1))
    rank_mtbf_s: float = attrs.field(validator=above(0))
    checkpoint_s: float = attrs.field(validator=above(0))
    restart_s: float = attrs.field(default=0.0, validator=validators.ge(0))
    repair_s: float = attrs.field(default=0.0, validator=validators.ge(0))
    spares: int = attrs.field(default=0, validator=validators.ge(0))

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the run, in seconds."""
        return self.rank_mtbf_s / self.ranks

    @property
    def young_interval_s(self) -> float:
        """The training time between two checkpoints that is best to first order.

        Source:
            J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17
            (1974).
        """
        return math.sqrt(2 * self.checkpoint_s * self.mtbf_s)

    @property
    def daly_interval_s(self) -> float:
        """The best training time between two checkpoints, to higher order.

        Source:
            J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart
            dumps, FGCS 22 (2006), equation 37.
        """
        if self.checkpoint_s >= 2 * self.mtbf_s:
            return self.mtbf_s
        ratio = self.checkpoint_s / (2 * self.mtbf_s)
        return self.young_interval_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.checkpoint_s

    def daly_goodput(self, interval_s: float) -> float:
        """The expected goodput of a run that never waits for a repair.

        Source:
            Daly (2006), equation 20: the expected time of a run with failures at random.
        """
        mtbf = self.mtbf_s
        segment, restart = (interval_s + self.checkpoint_s) / mtbf, self.restart_s / mtbf
        if segment + restart > 500:  # exp would overflow
            return 0.0
        return interval_s / (mtbf * math.exp(restart) * math.expm1(segment))


def checkpoint_bytes(run: DryRun) -> int:
    """Bytes of a checkpoint of a run: parameters, optimizer states and buffers of one replica.

    They are those of the rank that was simulated, times the ranks that share a replica.
    """
    mesh = resolve_mesh(run.mesh, run.world)
    shards, states = 1, 1
    if run.plan is not None:
        shards, states = strategy_of(run.plan.strategy).shards(run.plan, mesh)
    memory, others = run.memory, mesh.pipeline * mesh.tensor
    return others * (shards * memory.parameters + states * memory.optimizer + memory.buffers)


@record
class RunTimes:
    """How a simulated run has spent its time, in seconds.

    Attributes:
        useful_s: Training whose result was kept.
        checkpoint_s: Writing checkpoints that were completed.
        lost_s: Training, and writing of checkpoints, that a failure made worthless.
        restart_s: Starting again, with attempts that failed.
        waiting_s: Waiting for a repair, since no spare was left.
        failures: Number of failures.
        finished: Whether the work was done; otherwise the run was given up after 100,000 failures.
    """

    useful_s: float = 0.0
    checkpoint_s: float = 0.0
    lost_s: float = 0.0
    restart_s: float = 0.0
    waiting_s: float = 0.0
    failures: int = 0
    finished: bool = True

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.useful_s + self.checkpoint_s + self.lost_s + self.restart_s + self.waiting_s

    @property
    def goodput(self) -> float:
        """The share of the time that was useful, from 0 to 1; 0 for a run that was given up."""
        return self.useful_s / self.total_s if self.finished else 0.0


def simulate_run(
    failures: Failures, *, interval_s: float, work_s: float, seed: int = 0
) -> RunTimes:
    """Simulate one run from failure to failure; equal arguments give an equal result.

    Args:
        failures: The setup.
        interval_s: Training between two checkpoints, in seconds.
        work_s: Training that the run needs without failures, in seconds.
        seed: Of the times of failures.

    Raises:
        PlanError: the interval or the work is not above 0.

    Example:
        >>> from fxtrain.profiling import Failures, simulate_run
        >>> setup = Failures(ranks=100, rank_mtbf_s=1e6, checkpoint_s=10, restart_s=100)
        >>> run = simulate_run(setup, interval_s=500, work_s=1e6)
        >>> run.failures, round(run.goodput, 2)
        (90, 0.95)
    """
    if not (interval_s > 0 and work_s > 0):
        raise PlanError(
            f"simulate_run(interval_s={interval_s:g}, work_s={work_s:g}): both are times above 0."
        )
    interval_s = min(interval_s, work_s)
    chance = random.Random(seed)
    spent = dict.fromkeys(("useful_s", "checkpoint_s", "lost_s", "restart_s", "waiting_s"), 0.0)
    now, count, free = 0.0, 0, failures.spares
    repairs: list[float] = []
    fails_at = chance.expovariate(1 / failures.mtbf_s)
    while spent["useful_s"] < work_s and count < _MOST_FAILURES:
        saved_s = interval_s + failures.checkpoint_s
        left = math.ceil((work_s - spent["useful_s"]) / interval_s)
        saves = max(0, left - 1)  # the end needs none
        before = min(saves, int((fails_at - now) // saved_s))  # the next failure, all at once
        now += before * saved_s
        spent["useful_s"] += before * interval_s
        spent["checkpoint_s"] += before * failures.checkpoint_s
        if before == saves and fails_at >= now + (work_s - spent["useful_s"]):
            spent["useful_s"] = work_s
            continue
        spent["lost_s"] += fails_at - now
        ready = False
        while not ready and count < _MOST_FAILURES:
            now, count = fails_at, count + 1
            heapq.heappush(repairs, now + failures.repair_s)
            while repairs and repairs[0] <= now:
                heapq.heappop(repairs)
                free += 1
            if free:
                free -= 1
            else:
                begins = heapq.heappop(repairs)
                spent["waiting_s"] += begins - now
                now = begins
            fails_at = now + chance.expovariate(1 / failures.mtbf_s)
            ready = fails_at >= now + failures.restart_s
            spent["restart_s"] += failures.restart_s if ready else fails_at - now
        now += failures.restart_s
    return RunTimes(**spent, failures=count, finished=spent["useful_s"] >= work_s)


@record
class Goodput:
    """Goodput over intervals of checkpoints and numbers of spares; prints as a table with rich.

    Attributes:
        failures: The setup; `spares` is that of the first row.
        work_s: Training without failures, in seconds, of each simulated run.
        intervals_s: Intervals of checkpoints, in seconds.
        spares: Numbers of spares.
        rows: By number of spares, the goodput of each interval: the mean of several runs.
    """

    failures: Failures
    work_s: float
    intervals_s: tuple[float, ...]
    spares: tuple[int, ...]
    rows: tuple[tuple[float, ...], ...]

    def __rich__(self) -> Table:
        """A table: a row for each number of spares, a column for each interval."""
        setup = self.failures
        title = (
            f"Goodput of {setup.ranks} ranks: a failure every {_shown(setup.mtbf_s)}, a "
            f"checkpoint of {_shown(setup.checkpoint_s)} every"
        )
        formula = [setup.daly_goodput(interval) for interval in self.intervals_s]
        rows = {**dict(zip(self.spares, self.rows, strict=True)), "Daly, no waiting": formula}
        young, daly = _shown(setup.young_interval_s), _shown(setup.daly_interval_s)
        return make_table(
            ("spares", *(f">{_shown(interval)}" for interval in self.intervals_s)),
            [(str(name), *(f"{100 * x:.1f} %" for x in row)) for name, row in rows.items()],
            title=title,
            caption=f"Best interval: {young} by Young's formula, {daly} by Daly's.",
        )

    def plot(self) -> Any:
        """Goodput over intervals, with Daly's formula, as a `matplotlib.figure.Figure`.

        Raises:
            MissingPackageError: matplotlib is not installed (the extra `plots`).
        """
        setup = self.failures
        title = f"{setup.ranks} ranks: a failure every {setup.mtbf_s / _HOUR:.2g} h"
        drawn = make_figure("Goodput.plot", title)
        (axes,) = drawn.axes
        minutes = [interval / 60 for interval in self.intervals_s]
        for number, row in zip(self.spares, self.rows, strict=True):
            axes.plot(minutes, [100 * share for share in row], marker="o", label=f"{number} spares")
        span = [minutes[0] * (minutes[-1] / minutes[0]) ** (step / 60) for step in range(61)]
        daly = [100 * setup.daly_goodput(60 * interval) for interval in span]
        axes.plot(span, daly, color="#808080", linestyle="--", label="Daly, without waiting")
        axes.axvline(setup.young_interval_s / 60, color="#d00000", linestyle=":", label="Young")
        axes.set_xscale("log")
        axes.set_xlabel("training between two checkpoints, in minutes")
        axes.set_ylabel("goodput, in per cent")
        drawn.legend(loc="outside lower center", ncols=4, frameon=False)
        return drawn


def goodput(
    failures: Failures,
    *,
    work_s: float,
    spares: Sequence[int] = (0,),
    runs: int = 10,
    seed: int = 0,
) -> Goodput:
    """Goodput at intervals around Daly's, for several numbers of spares.

    Args:
        failures: The setup.
        work_s: Training that a run needs without failures, in seconds.
        spares: Numbers of spares to compare.
        runs: Simulated runs for each figure, with seeds that follow each other.
        seed: Of the first run.

    Example:
        >>> from fxtrain.profiling import Failures, goodput
        >>> setup = Failures(ranks=100, rank_mtbf_s=1e6, checkpoint_s=10, restart_s=100)
        >>> found = goodput(setup, work_s=1e5)
        >>> [round(interval) for interval in found.intervals_s]
        [110, 220, 441, 881, 1762]
    """
    intervals = tuple(factor * failures.daly_interval_s for factor in _INTERVALS)

    def mean(number: int, interval: float) -> float:
        setup = attrs.evolve(failures, spares=number)
        return statistics.fmean(
            simulate_run(setup, interval_s=interval, work_s=work_s, seed=seed + run).goodput
            for run in range(runs)
        )

    return Goodput(
        failures=failures,
        work_s=work_s,
        intervals_s=intervals,
        spares=tuple(spares),
        rows=tuple(tuple(mean(number, each) for each in intervals) for number in spares),
    )


def _shown(seconds: float) -> str:
    """A time in the unit in which it is short to read."""
    for unit, size, most in (("s", 1, 120), ("min", 60, 7200), ("h", _HOUR, 48 * _HOUR)):
        if seconds < most:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / (24 * _HOUR):,.0f} days"
