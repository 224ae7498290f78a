"""Which plan is the fastest that fits: dry runs of the most promising ones, within a time."""

import heapq
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import attrs

from fxtrain._display import show_bytes
from fxtrain.choosing.candidates import (
    Question,
    Trial,
    data_ranks,
    estimated_seconds,
    held_memory,
    lanes,
    least_memory,
    micro_batches,
    needs_no_split,
    next_trials,
    with_rows,
)
from fxtrain.choosing.costs import StepCost, step_cost
from fxtrain.choosing.devices import DEVICES, Device
from fxtrain.choosing.report import Choice, ChoiceRow, name_row
from fxtrain.choosing.trials import SHORT, Program, batch_size, dry_runs, workers
from fxtrain.errors import PlanError
from fxtrain.launchers.machine import usable_cores
from fxtrain.state import DryRun, Plan, loads, structure
from fxtrain.state.mesh import Mesh, resolve_mesh
from fxtrain.state.registry import strategy_of

MOST_RUNS = 60
# Share of a device's memory that a plan may use: CUDA, NCCL and the allocator take the rest.
USABLE = 0.9
_SHOWN = 10
_LATER = 1e6  # seconds, with which plans are sorted behind all others
_NUMBER = re.compile(r"\d+")
_IGNORED = (
    "the program passes another plan to fx.wrap, so that this one has no effect. Leave the plan "
    "out there, or pass fx.given_plan(plan)"
)
_NO_NEED = "splits layers or stages of a model that half a device holds, with rows for every rank"
_FEWER_ROWS = (
    "fewer rows or updates than asked: the data ends, or the program takes another batch size. "
    "Use more data or fewer rows of an update, and the batch size that the program is given"
)


@attrs.frozen(kw_only=True)
class _Result:
    """The dry runs of a plan.

    Attributes:
        attempt: The plan, and rows of a micro-batch.
        runs: By rank and `accumulate`.
        rows: Of an update.
    """

    attempt: Trial
    runs: Mapping[tuple[int, int], DryRun]
    rows: int

    @property
    def largest(self) -> DryRun:
        """The run that needs most memory."""
        return max(self.runs.values(), key=lambda run: run.peak)

    @property
    def memory(self) -> int:
        """Peak bytes of the rank that needs most."""
        plan, _ = self.attempt
        return max(held_memory(run, plan) for run in self.runs.values())

    def row(self, device: Device) -> ChoiceRow:
        """The plan with the cost of its slowest rank on a device."""
        plan, _ = self.attempt
        costs = [self._cost(rank, device) for rank in {rank for rank, _ in self.runs}]
        return ChoiceRow(
            plan=plan,
            batch_size=batch_size(self.attempt),
            rows=self.rows,
            memory=self.memory,
            cost=max(costs, key=lambda cost: cost.seconds),
        )

    def _cost(self, rank: int, device: Device) -> StepCost:
        plan, _ = self.attempt
        costs = {
            count: step_cost(run, attrs.evolve(plan, accumulate=count), device)
            for (at, count), run in self.runs.items()
            if at == rank
        }
        if plan.accumulate in costs:
            return costs[plan.accumulate]
        # Each further micro-batch adds what the second one adds to the first.
        one, two = attrs.asdict(costs[1]), attrs.asdict(costs[SHORT])
        more = plan.accumulate - SHORT
        return StepCost(
            **{name: max(0.0, two[name] + more * (two[name] - one[name])) for name in two}
        )


@attrs.define(kw_only=True)
class _Search:
    """The plans that are still to be tried, and what was found."""

    question: Question
    device: Device
    memory: float
    rows: int = 0
    own: int = 0
    blocks: tuple[str, ...] = ()
    queue: list[tuple[float, int, Trial]] = attrs.field(factory=list)
    known: set[Trial] = attrs.field(factory=set)
    results: list[_Result] = attrs.field(factory=list)
    dropped: Counter[str] = attrs.field(factory=Counter)
    least: list[float] = attrs.field(factory=list)  # bytes that dropped plans need
    own_problem: str = ""  # why the user's plan was dropped
    runs: int = 0

    def begin(self, answer: Mapping[str, Any]) -> None:
        """Fill the queue from the dry run on one rank."""
        (run,) = (loads(text, DryRun) for _, _, text in answer["runs"])
        about = answer["about"]
        if fatal := [problem.text for problem in run.problems if problem.fatal]:
            raise PlanError(
                f"The dry run of {run.name} on one rank ends with a problem, so that no plan can "
                f"be tried:\n" + "\n".join(fatal)
            )
        if not about or not about["rows"]:
            raise PlanError(
                f"{run.name} trains a model without fx.wrap and fx.step, so that a plan has no "
                f"effect. Pass the model to fx.wrap, and train it with fx.step."
            )
        plan = structure(about["plan"], Plan)
        self.question = attrs.evolve(self.question, plan=plan)
        self.own, self.rows = about["rows"], about["update"]
        # Recomputation that the program itself asks for stays.
        self.blocks = () if plan.recompute else tuple(about["blocks"])
        cost = step_cost(run, plan, self.device)
        compute_s = (cost.compute_s + cost.memory_s) * self.rows / self.own
        for number, lane in enumerate(lanes(self.question, about)):
            allowed = micro_batches(self.question, lane, self.rows, self.own)
            least = least_memory(lane, run.memory)
            if refused := about["refused"].get(str(number)):
                problem = refused
            elif not allowed:
                problem = (
                    f"the {self.rows:,} rows of an update are not divisible among the ranks. Use a "
                    f"multiple of the world size"
                )
            elif least > self.memory:
                self.least.append(least)
                problem = "parameters, gradients and optimizer states alone do not fit"
            elif number and needs_no_split(lane, run.memory, self.question, self.memory, self.rows):
                problem = _NO_NEED
            else:
                attempt = with_rows(lane, self.rows, allowed[0])
                seconds = estimated_seconds(lane, run.memory, compute_s, self.device)
                late = _LATER if _offloads(attempt) else 0.0
                self.add(seconds + late if number else 0.0, attempt)  # the user's own first
                continue
            self.drop(problem, own=not number)

    def add(self, seconds: float, attempt: Trial) -> None:
        """Queue a plan, unless it is known."""
        if attempt not in self.known:
            self.known.add(attempt)
            heapq.heappush(self.queue, (seconds, len(self.known), attempt))

    def drop(self, reason: str, count: int = 1, *, own: bool = False) -> None:
        """Count a reason; those that differ in numbers are one."""
        self.own_problem = reason if own else self.own_problem
        plain = _NUMBER.sub("0", reason)
        same = next((text for text in self.dropped if _NUMBER.sub("0", text) == plain), reason)
        self.dropped[same] += count

    def next(self) -> tuple[float, Trial] | None:
        """The most promising plan of the queue; None if it is empty."""
        fits = any(result.memory <= self.memory for result in self.results)
        while self.queue:
            seconds, _, attempt = heapq.heappop(self.queue)
            if not (fits and _offloads(attempt)):
                return seconds, attempt
            self.drop("holds parameters in host memory, which is slow, and other plans fit")
        return None

    def end(self, of: tuple[float, Trial], future: Future[Any]) -> None:
        """Keep the dry runs of a plan, or drop it; queue what to try instead if it is too large."""
        seconds, attempt = of
        plan, size = attempt
        error = future.exception()
        if isinstance(error, BrokenProcessPool):
            raise error
        if error is not None:  # of the program, under this plan
            self.drop(f"{type(error).__name__}: {error}".splitlines()[0], own=not seconds)
            return
        answer = future.result()
        runs = {(rank, count): loads(text, DryRun) for count, rank, text in answer["runs"]}
        self.runs += len(runs)
        fatal = [p.text for run in runs.values() for p in run.problems if p.fatal]
        last = list(runs.values())[-1]
        expected = size * data_ranks(plan)
        if fatal:
            self.drop(fatal[0].splitlines()[0], own=not seconds)
        elif last.updates < 2 or answer["about"].get("rows", expected) < expected:
            self.drop(_FEWER_ROWS, own=not seconds)
        elif not _is_followed(plan, last):
            self.drop(_IGNORED, 1 + len(self.queue))
            self.queue.clear()
        else:
            result = _Result(attempt=attempt, runs=runs, rows=self.rows)
            self.results.append(result)
            allowed = micro_batches(self.question, plan, self.rows, self.own)
            # Plans for half the memory come last: they show what a smaller device would cost.
            for memory, late in ((self.memory, 0.0), (self.memory / 2, _LATER)):
                if result.memory > memory:
                    run, blocks = result.largest, self.blocks
                    for other in next_trials(self.question, attempt, run, memory, allowed, blocks):
                        self.add(seconds + late, other)

    def choice(self) -> Choice:
        """The table of what fits, on this device and on others."""
        table = self._fastest(self.device, self.memory)
        half, twice = self.memory / 2, self.memory * 2
        slow, fast = (
            attrs.evolve(
                self.device,
                link_bandwidth=self.device.link_bandwidth * factor,
                node_bandwidth=self.device.node_bandwidth * factor,
            )
            for factor in (0.5, 2.0)
        )
        others = {
            f"with {show_bytes(self.device.memory // 2)}": (self.device, half),
            f"with {show_bytes(self.device.memory * 2)}": (self.device, twice),
            "on links half as fast": (slow, self.memory),
            "on links twice as fast": (fast, self.memory),
        }
        sensitivity = [
            (text, next(iter(self._fastest(*other)), None)) for text, other in others.items()
        ]
        too_large = sum(result.memory > self.memory for result in self.results)
        if too_large:
            self.drop("a step does not fit", too_large)
        return Choice(
            world=self.question.world,
            device=self.device,
            rows=self.rows,
            table=tuple(table[:_SHOWN]),
            dropped=tuple(self.dropped.most_common()),
            sensitivity=tuple(sensitivity) if self.results else (),
            advice="" if table else self._advice(),
            tried=len(self.results),
        )

    def _fastest(self, device: Device, memory: float) -> list[ChoiceRow]:
        rows = [result.row(device) for result in self.results if result.memory <= memory]
        return sorted(rows, key=lambda row: row.cost.seconds)

    def _advice(self) -> str:
        """The smallest change with which a plan would fit, or why none ran."""
        if not self.results:
            if not self.least:
                return f"Every plan was dropped; your own, since: {self.own_problem}."
            ranks = self.question.world * math.ceil(min(self.least) / self.memory)
            return (
                f"Parameters, gradients and optimizer states need at least "
                f"{show_bytes(int(min(self.least)))} on each rank, before activations. Use about "
                f"{ranks} ranks, or FSDP(offload=True)."
            )
        smallest = min(self.results, key=lambda result: result.memory)
        needed = smallest.memory / USABLE
        row = smallest.row(self.device)
        known = sorted(DEVICES.values(), key=lambda device: device.memory)
        named = [f" ({device.name})" for device in known if device.memory >= needed]
        return (
            f"The smallest plan, {name_row(row)}, needs {show_bytes(row.memory)} of each rank, and "
            f"{show_bytes(int(self.memory))} can be used. Use a device with "
            f"{show_bytes(int(needed))}{next(iter(named), '')}, or fewer rows of an update."
        )


def _offloads(attempt: Trial) -> bool:
    plan, _ = attempt
    return strategy_of(plan.strategy).in_host_memory(plan)


def _is_followed(plan: Plan, run: DryRun) -> bool:
    """Whether the program trained with a plan."""
    own = run.plan
    mesh = resolve_mesh(plan.mesh or Mesh(), run.world)
    return (
        own is not None
        and (own.strategy, own.recompute, run.mesh) == (plan.strategy, plan.recompute, mesh)
        and own.accumulate == min(plan.accumulate, SHORT)
    )


def search(
    program: Program,
    question: Question,
    device: Device,
    *,
    probe: Trial,
    minutes: float = 10.0,
    processes: int | None = None,
    cache: str = "",
    most: int = MOST_RUNS,
    progress: Callable[[int, int], object] = lambda done, left: None,
) -> Choice:
    """Try plans, the most promising first, and compare those that fit.

    Args:
        program: What is trained.
        question: What is asked.
        device: That each rank has.
        probe: Plan and batch size of a first dry run, on one rank.
        minutes: Time after which the search ends with what was found.
        processes: Dry runs at a time; by default one for each core. 1 runs them in this process.
        cache: Folder of earlier dry runs; empty for none.
        most: Dry runs, beside the first.
        progress: Called with the numbers of dry runs that have ended and that may follow.

    Returns:
        The choice.

    Raises:
        PlanError: the program allows no dry run on one rank, or it did not end in time.
        BrokenProcessPool: a process was killed, such as for lack of memory: use fewer `processes`.
        Exception: what the program raises there.
    """
    count = processes or len(usable_cores())
    deadline = time.monotonic() + 60 * minutes
    found = _Search(question=question, device=device, memory=USABLE * device.memory)
    running: dict[Future[Any], tuple[float, Trial]] = {}
    with workers(program, count, 60 * minutes) as pool:
        first = pool.submit(dry_runs, program, probe, 1, question, cache)
        if not wait([first], timeout=60 * minutes).done:
            raise PlanError(f"No dry run ended within {minutes:g} minutes. Allow more minutes.")
        found.begin(first.result())
        while time.monotonic() < deadline:
            while len(running) < count and found.runs + len(running) < most:
                if (following := found.next()) is None:
                    break
                future = pool.submit(dry_runs, program, following[1], question.world, None, cache)
                running[future] = following
            if not running:
                break
            left_s = max(0.0, deadline - time.monotonic())
            for future in wait(running, timeout=left_s, return_when=FIRST_COMPLETED).done:
                found.end(running.pop(future), future)
                progress(found.runs, len(found.queue) + len(running))
    if left := len(found.queue) + len(running):
        found.drop(f"not tried within {minutes:g} minutes and {most} dry runs", left)
    return found.choice()
