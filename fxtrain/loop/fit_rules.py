"""What `fit` is asked for: how long a run is, and what happens when."""

import sys
from collections.abc import Iterator, MutableMapping
from itertools import chain
from typing import Any, ClassVar, Literal

import attrs

from fxtrain._errors import DataError, PlanError
from fxtrain._record import above, at_least, record
from fxtrain.data import Sharded
from fxtrain.loop.stepping import StepFns
from fxtrain.state import Batch, DistContext, Position, shown

_MEASURES = ("epochs", "updates", "rows", "tokens")


@record
class Rules:
    """The settings of a run; those that `fit` describes have the same meaning here."""

    OWNER: ClassVar[str] = "fit"

    path: Any
    epochs: int | None = attrs.field(validator=at_least(0))
    updates: int | None = attrs.field(validator=at_least(0))
    rows: int | None = attrs.field(validator=at_least(0))
    tokens: int | None = attrs.field(validator=at_least(0))
    resume: Literal["unless stopped"] | bool
    save_every: int | None = attrs.field(validator=at_least(1))
    save_minutes: float | None = attrs.field(validator=above(0))
    save_epochs: bool
    keep_last: int | None = attrs.field(validator=at_least(1))
    keep_best: int | None = attrs.field(validator=at_least(1))
    metric: str | None
    best: Literal["min", "max"]
    evaluate: Any
    evaluate_every: int | None = attrs.field(validator=at_least(1))
    to: Any
    settings: Any
    log_every: int = attrs.field(validator=at_least(1))
    show: bool
    extra: Any
    checkpoints: Any
    signals: tuple[str, ...]
    check_every: int = attrs.field(validator=at_least(1))

    def __attrs_post_init__(self) -> None:
        if all(getattr(self, name) is None for name in _MEASURES):
            raise PlanError(
                "fit: how long is the run? Pass epochs=, updates=, rows= or tokens=; the run ends "
                "at the one that is reached first."
            )

    def batches(self, loader: Sharded[Any]) -> Iterator[Batch[Any]]:
        """From the position of a loader on, for as many epochs as the run may have."""
        if self.epochs is None:
            return loader.updates(sys.maxsize)
        return chain.from_iterable(loader.epochs(self.epochs))

    def ends_at(self, position: Position) -> bool:
        """Whether a batch with this position is the last of the run."""
        if position.micro:
            return position.is_last and position.epoch + 1 == self.epochs
        return (
            (position.is_last and position.epoch + 1 == self.epochs)
            or (self.updates is not None and position.updates >= self.updates)
            or (self.rows is not None and position.samples >= self.rows)
        )

    def reached(self, loader: Sharded, tokens: float) -> dict[str, int]:
        """The limits because of which nothing is left to train from the position of a loader."""
        position = loader.position
        counts = (position.updates, position.samples, tokens)
        reached: dict[str, int] = {}
        for name, count in zip(("updates", "rows", "tokens"), counts, strict=True):
            limit = getattr(self, name)
            if limit is not None and count >= limit:
                reached[name] = limit
        if self.epochs is not None and next(loader.epochs(self.epochs), None) is None:
            reached["epochs"] = self.epochs
        return reached

    def total_updates(self, loader: Sharded) -> int | None:
        """Updates of the whole run; None where only reading the data tells."""
        if self.epochs is None:
            return self.updates
        try:
            total = loader.total_updates(self.epochs)
        except DataError:
            return None
        return total if self.updates is None else min(total, self.updates)


def check_arguments(
    ctx: Any, fns: Any, loader: Any, evaluate: Any, extra: Any, keep_best: Any
) -> None:
    """Refuse objects that are not what `fit` takes.

    Raises:
        PlanError: one or several are not.
    """
    wrong = [
        f"{name} is {shown(value)}; pass {wanted}"
        for name, value, kind, wanted in (
            ("ctx", ctx, DistContext, "the context, from fx.detect()"),
            ("fns", fns, StepFns, "fx.StepFns(model=model, loss=loss)"),
            ("loader", loader, Sharded, "a loader from fx.shard(loader, ctx, plan)"),
            ("extra", extra, MutableMapping | None, "a dict that the body of the loop changes"),
        )
        if not isinstance(value, kind)
    ]
    if evaluate is not None and not callable(evaluate):
        wrong.append(
            f"evaluate is {shown(evaluate)}; pass a function without arguments, such as "
            f"lambda: fx.evaluate(ctx, model, held_out, fn)"
        )
    if keep_best is not None and evaluate is None:
        wrong.append("keep_best compares what evaluate gives; pass evaluate too")
    if wrong:
        raise PlanError(f"fit: {'; '.join(wrong)}.")
