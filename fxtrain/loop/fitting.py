"""Training as an iterator: the loop is the callback."""

import atexit
import contextlib
import functools
import inspect
import math
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, SupportsFloat, TypeVar

import attrs
from torch import nn

from fxtrain import _extensions, ops
from fxtrain._reading import StrPath
from fxtrain._record import above, at_least, record, shown
from fxtrain.backends.core.replica_digests import verify_replicas
from fxtrain.checkpoint import Restored, Saving, save
from fxtrain.checkpoint.restoring import restore_newest
from fxtrain.data import Sharded
from fxtrain.data.sharded_loader import continued
from fxtrain.data.sharding import in_windows, layout_of
from fxtrain.errors import PlanError
from fxtrain.loop.evaluating import number_of
from fxtrain.loop.fit_entries import (
    Entries,
    check_changes,
    entries_after,
    log_disk,
    tokens_of,
)
from fxtrain.loop.stepping import StepFns
from fxtrain.ops.objects import gather_given
from fxtrain.state import Batch, DistContext, Position, Report
from fxtrain.state.precision import as_names

if TYPE_CHECKING:
    from fxtrain._extensions import Target

M = TypeVar("M", bound=nn.Module)
_PASSED_ON = ("ctx", "fns", "loader")  # arguments of `fit` that are no rules
# Why ranks end a run; of several, the first counts.
_REASONS = ("failed", "stopped", "signaled", "left")
_MEASURES = ("epochs", "updates", "rows", "tokens")


def fit(
    ctx: DistContext,
    fns: StepFns[M],
    loader: Sharded[object],
    path: StrPath,
    *,
    epochs: int | None = None,
    updates: int | None = None,
    rows: int | None = None,
    tokens: int | None = None,
    resume: bool | Literal["unless stopped"] = True,
    restore_settings: Literal["checkpoint", "script"] = "checkpoint",
    save_every: int | None = None,
    save_minutes: float | None = None,
    save_epochs: bool = True,
    keep_last: int | None = None,
    keep_best: int | None = None,
    metric: str | None = None,
    best: Literal["min", "max"] = "min",
    evaluate: Callable[[], SupportsFloat | Mapping[str, SupportsFloat]] | None = None,
    evaluate_every: int | None = None,
    to: "Target | Sequence[Target]" = (_extensions.JsonLines(),),  # noqa: B008 - a frozen value
    settings: Mapping[str, object] | None = None,
    log_every: int = 10,
    show: bool = True,
    extra: MutableMapping[str, Any] | None = None,
    checkpoints: StrPath | None = None,
    signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
    check_every: int = 1,
) -> "Reports":
    """Train, save, evaluate and track; yield the report of every step to the body of a loop.

    Nothing happens before the first report is asked for. A run whose folder holds a checkpoint
    continues from the latest one, bitwise as if it had not stopped, and with the same tracked
    curve; if that one is damaged, from the one before, and rank 0 logs why. The iteration ends
    with the run, after as many epochs, updates, rows or tokens as were asked for, whichever
    comes first. It ends earlier after an update at which a rank called `reports.stop()`, received
    a signal, or left its loop: then all ranks stop, and the state after that update is saved.
    `break` and an error in the body leave the loop. Neither is a decision to stop the run, so the
    next start continues it. Inside an accumulation window, a rank that left its loop trains to the
    end of the window first. An iterator that has a name is still open after `break`: write
    `with fx.fit(...) as reports:`, or close it. Closing its context closes it too; at the end of
    the script it is too late to save it. A run that is already complete is restored and yields no
    report, and nothing is written, so code after the loop must not rely on a report.

    Args:
        ctx: The context for which the model was wrapped.
        fns: The model and its loss.
        loader: From `fx.shard`.
        path: Folder of the run: trackers and checkpoints.
        epochs: Epochs of the whole run, those before a restart included. At least one of the four
            lengths is required.
        updates: Updates of the whole run, over as many epochs as that takes.
        rows: Rows of the whole run, on all ranks together: it ends with the first update at which
            `position.samples` is at least this.
        tokens: Weights of `fx.Weighted` losses of the whole run, on all ranks together: it ends
            with the first update at which their sum is at least this.
        resume: Continue from the latest checkpoint, if there is one. "unless stopped" leaves a run
            alone that was stopped by `reports.stop()`: it is restored and yields no report.
        restore_settings: Whose options of optimizers and schedulers count when a run continues, as
            `settings` of `fx.restore`.
        save_every: Updates between checkpoints.
        save_minutes: Minutes between checkpoints, by the clock of rank 0.
        save_epochs: Save at the end of every epoch.
        keep_last: Number of newest checkpoints to keep; all, if no rule is given.
        keep_best: Number of checkpoints with the best `metric` to keep. Checkpoints that are saved
            without an evaluation prune nothing.
        metric: Which value of `evaluate` decides; not needed where it gives one number.
        best: Whether the smallest or the largest metric is the best.
        evaluate: () → a number or a mapping of numbers by name, equal on every rank; for example
            `lambda: fx.evaluate(ctx, model, held_out, fn)`. The report after which it ran has
            them in `report.metrics`.
        evaluate_every: Updates between two evaluations; by default at the end of each epoch.
        to: Trackers, as in `fx.track`.
        settings: Hyperparameters to track.
        log_every: Updates between two entries; their loss is the mean over all rows in between.
        show: Show progress on standard error: a bar in a terminal, else a line now and then.
        extra: State of the body, saved with every checkpoint and filled in place on resuming;
            a checkpoint has its values after the body ran.
        checkpoints: Folder or fsspec URL of checkpoints; by default `path`.
        signals: Names of signals at which to save and stop; empty outside the main thread.
        check_every: Updates between two moments at which ranks agree on stopping.

    Effects:
        As `step`, `save`, `restore`, `track` and `evaluate`. Beside them, one exchange of packets
        for every check and one reduction of two numbers for every entry; none at one rank.
        `tokens` adds one reduction of two numbers to every update, and waits for the device there.
        Checkpoints are written in the background, except the last.

    Raises:
        PlanError: an argument makes no sense; at once, on every rank.
        FxError: as the functions above. Then nothing more is saved, trackers are closed as
            failed, and earlier checkpoints stay.

    Example:
        >>> import fxtrain as fx, tempfile, torch
        >>> from torch.utils.data import DataLoader
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(1, 1), ctx,
        ...                     optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        ...     fns = fx.StepFns(model=model, loss=lambda model, x: model(x.data).square().mean())
        ...     loader = fx.shard(DataLoader(torch.ones(4, 1), batch_size=2), ctx)
        ...     for report in fx.fit(ctx, fns, loader, tempfile.mkdtemp(), updates=5):
        ...         pass
        ...     report.position.updates, report.position.epoch
        (5, 2)
    """
    given: dict[str, Any] = {
        name: value for name, value in locals().items() if name not in _PASSED_ON
    }
    if not isinstance(fns, StepFns):
        raise PlanError(
            f"fit takes fx.StepFns, found {type(fns).__name__}. "
            f"Use fx.fit(ctx, fx.StepFns(model, loss), loader, path, epochs=3)."
        )
    if not isinstance(loader, Sharded):
        raise PlanError(
            f"fit: loader is a {type(loader).__name__}; pass a loader from fx.shard(loader, ctx, "
            f"plan)."
        )
    given["checkpoints"] = path if checkpoints is None else checkpoints
    rules = Rules(**given)
    reader = _Reader()
    return Reports(ctx, _train(ctx, fns, loader, rules, reader), path, reader)


@attrs.define
class _Reader:
    """What the loop that reads the reports passes to the run."""

    reason: str | None = None  # why this rank ends the run: "stopped", "failed" or "left"
    closed: bool = False  # whether it reads no more reports


class Reports(Iterator[Report]):
    """The reports of a run; closing it ends the run, and saves it.

    A `for` statement closes an iterator that nothing else refers to. One with a name is closed by
    its `with` block, or with its context. One that the end of the script finds open is not saved:
    groups are closing then, and no thread starts any more.

    Trackers are closed as failed where the loop is left by an error, and where nothing tells an
    error from `break`: use a `with` block, which does.
    """

    def __init__(
        self, ctx: DistContext, reports: Generator[Report], path: StrPath, reader: _Reader
    ) -> None:
        self._ctx, self._reports, self._path, self._reader = ctx, reports, path, reader
        ctx.comm.state.open_runs.add(self)
        at_exit = functools.partial(self._abandon, weakref.ref(self))
        atexit.register(at_exit)
        weakref.finalize(self, atexit.unregister, at_exit).atexit = False

    def __next__(self) -> Report:
        return next(self._reports)

    def __enter__(self) -> "Reports":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._reader.reason = "failed"
        elif self._reader.reason is None:
            self._reader.reason = "left"
        self.close()

    def stop(self) -> None:
        """Stop the run after the current update, on all ranks; one rank that calls it is enough.

        The iteration ends once the body has run, at the end of an open accumulation window, and
        with `check_every` at the next check. The run is saved and marked as stopped: under
        `resume="unless stopped"`, the next start leaves it as it is. Call it for a decision, such
        as early stopping.
        """
        self._reader.reason = "stopped"

    def close(self) -> None:
        """End the run after its update, and save it; nothing if it has ended, or is in a step."""
        if inspect.getgeneratorstate(self._reports) != inspect.GEN_RUNNING:
            self._reports.close()

    @staticmethod
    def _abandon(reference: "weakref.ref[Reports]") -> None:
        """End a run as it is, at the end of the script."""
        run = reference()
        if run is None or inspect.getgeneratorstate(run._reports) != inspect.GEN_SUSPENDED:
            return
        ops.log(run._ctx).warning(
            "fit: the run in %s is still open at the end of the script, so what it trained since "
            "its last checkpoint is not saved. Use `with fx.fit(...) as reports:`.",
            run._path,
        )
        with contextlib.suppress(SystemExit):
            run._reports.throw(SystemExit())


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
    restore_settings: Literal["checkpoint", "script"]
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
    signals: tuple[str, ...] = attrs.field(converter=as_names)
    check_every: int = attrs.field(validator=at_least(1))

    def __attrs_post_init__(self) -> None:
        if all(getattr(self, name) is None for name in _MEASURES):
            raise PlanError(
                "fit: the run has no length. Pass epochs=, updates=, rows= or tokens=; the run "
                "ends at the one that is reached first."
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

    def score(self, values: Any) -> float | None:
        """The number by which checkpoints are compared, if it is finite."""
        named = values if isinstance(values, Mapping) else {}
        if self.metric not in named and (self.metric is not None or (named and self.keep_best)):
            raise PlanError(
                f"fit(metric={self.metric!r}): evaluate returned {shown(values)}. Pass the name of "
                f"one of its values: {', '.join(map(str, named)) or 'it has none, so omit metric'}."
            )
        number = number_of(named.get(self.metric, values))
        if number is None and self.keep_best:
            raise PlanError(
                f"fit(keep_best={self.keep_best}): evaluate returned {shown(values)}, which has no "
                f"number to compare. Return a number, or name one of several with metric=."
            )
        return None if number is None or not math.isfinite(number) else number

    def total_checkpoints(self, loader: Sharded) -> int | None:
        """Checkpoints of the whole run; None where that is not known before."""
        total, of_epoch = self.total_updates(loader), loader._total_updates(1)
        if total is None or self.save_minutes is not None or (self.save_epochs and not of_epoch):
            return None
        steps = (self.save_every, of_epoch if self.save_epochs else None)
        return len({total}.union(*(range(step, total, step) for step in steps if step)))

    def total_updates(self, loader: Sharded) -> int | None:
        """Updates of the whole run; None where only reading the data shows."""
        if self.epochs is None:
            return self.updates
        total = loader._total_updates(self.epochs)
        return total if total is None or self.updates is None else min(total, self.updates)


@attrs.define(eq=False, kw_only=True)
class _Loop:
    """A run that is open."""

    loader: Sharded
    rules: Rules
    notice: ops.Preemption | None
    entries: Entries
    # Whether an epoch has ended, maybe inside an open window, and what is due then has not
    # happened yet.
    epoch_over: bool = False
    failed: bool = False  # whether a loop has ended with an error, on any rank
    saving: Saving | None = None  # the last checkpoint, which may still be written
    saved: Position | None  # its position
    saves: int = 0  # checkpoints that were begun
    # When it was begun, by the clock of this rank.
    saved_s: float = attrs.field(factory=time.monotonic)


@contextmanager
def _opened(
    ctx: DistContext, fns: StepFns, loader: Sharded, rules: Rules
) -> Iterator[_Loop | None]:
    """The run, restored and tracked; None if there is nothing to train."""
    lock = _extensions.own(rules.path, ctx)
    try:
        restored = None
        if rules.resume:
            kept = dict.fromkeys(("run", "stopped", "data", "layout", *Entries.SAVED))
            extra = {**kept, "user": rules.extra}
            how = {"extra": extra, "settings": rules.restore_settings}
            restored = restore_newest(rules.checkpoints, ctx, fns.model, **how)
        loader = in_windows(loader, ctx, fns.model.plan)
        if restored is not None:
            check_changes(ctx, restored, loader)
            loader = continued(loader, restored.position, restored.extra["data"])
        if _is_over(ctx, loader, rules, restored):
            yield None
            return
        position = loader.position
        if restored is not None:
            ops.log(ctx).info(
                "fit: the run in %s continues after update %d.", rules.path, position.updates
            )
        loader = attrs.evolve(loader, run_updates=rules.total_updates(loader))
        known = restored.extra["run"] if restored else "folder" if rules.resume else None
        shown = (_extensions.progress(rules.total_updates(loader)),) if rules.show else ()
        run = _extensions.open_run(
            rules.path,
            ctx,
            (*rules.to, *shown),
            plan=fns.model.plan,
            settings=rules.settings,
            resume=known,
            position=position,
            lock=lock,
        )
        recorded = fns.model.plan.profile if run._is_new else None
        recording = nullcontext() if recorded is None else _extensions.profile(ctx, recorded)
        signals = rules.signals
        preemption = ops.preemption(ctx, signals=signals) if signals else nullcontext()
        with run, preemption as notice:
            with recording as trace:
                entries = entries_after(restored, position, ctx, run, fns=fns, trace=trace)
                entries.counts_tokens = rules.tokens is not None
                saved = None if restored is None else restored.position
                loop = _Loop(
                    loader=loader, rules=rules, notice=notice, entries=entries, saved=saved
                )
                yield loop
            entries.write_profile()
            run.close(failed=loop.failed)
    finally:
        if lock is not None:
            lock.release()


def _is_over(ctx: DistContext, loader: Sharded, rules: Rules, restored: Restored | None) -> bool:
    """Whether the run has ended, or was stopped and is left alone; logs which."""
    position, log = loader.position, ops.log(ctx)
    if reached := rules.reached(loader, 0.0 if restored is None else tokens_of(restored)):
        log.info(
            "fit: nothing to train: the run in %s ended at update %d. Continue with %s.",
            rules.path,
            position.updates,
            " and ".join(f"{name} > {n}" for name, n in reached.items()),
        )
        return True
    if restored is None or not restored.extra["stopped"]:
        return False
    left = rules.resume == "unless stopped"
    log.info(
        "fit: the run in %s was stopped at update %d by reports.stop(). %s",
        rules.path,
        position.updates,
        "It is left as it is; resume=True continues it."
        if left
        else 'It continues; resume="unless stopped" leaves it as it is.',
    )
    return left


def _train(
    ctx: DistContext, fns: StepFns, loader: Sharded, rules: Rules, reader: _Reader
) -> Generator[Report]:
    report, stop = None, None
    with _opened(ctx, fns, loader, rules) as loop:
        if loop is None:
            return
        entries, limited = loop.entries, (rules.updates, rules.rows) != (None, None)
        for batch in rules.batches(loop.loader):
            position = batch.position
            ended = (limited or position.is_last) and rules.ends_at(position)
            closes = ended or not position.micro
            loop.epoch_over = loop.epoch_over or position.is_last or ended
            entries.due = closes and (loop.epoch_over or not position.updates % rules.log_every)
            report = entries.step(batch)
            if closes:
                ended = ended or (rules.tokens is not None and _has_tokens(loop))
                if entries.due or rules.evaluate:
                    report = _tracked(loop, report)
            if not reader.closed:
                try:
                    yield report
                except GeneratorExit:
                    reader.closed = True
                    # Without a `with` block, nothing tells `break` from an error.
                    reader.reason = reader.reason or "failed"
            if closes:
                stop, due = _agreed(loop, position, reader.reason)
                if stop or ended:
                    break
                loop.epoch_over = False
                if due:
                    _save(loop, report)
            entries.asked_s = time.monotonic()
        loop.failed = stop == "failed"
        _finish(loop, report, stopped=stop == "stopped")


def _finish(loop: _Loop, report: Report | None, *, stopped: bool) -> None:
    """Save the state after the last update, unless that is done, and wait until it is written."""
    if report is not None and report.position != loop.saved:
        _save(loop, report, last=True, stopped=stopped)
    if loop.saving is not None:
        loop.saving.result()


def _has_tokens(loop: _Loop) -> bool:
    """Whether the run has its tokens; then what is due at its end is due now."""
    if loop.entries.tokens() < (loop.rules.tokens or 0):
        return False
    loop.epoch_over = loop.entries.due = True
    return True


def _tracked(loop: _Loop, report: Report) -> Report:
    """Evaluate and write an entry where they are due."""
    rules, position, entries = loop.rules, report.position, loop.entries
    every = rules.evaluate_every
    by_count = every is not None and not (position.micro or position.updates % every)
    if rules.evaluate and (by_count or (every is None and loop.epoch_over)):
        with entries.paused("evaluate_s"):
            report = attrs.evolve(report, metrics=rules.evaluate())
            rules.score(report.metrics)  # which refuses what has none
        entries.run.log({"eval": report.metrics}, position)
    if entries.due:
        entries.write(report)
    return report


def _agreed(loop: _Loop, position: Position, reason: str | None) -> tuple[str | None, bool]:
    """Why all ranks stop here, if they do, and whether a checkpoint is due."""
    rules, notice, ctx = loop.rules, loop.notice, loop.entries.ctx
    every = rules.save_every
    due = (every and not position.updates % every) or (rules.save_epochs and loop.epoch_over)
    if position.updates % rules.check_every and not loop.epoch_over:
        return None, bool(due)
    minutes = rules.save_minutes
    late = minutes is not None and time.monotonic() - loop.saved_s >= minutes * 60
    if notice is not None and notice.signaled and reason != "stopped":
        reason = "signaled"
    if ctx.world_size == 1:
        return reason, bool(due or late)
    # Rank 0 alone says whether it is late. Usually, no rank sends more than the call.
    own = (reason, late and ctx.is_main)
    given = gather_given(("fit", "its check after an update"), own if any(own) else None, ctx)
    reasons = [None if each is None else each[0] for each in given]
    gone = [rank for rank, reason in enumerate(reasons) if reason in ("left", "failed")]
    if 0 < len(gone) < len(reasons):
        ops.log(ctx).warning(
            "fit: rank %s left its loop after update %d, and the others did not. All ranks stop "
            "here, and the run is saved. Use reports.stop() to stop all of them.",
            ", ".join(map(str, gone)),
            position.updates,
        )
    stop = next((why for why in _REASONS if why in reasons), None)
    return stop, bool(due or (given[0] is not None and given[0][1]))


def _save(loop: _Loop, report: Report, *, last: bool = False, stopped: bool = False) -> None:
    rules, entries, score = loop.rules, loop.entries, None
    model, every = entries.fns.model, entries.fns.model.plan.verify_replicas
    if every and report.position.updates % every:  # else they were compared after this update
        verify_replicas(model)
    if report.metrics is not None:
        score = rules.score(report.metrics)
    pruned = rules.keep_best is None or score is not None
    kept = {"run": entries.run.state(), "stopped": stopped, **entries.state()}
    layout = layout_of(loop.loader, report.position.epoch)
    kept |= {"data": loop.loader.state(), "layout": layout}
    earlier = loop.saving
    with entries.paused("save_s"):
        loop.saving = save(
            rules.checkpoints,
            entries.ctx,
            model,
            position=report.position,
            extra={**kept, "user": dict(rules.extra)},
            metric=score,
            keep_last=rules.keep_last if pruned else None,
            keep_best=rules.keep_best if pruned else None,
            best=rules.best,
            background=not last,
        )
    loop.saved, loop.saved_s, loop.saves = report.position, time.monotonic(), loop.saves + 1
    size = None if earlier is None else earlier.size
    if size and loop.saves == 2 and rules.keep_last is rules.keep_best is None:
        log_disk(entries.ctx, rules.checkpoints, size, rules.total_checkpoints(loop.loader))
