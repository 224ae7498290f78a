"""Meters: speed, memory, and what share of a device's peak a run reaches."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import attrs
import torch
from torch.utils.flop_counter import FlopCounterMode

from fxtrain import ops
from fxtrain._host_memory import process_memory
from fxtrain.state import DEVICES, Batch, DistContext, Wrapped

__all__ = ["Memory", "Meter", "count_flops", "memory", "peak_flops", "timed"]
__dir__ = __all__.copy  # for completion


T = TypeVar("T")

# What torch adds to the name of a device: its vendor, its memory, and its form.
_ADDED = re.compile(r"NVIDIA|Tesla|GeForce|AMD|Instinct|SXM\d?|PCIE|\d+GB|HBM\d\w?")


@attrs.frozen
class Meter:
    """What a part of a run has processed; made at its start, a value like every record.

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
        ...     meter = fx.meters.Meter()
        ...     loader = fx.shard(DataLoader(torch.ones(6, 4), batch_size=2), ctx)
        ...     for batch, waited_s in fx.meters.timed(loader):
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
        totals = torch.tensor(
            [tokens, self.flops, self.waited_s], dtype=torch.float64, device="cpu"
        )
        slowest = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        if ctx.world_size > 1:
            totals = ops.reduce(totals, ctx, op="sum")
            slowest = ops.reduce(slowest, ctx, op="max")
        tokens, flops, waited_s = totals.tolist()
        seconds = max(float(slowest), 1e-9)
        rates = {
            "rows_per_s": self.rows / seconds,
            "waiting": waited_s / (seconds * ctx.world_size),
        }
        if tokens:
            rates["tokens_per_s"] = tokens / seconds
        if flops:
            rates["flops_per_s"] = flops / seconds
            if peak:
                rates["mfu"] = flops / seconds / (peak * ctx.world_size)
        return rates


def timed(batches: Iterable[T]) -> Iterator[tuple[T, float]]:
    """Each batch, with the seconds for which its reader waited for it.

    Example:
        >>> import fxtrain as fx
        >>> [(number, waited_s >= 0) for number, waited_s in fx.meters.timed([1, 2])]
        [(1, True), (2, True)]
    """
    asked = time.perf_counter()
    for batch in batches:
        yield batch, time.perf_counter() - asked
        asked = time.perf_counter()


def count_flops(fn: Callable[[], object]) -> int:
    """Floating-point operations of one call, on this rank, by torch's own counter.

    It counts products of matrices, convolutions and attention, forward and backward, as the
    counter does. Call it once on a step or a forward and backward, not in a loop: it dispatches
    every operator in Python. Models that `torch.compile` made are counted only in part.

    Example:
        >>> import fxtrain as fx, torch
        >>> fx.meters.count_flops(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
        48
    """
    counter = FlopCounterMode(display=False)
    with counter:
        fn()
    return int(counter.get_total_flops())


def peak_flops(ctx: DistContext, precision: str) -> float | None:
    """Dense operations per second that this rank's device can do; None where that is unknown.

    Args:
        precision: Of the products: fp32, tf32, bf16 or fp16.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.meters.peak_flops(ctx, "bf16") is None
        True
    """
    if ctx.device.type != "cuda":
        return None
    return _peak_of(torch.cuda.get_device_name(ctx.device), precision)


def peak_of_model(model: Wrapped) -> float | None:
    """Operations per second of this rank's device in a model's precision, if they can be counted.

    None where the peak is unknown, and for compiled models, of which torch counts only a part.
    """
    precision: str = model.plan.precision.compute
    if precision == "fp32":
        dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
        on_cuda = model.ctx.device.type == "cuda"
        tf32 = on_cuda and torch.get_float32_matmul_precision() != "highest"
        single = "tf32" if tf32 else "fp32"
        precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, single)
    return None if model.plan.compile else peak_flops(model.ctx, precision)


def _peak_of(device: str, precision: str) -> float | None:
    words = device.replace("-", " ").replace("A10G", "A10").split()
    name = " ".join(word for word in words if not _ADDED.fullmatch(word))
    return DEVICES[name].flops.get(precision) if name in DEVICES else None


@attrs.frozen(kw_only=True)
class Memory:
    """Bytes in use on one rank.

    Attributes:
        now: Allocated by torch on an accelerator; resident memory of the process on a CPU. 0 where
            neither is known.
        peak: The largest value of `now` so far.
        total: Of the device; None where it is unknown.
    """

    now: int
    peak: int
    total: int | None = None


def memory(ctx: DistContext) -> Memory:
    """How much memory this rank uses. Waits for no device.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     found = fx.meters.memory(ctx)
        >>> 0 < found.now <= found.peak
        True
    """
    kind = ctx.device.type
    if kind == "cpu":
        now, peak = process_memory()
        return Memory(now=now, peak=peak)
    if kind in ("meta", "xla"):
        return Memory(now=0, peak=0)
    device: Any = torch.get_device_module(ctx.device)
    if not hasattr(device, "memory_allocated") and kind != "mps":  # a device of another package
        return Memory(now=0, peak=0)
    if kind == "mps":
        now = device.current_allocated_memory()
        return Memory(now=now, peak=max(now, device.driver_allocated_memory()))
    return Memory(
        now=device.memory_allocated(ctx.device),
        peak=device.max_memory_allocated(ctx.device),
        total=device.get_device_properties(ctx.device).total_memory,
    )
