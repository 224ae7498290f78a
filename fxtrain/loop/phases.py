"""How long a step spends in each phase, by the clock of the host."""

import time
from collections.abc import Mapping
from typing import Any

import attrs
from torch.optim import Optimizer

from fxtrain.loop.stepping import StepFns, step
from fxtrain.state import Batch, DistContext, Report, Wrapped


@attrs.frozen(eq=False)
class PhaseClock:
    """Steps that are timed.

    Attributes:
        fns: The user's functions, with a loss that notes its time.
        optimizers: Those whose steps are noted.
        forward_s: Seconds in the loss function during the current step.
        optimizer_s: When optimizers began and ended to step.
    """

    fns: StepFns
    optimizers: tuple[Optimizer, ...]
    forward_s: list[float]
    optimizer_s: list[float] = attrs.field(factory=list)

    def step(self, ctx: DistContext, batch: Batch) -> tuple[Report, Mapping[str, float]]:
        """`step`, and the milliseconds of its phases by name.

        Forward is the time in the loss function. The optimizer's time is from the first step of an
        optimizer to the end of the last one. Everything else is backward, with its communication
        and clipping. There are no phases where the strategy steps no optimizer of torch's.
        """
        self.forward_s.clear()
        self.optimizer_s.clear()
        mark = self._mark
        hooks = [one.register_step_pre_hook(mark) for one in self.optimizers]
        hooks += [one.register_step_post_hook(mark) for one in self.optimizers]
        started = time.perf_counter()
        try:
            report = step(ctx, batch, self.fns)
        finally:
            seconds = time.perf_counter() - started
            for hook in hooks:
                hook.remove()
        if not self.optimizer_s:
            return report, {}
        forward, optimizer = sum(self.forward_s), self.optimizer_s[-1] - self.optimizer_s[0]
        return report, {
            "time/forward_ms": 1000 * forward,
            "time/backward_ms": 1000 * max(seconds - forward - optimizer, 0.0),
            "time/optimizer_ms": 1000 * optimizer,
        }

    def _mark(self, *_: Any) -> None:
        self.optimizer_s.append(time.perf_counter())


def phase_clock(ctx: DistContext, fns: StepFns) -> PhaseClock | None:
    """A clock for the steps of a model; None on an accelerator, which runs later than the host."""
    if ctx.device.type != "cpu":
        return None
    spent: list[float] = []

    def loss(model: Wrapped, batch: Batch) -> Any:
        started = time.perf_counter()
        try:
            return fns.loss(model, batch)
        finally:
            spent.append(time.perf_counter() - started)

    optimizers = (one for one in fns.model.optimizers if isinstance(one, Optimizer))
    return PhaseClock(attrs.evolve(fns, loss=loss), tuple(optimizers), spent)
