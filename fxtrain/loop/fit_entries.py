"""What `fit` measures between two entries of its trackers."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch
from torch import Tensor
from torch.optim import Optimizer

from fxtrain import _extensions, ops
from fxtrain._display import show_bytes
from fxtrain._tree import flatten
from fxtrain.checkpoint import Restored
from fxtrain.data import Sharded
from fxtrain.data.sharding import layout_of
from fxtrain.errors import DataError, PlanError
from fxtrain.loop.evaluating import Mean, total_of
from fxtrain.loop.stepping import StepFns, step
from fxtrain.ops.devices import synchronize
from fxtrain.ops.transport.pace import Pace
from fxtrain.state import Batch, DistContext, Position, Report, Wrapped

if TYPE_CHECKING:
    from fxtrain._extensions import Run, Trace

# Settings that determine to which row a position inside an epoch refers.
_MEANING = {"units": "rows or batches in an epoch", "unit": "unit", "order": "order"}


@attrs.define(eq=False, kw_only=True)
class Entries:
    """The values of the next entry so far."""

    SAVED: ClassVar[tuple[str, ...]] = ("loss", "skipped", "weights")  # see `state`

    ctx: DistContext
    run: "Run"
    fns: StepFns
    trace: "Trace | None"
    peak: float | None  # operations per second of this rank's device; None if MFU is not measured
    total: Tensor | float  # the losses since the last entry times their weights, of this rank
    weight: Tensor | float  # their weights
    skipped: int  # updates skipped since then
    rows: int  # rows until then
    weights: Tensor | float  # all weights until then, of all ranks
    carried: bool = False  # whether it contains losses from before a restart
    by_tokens: bool = False  # whether losses are weighted by something other than rows
    due: bool = False  # whether an entry follows the step
    counts_tokens: bool = False  # whether the loop asks for `tokens`
    position: Position | None = None  # after the last step; None before the first
    # When the loop asked for the current batch.
    asked_s: float = attrs.field(factory=time.monotonic)
    _started_s: float = attrs.field(factory=time.monotonic)
    _paused_s: dict[str, float] = attrs.field(factory=dict)  # since then, by what training waited
    _waited_s: float = 0.0  # for data
    _flops: float = 0.0
    _slow: int = 0
    _flops_per_element: float | None = None
    _rates: Sequence[Any] = ()
    _phases: Mapping[str, float] = attrs.field(factory=dict)

    def step(self, batch: Batch) -> Report:
        """A step; the last one before an entry is timed by phase."""
        asked_s, on_cpu = self.asked_s, self.ctx.device.type == "cpu"
        self._waited_s += time.monotonic() - asked_s
        self.position = batch.position
        may_be_due = self.due or self.counts_tokens  # tokens are counted only after the step
        if may_be_due:
            self._rates = [  # copied, since schedulers may change a tensor in place
                rate.clone() if isinstance(rate := group["lr"], Tensor) else rate
                for optimizer in self.fns.model.optimizers
                for group in optimizer.param_groups
            ]
        if self.peak is not None:
            report = self._counted(batch)
        elif may_be_due and on_cpu:  # an accelerator runs later than the host
            report = self._timed(batch)
        else:
            report = step(self.ctx, batch, self.fns)
        weight = report.weight
        if may_be_due:
            size = batch.sizes[self.ctx.axis("data").rank]
            self.by_tokens = isinstance(weight, Tensor) or weight != size
        weight = weight if type(weight) is int else total_of(weight)
        self.total = self.total + total_of(report.loss) * weight
        self.weight = self.weight + weight
        self.skipped += report.skipped
        if self.trace is not None:
            self.trace.step()
        return report

    def _timed(self, batch: Batch) -> Report:
        """A step, and the milliseconds of its phases.

        Forward is the time in the loss function. The optimizer's time is from the first step of an
        optimizer to the end of the last one. Everything else is backward, with its communication
        and clipping. There are no phases where the strategy steps no optimizer of torch's.
        """
        forward_s: list[float] = []
        optimizer_s: list[float] = []  # when optimizers began and ended to step

        def loss(model: Wrapped, batch: Batch) -> Any:
            started = time.perf_counter()
            try:
                return self.fns.loss(model, batch)
            finally:
                forward_s.append(time.perf_counter() - started)

        def mark(*_: Any) -> None:
            optimizer_s.append(time.perf_counter())

        hooks: list[Any] = []
        for optimizer in self.fns.model.optimizers:
            if isinstance(optimizer, Optimizer):
                hooks.append(optimizer.register_step_pre_hook(mark))
                hooks.append(optimizer.register_step_post_hook(mark))
        started = time.perf_counter()
        try:
            report = step(self.ctx, batch, attrs.evolve(self.fns, loss=loss))
        finally:
            seconds = time.perf_counter() - started
            for hook in hooks:
                hook.remove()
        if optimizer_s:
            forward, updating = sum(forward_s), optimizer_s[-1] - optimizer_s[0]
            self._phases = {
                "time/forward_ms": 1000 * forward,
                "time/backward_ms": 1000 * max(seconds - forward - updating, 0.0),
                "time/optimizer_ms": 1000 * updating,
            }
        return report

    def _counted(self, batch: Batch) -> Report:
        """A step whose floating-point operations follow from those of the first one."""
        leaves, _ = flatten(batch.data)
        elements = max((leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)), default=1)
        if self._flops_per_element is None:
            reports: list[Report] = []
            flops = _extensions.count_flops(lambda: reports.append(step(self.ctx, batch, self.fns)))
            self._flops_per_element = flops / max(elements, 1)
        else:
            reports = [step(self.ctx, batch, self.fns)]
        self._flops += elements * self._flops_per_element
        return reports[0]

    @contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Run a block whose time is not that of training, and is logged under a name."""
        if self.ctx.device.type != "cpu":
            synchronize(self.ctx)
        began_s = time.monotonic()
        yield
        self._paused_s[name] = self._paused_s.get(name, 0.0) + time.monotonic() - began_s

    def tokens(self) -> float:
        """The weights of the losses of the whole run, on all ranks; waits for the device."""
        pair = Mean(float(self.by_tokens), self.weight).pair(self.ctx)
        by_tokens, weight = ops.reduce(pair, self.ctx.axis("loss"), op="sum").tolist()
        if not by_tokens:
            raise PlanError(
                "fit(tokens=...): the losses of this run are weighted by rows. Return "
                "fx.Weighted(total, tokens) from the loss, or pass rows=."
            )
        return float(self.weights) + weight

    def write(self, report: Report) -> None:
        """Write the entry; the next one begins."""
        ctx, position = self.ctx, report.position
        now_s = time.monotonic()
        seconds = max(now_s - self._started_s - sum(self._paused_s.values()), 1e-9)
        loss, weight = self._mean()
        rates, used = self._rates, _extensions.memory(ctx)
        values = {
            "loss": loss,
            "grad_norm": report.grad_norm,
            "skipped": self.skipped,
            "lr": rates[0] if len(rates) == 1 else dict(enumerate(rates)),
            "rows_per_s": (position.samples - self.rows) / seconds,
            "tokens_per_s": weight / seconds if self.by_tokens and not self.carried else None,
            "mfu": self._flops / seconds / self.peak if self.peak and self._flops else None,
            "waiting": self._waited_s / seconds,
            **self._paused_s,
            "memory_gib": used.now / 2**30,
            "memory_peak_gib": used.peak / 2**30,
            **self._phases,
        }
        self.run.log(values, position)
        self._write_slow_ranks(position)
        self.weights = self.weights + weight
        self.total, self.weight, self.skipped, self.rows = 0.0, 0.0, 0, position.samples
        self._started_s, self._paused_s, self._waited_s = now_s, {}, 0.0
        self._flops = 0.0
        self.carried, self._phases = False, {}

    def _write_slow_ranks(self, position: Position) -> None:
        """Write the table of ranks that compute for longer than the others, if there are more."""
        pace = self.ctx.comm.state.slots.get(Pace)
        if pace is None or len(pace.slow) == self._slow:
            return
        self._slow = len(pace.slow)
        slow = list(pace.slow.values())
        columns = {title: [row[title] for row in slow] for title in slow[0]}
        self.run.table("slow ranks", columns, position)

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
        return {"loss": losses, "skipped": self.skipped, "weights": float(self.weights)}


def entries_after(
    restored: Restored | None,
    position: Position,
    ctx: DistContext,
    run: "Run",
    *,
    fns: StepFns,
    trace: "Trace | None",
) -> Entries:
    """The entry that is open where a run starts or resumes.

    At another world size, rank 0 has the losses of all ranks.
    """
    total, weight, skipped, weights = 0.0, 0.0, 0, 0.0
    if restored is not None:
        ranks, pairs = ctx.axis("loss"), restored.extra["loss"].to(ctx.device)
        skipped, weights = int(restored.extra["skipped"]), restored.extra["weights"]
        if len(pairs) == ranks.world_size:
            total, weight = pairs[ranks.rank]
        elif not ranks.rank:
            total, weight = torch.sum(pairs, 0)
    return Entries(
        ctx=ctx,
        run=run,
        fns=fns,
        trace=trace,
        peak=_extensions.peak_of_model(fns.model),
        total=total,
        weight=weight,
        skipped=skipped,
        rows=position.samples,
        weights=weights,
        carried=restored is not None,
    )


def tokens_of(restored: Restored) -> float:
    """The weights of the losses of a run until a checkpoint, as `Entries.tokens`."""
    return restored.extra["weights"] + float(restored.extra["loss"][:, 1].sum())


def log_disk(ctx: DistContext, folder: object, size: int, total: int | None) -> None:
    """Log how much disk the checkpoints of a run take, of this size each, if all are kept."""
    ops.log(ctx).info(
        "fit: a checkpoint in %s takes %s, and all are kept%s. keep_last=2 keeps two.",
        folder,
        show_bytes(size),
        f": {total} in this run, about {show_bytes(total * size)}" if total else "",
    )


def check_changes(ctx: DistContext, restored: Restored, loader: Sharded) -> None:
    """Compare the data of a checkpoint with those that continue it; log one line with what differs.

    Inside an epoch, a position that is another row of this data is a DataError. `restore` compares
    the plan.
    """
    position, saved = restored.position, restored.extra["layout"]
    now = layout_of(loader, position.epoch)
    changes = [f"{name} {saved[name]} → {now[name]}" for name in now if saved[name] != now[name]]
    moved = [
        f"{words} {saved[name]} when it was saved, {now[name]} now"
        for name, words in _MEANING.items()
        if saved[name] != now[name] and None not in (saved[name], now[name])
    ]
    if moved and position.index and not position.is_last:
        raise DataError(
            f"fit: {restored.path} was saved inside epoch {position.epoch}, at index "
            f"{position.index}, which is another row of the data that is given: "
            f"{'; '.join(moved)}. Pass the data, batch sampler and seed that it was saved with. To "
            f"train on other data, use another folder, and load the model with fx.restore.",
            code="FX401",
        )
    if changes:
        ops.log(ctx).info("fit: %s continues on other data: %s.", restored.path, "; ".join(changes))
