"""What `fit` measures between two entries of its trackers."""

import math
import time
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain import ops
from fxtrain.checkpoint import Restored
from fxtrain.loop.means import Mean, total_of
from fxtrain.loop.phases import PhaseClock, phase_clock
from fxtrain.loop.stepping import StepFns, step
from fxtrain.meters import memory
from fxtrain.profile import Trace
from fxtrain.state import Batch, DistContext, Position, Report
from fxtrain.track import Run

__all__ = ["Entries", "entries_after"]


@attrs.define(eq=False)
class Entries:
    """The values of the next entry so far.

    Attributes:
        total: The losses since the last entry times their weights, of this rank.
        weight: Their weights.
        skipped: Updates skipped since then.
        rows: Rows until then.
        carried: Whether it contains losses from before a restart.
        by_tokens: Whether losses are weighted by something other than rows.
        due: Whether an entry follows the last step.
        position: After the last step; None before the first.
        asked_s: When the loop asked for the current batch.
    """

    ctx: DistContext
    run: Run
    fns: StepFns
    every: int
    trace: Trace | None
    clock: PhaseClock | None
    total: Tensor | float
    weight: Tensor | float
    skipped: int
    rows: int
    carried: bool = False
    by_tokens: bool = False
    due: bool = False
    position: Position | None = None
    asked_s: float = attrs.field(factory=time.monotonic)
    _started_s: float = attrs.field(factory=time.monotonic)
    _waited_s: float = 0.0
    _phases: Mapping[str, float] = attrs.field(factory=dict)

    def step(self, batch: Batch) -> Report:
        """A step; the last one before an entry is timed by phase."""
        self._waited_s += time.monotonic() - self.asked_s
        self.position = position = batch.position
        clock = self.clock
        self.due = not position.micro and (position.is_last or not position.updates % self.every)
        if not self.due or clock is None:
            report = step(self.ctx, batch, self.fns)
        else:
            report, self._phases = clock.step(self.ctx, batch)
        if self.due:
            rows = batch.rows[self.ctx.axis("data").rank]
            self.by_tokens = isinstance(report.weight, Tensor) or report.weight != rows
        weight = report.weight if type(report.weight) is int else total_of(report.weight)
        self.total = self.total + total_of(report.loss) * weight
        self.weight = self.weight + weight
        self.skipped += report.skipped
        if self.trace is not None:
            self.trace.step()
        return report

    def write(self, report: Report) -> None:
        """Write the entry; the next one begins."""
        ctx, position = self.ctx, report.position
        seconds = max(time.monotonic() - self._started_s, 1e-9)
        loss, weight = self._mean()
        rates = [group["lr"] for one in self.fns.model.optimizers for group in one.param_groups]
        used = memory(ctx)
        values = {
            "loss": loss,
            "grad_norm": report.grad_norm,
            "skipped": self.skipped,
            "lr": rates[0] if len(rates) == 1 else dict(enumerate(rates)),
            "rows_per_s": (position.samples - self.rows) / seconds,
            "tokens_per_s": weight / seconds if self.by_tokens and not self.carried else None,
            "waiting": self._waited_s / seconds,
            "memory_gib": used.now / 2**30,
            "memory_peak_gib": used.peak / 2**30,
            **self._phases,
        }
        self.run.log(values, position)
        self.total, self.weight, self.skipped, self.rows = 0.0, 0.0, 0, position.samples
        self._started_s, self._waited_s, self.carried = time.monotonic(), 0.0, False

    def _mean(self) -> tuple[Tensor | float, Tensor | float]:
        """The mean loss of all ranks, and its weight; waits for no device."""
        ranks, total, weight = self.ctx.axis("loss"), self.total, self.weight
        if ranks.world_size == 1 and type(total) is type(weight) is float:
            return total / weight if weight else math.nan, weight
        pair = Mean(total, weight).pair(self.ctx)
        total, weight = pair if ranks.world_size == 1 else ops.reduce(pair, ranks, op="sum")
        return total / weight, weight

    def write_profile(self) -> None:
        """Write the table of a profile that has ended."""
        summary = None if self.trace is None else self.trace.summary
        if summary is not None and self.position is not None:
            self.run.table("ms per step by phase", summary.columns, self.position)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs to continue the open entry, of all ranks."""
        losses = ops.gather(
            Mean(self.total, self.weight).pair(self.ctx)[None], self.ctx.axis("loss")
        )
        return {"loss": losses, "skipped": self.skipped}


def entries_after(
    restored: Restored | None,
    position: Position,
    ctx: DistContext,
    run: Run,
    *,
    fns: StepFns,
    every: int,
    trace: Trace | None,
) -> Entries:
    """The entry that is open where a run starts or resumes.

    At another world size, rank 0 has the losses of all ranks.
    """
    total, weight, skipped = 0.0, 0.0, 0
    if restored is not None:
        ranks, pairs = ctx.axis("loss"), restored.extra["loss"].to(ctx.device)
        skipped = int(restored.extra["skipped"])
        if len(pairs) == ranks.world_size:
            total, weight = pairs[ranks.rank]
        elif not ranks.rank:
            total, weight = torch.sum(pairs, 0)
    clock = phase_clock(ctx, fns)
    carried = restored is not None
    rows = position.samples
    return Entries(ctx, run, fns, every, trace, clock, total, weight, skipped, rows, carried)
