"""Training as an iterator: the loop is the callback."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, ClassVar, Literal, SupportsFloat, TypeVar

import attrs
from torch import nn

from fxtrain import ops
from fxtrain._arguments import known_arguments
from fxtrain._errors import DataError, FxError, PlanError
from fxtrain._reading import StrPath
from fxtrain._record import above, at_least, record
from fxtrain.checkpoint import Restored, Saving, latest, restore, save
from fxtrain.data import Sharded
from fxtrain.loop.fit_entries import Entries, entries_after
from fxtrain.loop.means import finite_number
from fxtrain.loop.open_runs import ended_with
from fxtrain.loop.progress import progress
from fxtrain.loop.stepping import StepFns
from fxtrain.profile import profile
from fxtrain.state import DistContext, JsonLines, Position, Report, Wrapped, shown
from fxtrain.track import Run, Target, track

__all__ = ["fit"]

M = TypeVar("M", bound=nn.Module)


@record
class _Rules:
    """What `fit` was asked for."""

    OWNER: ClassVar[str] = "fit"

    path: Any
    epochs: int = attrs.field(validator=at_least(0))
    resume: bool
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


@known_arguments(PlanError)
def fit(
    ctx: DistContext,
    fns: StepFns[M],
    loader: Sharded[object],
    path: StrPath,
    *,
    epochs: int,
    resume: bool = True,
    save_every: int | None = None,
    save_minutes: float | None = None,
    save_epochs: bool = True,
    keep_last: int | None = None,
    keep_best: int | None = None,
    metric: str | None = None,
    best: Literal["min", "max"] = "min",
    evaluate: Callable[[], SupportsFloat | Mapping[str, SupportsFloat]] | None = None,
    evaluate_every: int | None = None,
    to: Target | Sequence[Target] = (JsonLines(),),  # noqa: B008 - a frozen value
    settings: Mapping[str, object] | None = None,
    log_every: int = 10,
    show: bool = True,
    extra: MutableMapping[str, Any] | None = None,
    checkpoints: StrPath | None = None,
    signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
    check_every: int = 1,
) -> Iterator[Report]:
    """Train, save, evaluate and track; yield the report of every step to the body of a loop.

    Nothing happens before the first report is asked for. A run whose folder holds a checkpoint
    continues from the latest one, bitwise as if it had not stopped, and with the same tracked
    curve. The iteration ends after the last epoch, or after an update at which a rank received a
    signal or left its loop (`break`, an error in the body, closing the iterator): then all ranks
    stop, and the state after that update is saved. Inside an accumulation window, a rank that left
    its loop trains to the end of the window first. An iterator that has a name is still open after
    `break`; it is closed with its context, or when the script ends. A run that is already complete
    is restored and yields no report, so code after the loop must not rely on one.

    Args:
        ctx: The context for which the model was wrapped.
        fns: The model and its loss.
        loader: From `fx.shard`.
        path: Folder of the run: trackers and checkpoints.
        epochs: Epochs of the whole run, those before a restart included.
        resume: Continue from the latest checkpoint, if there is one.
        save_every: Updates between checkpoints.
        save_minutes: Minutes between checkpoints, by the clock of rank 0.
        save_epochs: Save at the end of every epoch.
        keep_last: Keep so many of the newest checkpoints; all, if no rule is given.
        keep_best: Keep so many with the best `metric`. Nothing is pruned by checkpoints that are
            saved without an evaluation.
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
        ...     for report in fx.fit(ctx, fns, loader, tempfile.mkdtemp(), epochs=3):
        ...         if report.position.updates == 5:
        ...             break
        ...     report.position.epoch
        2
    """
    _check(ctx, fns, loader, evaluate, extra, keep_best)
    rules = _rules(
        path=path,
        epochs=epochs,
        resume=resume,
        save_every=save_every,
        save_minutes=save_minutes,
        save_epochs=save_epochs,
        keep_last=keep_last,
        keep_best=keep_best,
        metric=metric,
        best=best,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        to=tuple(to) if isinstance(to, Sequence) and not isinstance(to, str) else (to,),
        settings=settings,
        log_every=log_every,
        show=show,
        extra={} if extra is None else extra,
        checkpoints=path if checkpoints is None else checkpoints,
        signals=(signals,) if isinstance(signals, str) else tuple(signals),
        check_every=check_every,
    )
    return ended_with(ctx, _train(ctx, fns, loader, rules))


def _rules(**given: Any) -> _Rules:
    try:
        return _Rules(**given)
    except PlanError as error:
        raise PlanError(str(error).replace("_Rules(", "fit(", 1)) from None


def _check(ctx: Any, fns: Any, loader: Any, evaluate: Any, extra: Any, keep_best: Any) -> None:
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


@attrs.frozen(eq=False)
class _Loop:
    """What stays the same during a run."""

    ctx: DistContext
    model: Wrapped
    loader: Sharded
    rules: _Rules
    run: Run
    notice: ops.Preemption | None
    restored: Restored | None
    entries: Entries


@contextmanager
def _opened(ctx: DistContext, fns: StepFns, loader: Sharded, rules: _Rules) -> Iterator[_Loop]:
    """The run, restored and tracked."""
    restored = _restored(ctx, fns.model, rules) if rules.resume else None
    position = loader.position if restored is None else restored.position
    known = restored.extra["run"] if restored else "folder" if rules.resume else None
    run = track(
        rules.path,
        ctx,
        (*rules.to, progress(_total(loader, rules.epochs))) if rules.show else rules.to,
        plan=fns.model.plan,
        settings=rules.settings,
        resume=known,
        position=position,
    )
    recorded = fns.model.plan.profile if restored is None else None
    recording = nullcontext() if recorded is None else profile(ctx, recorded)
    with run, _signals(ctx, rules.signals) as notice:
        with recording as trace:
            entries = entries_after(
                restored, position, ctx, run, fns=fns, every=rules.log_every, trace=trace
            )
            yield _Loop(ctx, fns.model, loader.at(position), rules, run, notice, restored, entries)
        entries.write_profile()


def _train(ctx: DistContext, fns: StepFns, loader: Sharded, rules: _Rules) -> Generator[Report]:
    with _opened(ctx, fns, loader, rules) as loop:
        saved = None if loop.restored is None else loop.restored.position
        report, saving, left, entries = None, None, False, loop.entries
        clock = time.monotonic()
        for batch in chain.from_iterable(loop.loader.epochs(rules.epochs)):
            report = entries.step(batch)
            position = report.position
            if entries.due or (rules.evaluate and not position.micro):
                report = _tracked(loop, report)
            if not left:
                try:
                    yield report
                except GeneratorExit:
                    left = True
            if position.micro:
                entries.asked_s = time.monotonic()
                continue
            stop, due = _agreed(loop, position, clock, left=left)
            if stop:
                break
            if due:
                saving, saved = _save(loop, report), position
                clock = time.monotonic()
            entries.asked_s = time.monotonic()
        _finish(loop, report, saved, saving)


def _finish(
    loop: _Loop, report: Report | None, saved: Position | None, saving: Saving | None
) -> None:
    """Save the state after the last update, unless that is done, and wait until it is written."""
    if report is None:
        ops.log(loop.ctx).info(
            "fit: nothing to train: the run in %s ended at update %d. Continue with epochs > %d.",
            loop.rules.path,
            loop.loader.position.updates,
            loop.rules.epochs,
        )
    elif report.position != saved:
        saving = _save(loop, report, last=True)
    if saving is not None:
        saving.result()


def _signals(ctx: DistContext, names: tuple[str, ...]) -> AbstractContextManager[Any]:
    return ops.preemption(ctx, signals=names) if names else nullcontext()


def _total(loader: Sharded, epochs: int) -> int | None:
    """Updates of the whole run; None where only reading the data tells."""
    try:
        return loader.total_updates(epochs)
    except DataError:
        return None


def _restored(ctx: DistContext, model: Wrapped, rules: _Rules) -> Restored | None:
    """The state of the latest checkpoint, if there is one; rank 0 looks."""
    found, problem = None, None
    try:
        found = latest(rules.checkpoints) if ctx.is_main else None
    except FxError as error:
        problem = error
    ops.raise_together(problem, ctx)
    if (found := ops.broadcast_object(found, ctx)) is None:
        return None
    template = {"run": None, "loss": None, "skipped": None, "user": dict(rules.extra)}
    restored = restore(found, ctx, model, extra=template)
    rules.extra.update(restored.extra["user"])
    return restored


def _tracked(loop: _Loop, report: Report) -> Report:
    """Evaluate and write an entry where they are due."""
    rules, position = loop.rules, report.position
    every = rules.evaluate_every
    if rules.evaluate and not (position.updates % every if every else not position.is_last):
        report = attrs.evolve(report, metrics=_evaluated(rules))
        loop.run.log({"eval": report.metrics}, position)
    if loop.entries.due:
        loop.entries.write(report)
    return report


def _evaluated(rules: _Rules) -> Any:
    found = rules.evaluate()
    named = found if isinstance(found, Mapping) else {}
    if rules.metric not in named and (rules.metric is not None or (named and rules.keep_best)):
        raise PlanError(
            f"fit(metric={rules.metric!r}): evaluate returned {shown(found)}. Pass the name of "
            f"one of its values: {', '.join(map(str, named)) or 'it has none, so omit metric'}."
        )
    return found


def _agreed(loop: _Loop, position: Position, clock: float, *, left: bool) -> tuple[bool, bool]:
    """Whether all ranks stop here, and whether a checkpoint is due."""
    rules, notice, ctx = loop.rules, loop.notice, loop.ctx
    every = rules.save_every
    due = (every and not position.updates % every) or (rules.save_epochs and position.is_last)
    if position.updates % rules.check_every and not position.is_last:
        return False, bool(due)
    minutes = rules.save_minutes
    late = minutes is not None and time.monotonic() - clock >= minutes * 60
    signalled = notice is not None and notice.signalled
    if ctx.world_size == 1:
        return left or signalled, bool(due or late)
    found = ops.gather_objects((left, signalled, late), ctx)
    gone = [rank for rank, (one, _, _) in enumerate(found) if one]
    if 0 < len(gone) < len(found):
        ops.log(ctx).warning(
            "fit: rank %s left its loop after update %d, and the others did not. All ranks stop "
            "here, and the run is saved. Decide on values that are equal on every rank.",
            ", ".join(map(str, gone)),
            position.updates,
        )
    return any(one or two for one, two, _ in found), bool(due or found[0][2])


def _save(loop: _Loop, report: Report, *, last: bool = False) -> Saving:
    rules, ctx, found = loop.rules, loop.ctx, report.metrics
    found = found.get(rules.metric) if isinstance(found, Mapping) else found
    score = finite_number(found)
    pruned = rules.keep_best is None or score is not None
    return save(
        rules.checkpoints,
        ctx,
        loop.model,
        position=report.position,
        extra={"run": loop.run.state(), **loop.entries.state(), "user": dict(rules.extra)},
        metric=score,
        keep_last=rules.keep_last if pruned else None,
        keep_best=rules.keep_best if pruned else None,
        best=rules.best,
        background=not last,
    )
