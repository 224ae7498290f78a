"""What `fit` is asked for, what it returns and what it shows.

Progress is a tracker, so that a background thread reads what is logged, and training waits for
nothing.
"""

import atexit
import contextlib
import functools
import gc
import inspect
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from types import TracebackType
from typing import Any, ClassVar, Literal

import attrs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.data import BatchSampler, SequentialSampler

from fxtrain import ops
from fxtrain._reading import StrPath
from fxtrain._record import above, at_least, record
from fxtrain.checkpoint import Restored
from fxtrain.data import Sharded
from fxtrain.errors import DataError, PlanError
from fxtrain.ops.logs import log
from fxtrain.state import Batch, DistContext, Position, Report
from fxtrain.state.precision import names_of
from fxtrain.trackers import Entry, Start, Tracker

_SHOWN = ("loss", "rows_per_s", "tokens_per_s", "memory_gib")
_UNITS = {"rows_per_s": "rows/s", "tokens_per_s": "tokens/s", "memory_gib": "GiB"}
_MEASURES = ("epochs", "updates", "rows", "tokens")
# Settings that determine to which row a position inside an epoch refers.
_MEANING = {"units": "rows or batches in an epoch", "unit": "unit", "order": "order"}


class _ScriptEnded(BaseException):
    """The script ended, and its run is still open."""


class Reports(Iterator[Report]):
    """The reports of a run; closing it ends the run, and saves it.

    A `for` statement closes an iterator that nothing else refers to. One with a name is closed by
    its `with` block, or with its context. One that the end of the script finds open is not saved:
    groups are closing then, and no thread starts any more.
    """

    def __init__(self, ctx: DistContext, reports: Generator[Report], path: StrPath) -> None:
        self._ctx, self._reports, self._path = ctx, reports, path
        ctx.comm.state.open_runs.add(self)
        at_exit = functools.partial(_abandon, weakref.ref(self))
        atexit.register(at_exit)
        weakref.finalize(self, atexit.unregister, at_exit).atexit = False

    def __next__(self) -> Report:
        return next(self._reports)

    def __enter__(self) -> "Reports":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the run after its update, and save it; nothing if it has ended, or is in a step."""
        if inspect.getgeneratorstate(self._reports) != inspect.GEN_RUNNING:
            self._reports.close()

    def abandon(self) -> None:
        """End the run as it is, at the end of the script."""
        if inspect.getgeneratorstate(self._reports) == inspect.GEN_SUSPENDED:
            log(self._ctx).warning(
                "fit: the run in %s is still open at the end of the script, so what it trained "
                "since its last checkpoint is not saved. Use `with fx.fit(...) as reports:`.",
                self._path,
            )
            with contextlib.suppress(_ScriptEnded):
                self._reports.throw(_ScriptEnded())


def _abandon(reference: weakref.ref[Reports]) -> None:
    if (reports := reference()) is not None:
        reports.abandon()


def body_failed(closing: GeneratorExit, handled: BaseException | None) -> bool:
    """Whether the body of a loop ended with an error, not by `break`; called by its iterator.

    Python closes an iterator in both cases and does not say why. An error that unwinds the frame
    of the loop has a traceback that stands where the frame does.

    Args:
        closing: What the iterator received.
        handled: The error that was being handled where the loop began, if any.
    """
    if closing.__context__ not in (None, handled):  # closed by a `with` block, or at the end
        return True
    frame: Any = sys._getframe(2)
    return any(
        type(referrer) is TracebackType and referrer.tb_lasti == frame.f_lasti
        for referrer in gc.get_referrers(frame)
    )


def progress(
    total: int | None, *, every_s: float = 10.0, console: Console | None = None
) -> Tracker:
    """A tracker that shows updates, loss, speed, memory and the time left on standard error.

    Args:
        total: Updates of the whole run; None if unknown.
        every_s: Seconds between two lines where there is no terminal.
        console: Where to write; by default standard error.
    """
    screen = console or Console(stderr=True)

    def begin(_: None, start: Start) -> tuple[Callable[[Entry], None], Callable[[], None]]:
        before, began_s = start.position.updates, time.monotonic()
        last_s = began_s

        def update_bar(entry: Entry) -> None:
            bar.update(bar.task_ids[0], completed=entry.step, seen=_text(entry.value))

        def print_line(entry: Entry) -> None:
            nonlocal last_s
            now_s, done = time.monotonic(), entry.step - before
            if now_s - last_s < every_s:
                return
            last_s = now_s
            parts = [f"update {entry.step}" + ("" if total is None else f" of {total}")]
            parts.append(_text(entry.value))
            if total is not None and done > 0:
                left_s = (now_s - began_s) / done * (total - entry.step)
                parts.append(f"{timedelta(seconds=round(left_s))} left")
            text = "  ".join(part for part in parts if part)
            screen.print(text, highlight=False, soft_wrap=True)

        if not screen.is_terminal:
            return print_line, lambda: None
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[seen]}"))
        bar = Progress(*columns, TimeRemainingColumn(), console=screen)
        bar.add_task("updates", total=total, completed=before, seen="")
        bar.start()
        return update_bar, bar.stop

    return Tracker(
        name="progress",
        open=begin,
        # A bar has no place for anything else.
        write=lambda shown, entry: shown[0](entry) if entry.kind == "log" else None,
        close=lambda shown, failed: shown[1](),
    )


def _text(values: Mapping[str, float]) -> str:
    shown = [name for name in values if name in _SHOWN or name.startswith("eval")]
    return "  ".join(
        f"{values[name]:.4g} {_UNITS[name]}" if name in _UNITS else f"{name} {values[name]:.4g}"
        for name in shown
    )


def _targets(to: Any) -> tuple[Any, ...]:
    return tuple(to) if isinstance(to, Sequence) and not isinstance(to, str) else (to,)


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
    to: Any = attrs.field(converter=_targets)
    settings: Any
    log_every: int = attrs.field(validator=at_least(1))
    show: bool
    extra: Any = attrs.field(converter=lambda extra: {} if extra is None else extra)
    checkpoints: Any
    signals: tuple[str, ...] = attrs.field(converter=names_of)
    check_every: int = attrs.field(validator=at_least(1))

    def __attrs_post_init__(self) -> None:
        if all(getattr(self, name) is None for name in _MEASURES):
            raise PlanError(
                "fit: how long is the run? Pass epochs=, updates=, rows= or tokens=; the run ends "
                "at the one that is reached first."
            )
        if self.keep_best is not None and self.evaluate is None:
            raise PlanError("fit: keep_best compares what evaluate gives; pass evaluate too.")

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
        """What a run has of the limits because of which nothing is left to train; else empty."""
        position = loader.position
        counts = (position.updates, position.samples, int(tokens))
        reached: dict[str, int] = {}
        for name, count in zip(("updates", "rows", "tokens"), counts, strict=True):
            limit = getattr(self, name)
            if limit is not None and count >= limit:
                reached[name] = count
        if self.epochs is not None and next(loader.epochs(self.epochs), None) is None:
            reached["epochs"] = position.epoch + position.is_last
        return reached

    def total_updates(self, loader: Sharded) -> int | None:
        """Updates of the whole run; None where only reading the data tells."""
        if self.epochs is None:
            return self.updates
        total = loader._total_updates(self.epochs)
        return total if total is None or self.updates is None else min(total, self.updates)


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
