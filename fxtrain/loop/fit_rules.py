"""What `fit` is asked for, and which of it may change when a run continues."""

import sys
from collections.abc import Iterator, MutableMapping
from itertools import chain
from typing import Any, ClassVar, Literal

import attrs
from torch.utils.data import BatchSampler, SequentialSampler

from fxtrain import ops
from fxtrain._record import above, at_least, record, shown
from fxtrain.checkpoint import Restored
from fxtrain.data import Sharded
from fxtrain.errors import DataError, PlanError
from fxtrain.loop.stepping import StepFns
from fxtrain.state import Batch, DistContext, Position

_MEASURES = ("epochs", "updates", "rows", "tokens")

# Settings that determine to which row a position inside an epoch refers.
_MEANING = {"units": "rows or batches in an epoch", "unit": "unit", "order": "order"}


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


def layout_of(loader: Sharded) -> dict[str, Any]:
    """What a checkpoint records of the data: plain values, equal on every rank."""
    batching, source = loader._batching, loader._loader
    sampler = getattr(source, "batch_sampler", None)
    if sampler is None or type(sampler) is BatchSampler:
        sampler = getattr(source if sampler is None else sampler, "sampler", None)
    order = type(sampler).__name__
    if type(sampler) is not SequentialSampler:
        order += f" with seed {loader.plan.seed}"
    if loader.plan.data.source == "sharded":
        order += ", sharded already"
    return {
        "units": loader._source.length(),
        "unit": batching.unit,
        "order": order,
        "batch": batching.stride,
        "even": batching.even,
    }


def check_changes(ctx: DistContext, restored: Restored, loader: Sharded) -> None:
    """Compare the data of a checkpoint with those that continue it; `restore` compares the plan.

    Effects:
        Logs one line with what differs.

    Raises:
        DataError: the position is inside an epoch, and refers to another row of this data.
    """
    position, saved, now = restored.position, restored.extra["layout"], layout_of(loader)
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
