"""The learning-rate range test: losses over exponentially growing rates."""

import copy
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import attrs
from torch import Tensor, nn

from fxtrain import ops
from fxtrain._record import record, shown
from fxtrain.backends.core.model_state import format_of, local_part_of, memory_reader
from fxtrain.data import Sharded
from fxtrain.errors import PlanError, StepError
from fxtrain.loop.evaluating import Mean
from fxtrain.loop.stepping import StepFns, step
from fxtrain.state import DistContext, Wrapped
from fxtrain.state.context import check_connected

M = TypeVar("M", bound=nn.Module)
_MEMORY = 0.9
_NOISY = 0.1  # share of the curve, at its beginning, whose slopes are mostly noise


@record
class RateCurve:
    """Losses over learning rates, and what they suggest. A plain value, equal on every rank.

    Attributes:
        rates: Learning rates, each a constant factor above the one before.
        losses: Mean loss of all ranks in the update of each rate.

    Example:
        >>> import fxtrain as fx
        >>> curve = fx.tuning.RateCurve(rates=(1e-3, 1e-2, 1e-1, 1.0), losses=(9.0, 8.0, 1.0, 9.0))
        >>> curve.steepest, curve.tenth_of_minimum
        (0.01, 0.001)
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def smoothed(self) -> tuple[float, ...]:
        """Means over a twentieth of the curve on each side, which shift nothing along it."""
        count = len(self.losses)
        losses: list[float] = []
        for n in range(count):
            side = min(max(1, count // 20), n, count - 1 - n)
            losses.append(sum(self.losses[n - side : n + side + 1]) / (2 * side + 1))
        return tuple(losses)

    @property
    def steepest(self) -> float | None:
        """The rate at which the smoothed loss falls fastest; None if it never falls."""
        losses = self.smoothed
        first = max(1, int(_NOISY * len(losses)))
        slopes = {n: losses[n + 1] - losses[n - 1] for n in range(first, len(losses) - 1)}
        best = min(slopes, key=lambda n: slopes[n], default=None)
        return None if best is None or slopes[best] >= 0 else self.rates[best]

    @property
    def tenth_of_minimum(self) -> float | None:
        """A tenth of the rate with the smallest smoothed loss; None without losses."""
        losses = self.smoothed
        return self.rates[losses.index(min(losses))] / 10 if losses else None

    @property
    def suggestion(self) -> float | None:
        """`steepest`."""
        return self.steepest


def find_lr(
    ctx: DistContext,
    fns: StepFns[M],
    loader: Sharded[object],
    *,
    start: float = 1e-7,
    stop: float = 10.0,
    updates: int = 100,
    diverged: float = 4.0,
) -> RateCurve:
    """Train some updates with exponentially growing learning rates, then restore everything.

    Schedulers are not stepped. The first parameter group gets the rate, and others keep their
    ratio to it. The test ends early when the loss diverges.

    Args:
        ctx: The context for which the model was wrapped.
        fns: The model and its loss.
        loader: From `fx.shard`, under the model's plan; it is read from its position on, which
            does not change.
        start: The first rate.
        stop: The last rate.
        updates: Number of rates, 2 or more.
        diverged: End when the smoothed loss has grown to this times its minimum, or is not
            finite.

    Returns:
        The curve, the same on every rank; `curve.suggestion` is a rate.

    Effects:
        Restores parameters, buffers, optimizers, schedulers, the loss scale and random generators
        bit for bit at the end, also after an error. Memory for a copy of them. Per update, those
        of `fx.step`, one all-reduce of two numbers, and one wait for the device.

    Raises:
        PlanError: an argument makes no sense, or the strategy is DeepSpeed, PP or Offload.
        StepError: an accumulation window is open, or what `fx.step` raises; non-finite values
            end the test instead.

    Example:
        >>> import fxtrain as fx, torch
        >>> from torch.utils.data import DataLoader
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(1, 1), ctx,
        ...                     optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        ...     fns = fx.StepFns(model=model, loss=lambda model, x: model(x.data).square().mean())
        ...     loader = fx.shard(DataLoader(torch.ones(4, 1), batch_size=2), ctx)
        ...     curve = fx.tuning.find_lr(ctx, fns, loader, start=1e-4, stop=1.0, updates=20)
        >>> 1e-4 < curve.suggestion < 1.0, model.optimizer.param_groups[0]["lr"]
        (True, 0.1)
    """
    check_connected("find_lr", ctx)
    _check(fns, start, stop, updates, diverged)
    rates = tuple(start * (stop / start) ** (n / (updates - 1)) for n in range(updates))
    with kept_state(ctx, fns.model):
        losses = _losses(ctx, fns, loader, rates, diverged)
    return RateCurve(rates=rates[: len(losses)], losses=losses)


def _check(fns: StepFns, start: float, stop: float, updates: int, diverged: float) -> None:
    if type(updates) is not int or updates < 2 or not 0 < start < stop or not diverged > 1:
        raise PlanError(
            f"find_lr(start={shown(start)}, stop={shown(stop)}, updates={shown(updates)}, "
            f"diverged={shown(diverged)}): rates grow from start, above 0, to stop, in 2 or more "
            f"updates, and diverged is above 1."
        )
    placed = fns.model.strategy.weights(fns.model).values()
    if fns.model.ctx.mesh.pipeline > 1 or any(weight.together or weight.place for weight in placed):
        raise PlanError(
            f"find_lr: {fns.model.strategy.name} keeps trained values in other places than the "
            f"module's parameters on each rank. Use Single, DDP, FSDP or TP."
        )
    if fns.model.window.micro or fns.model.status.added_grads:
        raise StepError(
            "find_lr: an accumulation window is open. Call it before training, or after an update."
        )


def _losses(
    ctx: DistContext,
    fns: StepFns,
    loader: Sharded,
    rates: tuple[float, ...],
    diverged: float,
) -> tuple[float, ...]:
    plan = attrs.evolve(fns.model.plan, nonfinite="ignore")
    model = attrs.evolve(fns.model, plan=plan, scheduler=None, schedulers=())
    trial = StepFns(model=model, loss=fns.loss)
    ratios = _ratios(model)
    losses: list[float] = []
    mean = Mean()
    _set_rates(model, ratios, rates[0])
    for batch in loader.updates(sys.maxsize):
        report = step(ctx, batch, trial)
        mean = mean.update(report)
        if not (report.applied or report.skipped):
            continue
        loss, mean = mean.reduce(ctx), Mean()
        if not math.isfinite(loss):
            break
        losses.append(loss)
        if len(losses) == len(rates) or _has_diverged(losses, diverged):
            break
        _set_rates(model, ratios, rates[len(losses)])
    return tuple(losses)


def _has_diverged(losses: list[float], times: float) -> bool:
    """Whether the exponential moving average is far above its minimum."""
    mean, means = 0.0, list[float]()
    for n, loss in enumerate(losses, 1):
        mean = _MEMORY * mean + (1 - _MEMORY) * loss
        means.append(mean / (1 - _MEMORY**n))
    return means[-1] > min(means) + (times - 1) * abs(min(means))


def _ratios(model: Wrapped) -> list[float]:
    """The rate of each parameter group, relative to the first one's."""
    groups = [group for optimizer in model.optimizers for group in optimizer.param_groups]
    rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
    return [rate / rates[0] if rates[0] else 1.0 for rate in rates]


def _set_rates(model: Wrapped, ratios: list[float], rate: float) -> None:
    groups = [group for optimizer in model.optimizers for group in optimizer.param_groups]
    for group, ratio in zip(groups, ratios, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * ratio)
        else:
            group["lr"] = rate * ratio


@contextmanager
def kept_state(ctx: DistContext, model: Wrapped) -> Iterator[None]:
    """Restore a model, its optimizers, schedulers and loss scale, and random state, after a block.

    Effects:
        Memory for a copy of what a checkpoint of this model contains, on the model's devices.
        Communicates as far as the strategy does to read and to restore its state.
    """
    state = model.strategy.state(model)
    parts = {name: local_part_of(tensor).clone() for name, tensor in state.tensors.items()}
    own = {name: tensor.detach().clone() for name, tensor in state.own.items()}
    shapes = {name: format_of(tensor) for name, tensor in state.tensors.items()}
    saved = memory_reader(ctx, shapes, parts, own, copy.deepcopy(state.values))
    with ops.fork_rng(ctx):
        try:
            yield
        finally:
            model.strategy.load_state(model, saved)
