"""Exponential moving averages of a model's parameters, under every strategy of torch's."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fxtrain._record import shown
from fxtrain.errors import PlanError
from fxtrain.ops.whole_tensors import local_values
from fxtrain.state import Report, Wrapped
from fxtrain.state.wrapped import check_open

_HALF = (torch.bfloat16, torch.float16)
Decay = float | Callable[[int], float]


def _lerp(averages: list[Tensor], now: list[Tensor], decay: float) -> None:
    get_ema_multi_avg_fn(decay)(averages, now, None)


def _sum(averages: list[Tensor], now: list[Tensor], decay: float) -> None:
    for average, value in zip(averages, now, strict=True):
        average.mul_(decay).add_(value, alpha=1 - decay)


def _difference(averages: list[Tensor], now: list[Tensor], decay: float) -> None:
    for average, value in zip(averages, now, strict=True):
        average.sub_((1 - decay) * (average - value))


_FORMULAS = {"lerp": _lerp, "sum": _sum, "difference": _difference}


@attrs.frozen(kw_only=True, eq=False, repr=False)
class EMA:
    """An exponential moving average of a model's parameters; made by `fx.ema`.

    Attributes:
        model: The model that trains.
        decay: Weight of the average so far, in each update; or the function that gives it.
        warmup: Whether the decay of early updates is smaller.
        update_every: The distance between two updates that are averaged.
        start: Whether the average starts with the weights that the model had when it was made, or
            with a copy of those after the first update.
        formula: How the average is computed.
        state: What a checkpoint stores, as live tensors: "updates", the number of updates so far
            (int64 on the CPU), and "weights", the averages by name, sharded as the parameters
            are; fp32 for parameters in half precision.
    """

    model: Wrapped
    decay: Decay
    warmup: bool
    update_every: int
    start: Literal["weights", "copy"]
    formula: Literal["lerp", "sum", "difference"]
    state: Mapping[str, Any]
    _parameters: tuple[nn.Parameter, ...] = attrs.field(alias="parameters")

    def __repr__(self) -> str:
        decay = getattr(self.decay, "__name__", self.decay)
        return f"EMA(decay={decay}, warmup={self.warmup}, updates={self.updates})"

    @property
    def updates(self) -> int:
        """The number of updates so far."""
        return int(self.state["updates"])

    def decay_of(self, update: int) -> float:
        """The decay of an update, from 0; with warm-up min(decay, (1 + n) / (10 + n)).

        Raises:
            PlanError: the function `decay` returns something else than a number from 0 to 1.
        """
        decay = self.decay(update) if callable(self.decay) else self.decay
        if not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise PlanError(
                f"ema(decay=...): the function returned {shown(decay)} for update {update}. Return "
                f"a number from 0 to 1, such as min(0.999, update / 1000)."
            )
        return min(decay, (1 + update) / (10 + update)) if self.warmup else decay

    @torch.no_grad()
    def update(self, report: Report) -> None:
        """Add the current parameters to the average, if the step has updated them.

        Call it after every `fx.step` or `fx.update`. Under `start="copy"`, the first update copies
        the parameters, as torch's `AveragedModel` does.

        Effects:
            Changes `state` in place. No traffic; waits for no device.

        Raises:
            PlanError: as `decay_of`.
        """
        if not report.applied:
            return
        update = self.updates
        if not update % self.update_every:
            self._add(update)
        self.state["updates"].add_(1)

    def _add(self, update: int) -> None:
        copies = self.start == "copy" and not update
        decay = 0.0 if copies else self.decay_of(update)
        averages = self._local_averages()
        now = [
            local if local.dtype == average.dtype else local.to(average.dtype)
            for local, average in zip(map(local_values, self._parameters), averages, strict=True)
        ]
        if copies:
            for average, value in zip(averages, now, strict=True):
                average.copy_(value)
        elif averages:
            _FORMULAS[self.formula](averages, now, decay)

    @contextmanager
    def applied(self) -> Iterator[Wrapped]:
        """Give the model the averaged parameters for a block; its own return at the end.

        Inside, evaluate or export the model. Buffers, such as the statistics of BatchNorm, are
        those of the model. The model must not train in the block.

        Effects:
            Memory for another copy of this rank's parameters. No traffic. Before the first
            update, the average is the model's initial parameters.

        Example:
            >>> import fxtrain as fx, torch
            >>> with fx.detect(env={}, device="cpu") as ctx:
            ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
            ...     average = fx.ema(model)
            ...     with average.applied(), torch.no_grad():
            ...         model(torch.ones(3, 2)).shape
            torch.Size([3, 1])
        """
        check_open(self.model, "EMA.applied", PlanError)
        before = [local_values(parameter).clone() for parameter in self._parameters]
        try:
            self._set(self._local_averages())
            yield self.model
        finally:
            self._set(before)

    def _local_averages(self) -> list[Tensor]:
        return [local_values(average) for average in self.state["weights"].values()]

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        """Write this rank's parts of the parameters."""
        # FSDP frees the full parameters of a forward, which would have the old values.
        self.model.strategy.weights(self.model)
        for parameter, value in zip(self._parameters, values, strict=True):
            local_values(parameter).copy_(value)


def ema(
    model: Wrapped,
    *,
    decay: Decay = 0.999,
    warmup: bool = False,
    update_every: int = 1,
    start: Literal["weights", "copy"] = "copy",
    formula: Literal["lerp", "sum", "difference"] = "lerp",
) -> EMA:
    """Average a model's parameters over the updates, with exponentially falling weights.

    Args:
        model: From `fx.wrap`. Parameters that require grad now are averaged, on this rank as the
            strategy shards them.
        decay: Weight of the average so far, in each update: from 0 to less than 1; or a function
            of the update n, counted from 0, that returns it.
        warmup: Use min(decay, (1 + n) / (10 + n)) in update n, so that the average forgets the
            initial parameters sooner.
        update_every: Average the parameters after updates 0, `update_every`,
            `2 * update_every`, ... only.
        start: "copy" starts with the parameters after the first update; "weights" with those that
            the model has now, so that the first update is averaged too.
        formula: Which of three formulas computes the average, for a result that is bitwise equal
            to that of other code: "lerp", average + (1 - decay) * (parameter - average), rounded
            once, as torch's; "sum", decay * average + (1 - decay) * parameter; "difference",
            average - (1 - decay) * (average - parameter).

    Effects:
        Memory for a copy of this rank's parameters.

    Raises:
        PlanError: an argument makes no sense, or the strategy does not keep the trained values in
            the module's parameters on every rank: DeepSpeed, PP, Offload and `Plan.local`.

    Example:
        >>> import fxtrain as fx, torch
        >>> from torch.utils.data import DataLoader
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(1, 1), ctx,
        ...                     optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        ...     fns = fx.StepFns(model=model, loss=lambda model, x: model(x.data).square().mean())
        ...     average = fx.ema(model, decay=0.9)
        ...     for batch in fx.shard(DataLoader(torch.ones(4, 1), batch_size=2), ctx):
        ...         average.update(fx.step(ctx, batch, fns))
        ...     average
        EMA(decay=0.9, warmup=False, updates=2)
    """
    check_open(model, "ema", PlanError)
    if not callable(decay) and (not isinstance(decay, int | float) or not 0 <= decay < 1):
        raise PlanError(
            f"ema(decay={shown(decay)}): choose a number from 0 to less than 1, or a function of "
            f"the update."
        )
    if type(update_every) is not int or update_every < 1:
        raise PlanError(
            f"ema(update_every={shown(update_every)}): choose a number of updates, 1 or more."
        )
    for name, value, choices in (
        ("start", start, ("weights", "copy")),
        ("formula", formula, tuple(_FORMULAS)),
    ):
        if value not in choices:
            raise PlanError(
                f"ema({name}={shown(value)}): choose one of {', '.join(map(repr, choices))}."
            )
    if model.status.replica is not None:
        raise PlanError(
            "ema: with Plan(local=...), replicas have different parameters between averages. "
            "Train without local."
        )
    weights = {
        name: weight
        for name, weight in model.strategy.weights(model).items()
        if isinstance(weight.like, nn.Parameter) and weight.like.requires_grad
    }
    elsewhere = any(weight.together or weight.place is not None for weight in weights.values())
    if elsewhere or model.ctx.mesh.pipeline > 1:
        raise PlanError(
            f"ema: {model.strategy.name} keeps trained values in other places than the module's "
            f"parameters on each rank. Use Single, DDP, FSDP or TP."
        )
    trained: dict[Any, tuple[str, nn.Parameter]] = {}
    for name, weight in weights.items():
        trained.setdefault(weight.key, (name, weight.like))
    state = {
        "updates": torch.zeros((), dtype=torch.int64, device="cpu"),
        "weights": {name: _average_of(parameter) for name, parameter in trained.values()},
    }
    parameters = tuple(parameter for _, parameter in trained.values())
    return EMA(
        model=model,
        decay=decay if callable(decay) else float(decay),
        warmup=warmup,
        update_every=update_every,
        start=start,
        formula=formula,
        state=state,
        parameters=parameters,
    )


@torch.no_grad()
def _average_of(parameter: nn.Parameter) -> Tensor:
    dtype = torch.float32 if parameter.dtype in _HALF else parameter.dtype
    return parameter.detach().to(dtype, copy=True)
