"""Speed over a stretch of a run."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import attrs
import torch

from fxtrain import ops
from fxtrain.state import Batch, DistContext

T = TypeVar("T")


@attrs.frozen
class Meter:
    """What a stretch of a run has processed; made at its start, a value like every record.

    Attributes:
        started_s: When, by `time.perf_counter`.
        rows: Rows of all ranks, without padding.
        tokens: Tokens of this rank.
        flops: Floating-point operations of this rank.
        waited_s: Seconds in which this rank waited for data.

    Example:
        >>> import fxtrain as fx, torch
        >>> from torch.utils.data import DataLoader
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     meter = fx.Meter()
        ...     loader = fx.shard(DataLoader(torch.ones(6, 4), batch_size=2), ctx)
        ...     for batch, waited_s in fx.timed(loader):
        ...         meter = meter.update(batch, tokens=batch.data.numel(), waited_s=waited_s)
        ...     meter.rows, meter.tokens, sorted(meter.rates(ctx))
        (6, 24, ['rows_per_s', 'tokens_per_s', 'waiting'])
    """

    started_s: float = attrs.field(factory=time.perf_counter)
    rows: int = 0
    tokens: float = 0
    flops: float = 0
    waited_s: float = 0.0

    def update(
        self, batch: Batch, *, tokens: float = 0, flops: float = 0, waited_s: float = 0.0
    ) -> "Meter":
        """The meter after one more batch; waits for nothing."""
        return Meter(
            self.started_s,
            self.rows + sum(batch.rows),
            self.tokens + tokens,
            self.flops + flops,
            self.waited_s + waited_s,
        )

    def rates(self, ctx: DistContext, *, peak: float | None = None) -> dict[str, float]:
        """Speeds of all ranks together since the start, by the time of the slowest rank.

        Args:
            peak: Operations per second that the device of one rank can do, such as
                `fxtrain.meters.peak_flops(ctx, "bf16")`; None gives no MFU.

        Returns:
            `rows_per_s`, `waiting` (the share of time in which ranks waited for data), and where
            they were counted `tokens_per_s`, `flops_per_s` and `mfu`. The same on every rank.

        Effects:
            Two reductions over the ranks; none at one rank.
        """
        seconds = time.perf_counter() - self.started_s
        # Tensor and pipeline ranks have the same tokens, which count once.
        tokens = self.tokens * ctx.axis("loss").world_size / ctx.world_size
        mine = torch.tensor([tokens, self.flops, self.waited_s], dtype=torch.float64, device="cpu")
        slowest = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        if ctx.world_size > 1:
            mine = ops.reduce(mine, ctx, op="sum")
            slowest = ops.reduce(slowest, ctx, op="max")
        tokens, flops, waited_s = mine.tolist()
        seconds = max(float(slowest), 1e-9)
        found = {
            "rows_per_s": self.rows / seconds,
            "waiting": waited_s / (seconds * ctx.world_size),
        }
        if tokens:
            found["tokens_per_s"] = tokens / seconds
        if flops:
            found["flops_per_s"] = flops / seconds
            if peak:
                found["mfu"] = flops / seconds / (peak * ctx.world_size)
        return found


def timed(batches: Iterable[T]) -> Iterator[tuple[T, float]]:
    """Each batch, with the seconds for which its reader waited for it.

    Example:
        >>> import fxtrain as fx
        >>> [(number, waited_s >= 0) for number, waited_s in fx.timed([1, 2])]
        [(1, True), (2, True)]
    """
    asked = time.perf_counter()
    for batch in batches:
        yield batch, time.perf_counter() - asked
        asked = time.perf_counter()
