"""Rank 0 reads, and sends each rank its part."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fxtrain import ops
from fxtrain._errors import DataError
from fxtrain.data._slices import Layout
from fxtrain.data._source import Loaded, Source, arithmetic_end
from fxtrain.data._steps import Cursor, Step
from fxtrain.ops._objects import Opaque
from fxtrain.ops._plans import digest_of_plan, refuse_plans
from fxtrain.state import DistContext, Plan

__all__ = ["dispatch_source"]


def dispatch_source(
    make: Callable[[], tuple[Source, Layout]], ctx: DistContext, plan: Plan
) -> tuple[Source, Layout]:
    """What rank 0 reads; the other ranks never touch the dataset.

    Args:
        make: Makes the source that serves all ranks; called on rank 0 only.

    Effects:
        One gather here, and one scatter per global batch.

    Raises:
        DataError: rank 0 could not make its source; rank 0 raises its own error.
        PlanError: the ranks pass different plans; on every rank.
    """
    inner, layout, length = _facts(make, ctx, plan)

    def run(cursor: Cursor) -> Iterator[Loaded]:
        steps = iter(()) if inner is None else inner.run(cursor)
        while True:
            letters, problem = _letters(steps, ctx) if ctx.is_main else (None, None)
            letter = ops.scatter(letters, ctx)
            if problem is not None:
                raise problem
            if "failed" in letter:
                raise _failed(letter["failed"])
            for head, data in letter["steps"]:
                yield head.value, (data,)
                if head.value.position.is_last:
                    return
            if not letter["steps"]:
                return

    def end(cursor: Cursor) -> Cursor | None:
        if length is None or layout.unit == "batch":
            return None
        return arithmetic_end(layout, length, cursor, plan)

    source = Source(
        run=run,
        length=lambda: length,
        end=end,
        shuffled=(lambda: False) if inner is None else inner.shuffled,
    )
    return source, layout


def _facts(
    make: Callable[[], tuple[Source, Layout]], ctx: DistContext, plan: Plan
) -> tuple[Source | None, Layout, int | None]:
    """Rank 0's source; on every rank its layout and the length of an epoch."""
    source, problem, facts = None, None, {}
    if ctx.is_main:
        try:
            source, layout = make()
            facts = {"layout": layout, "length": source.length()}
        except Exception as error:
            problem, facts = error, {"failed": _words(error)}
    found = ops.gather_objects((digest_of_plan(plan, {}), facts), ctx)
    if any(digest != found[0][0] for digest, _ in found):
        refuse_plans("shard", ctx, plan, {})
    facts = found[0][1]
    if problem is not None:
        raise problem
    if "failed" in facts:
        raise _failed(facts["failed"])
    return source, facts["layout"], facts["length"]


def _letters(
    steps: Iterator[Loaded], ctx: DistContext
) -> tuple[list[dict[str, Any]], Exception | None]:
    """What each rank gets next: steps with its data, none at the end, or what went wrong."""
    try:
        found = _next(steps)
    except Exception as error:
        return [{"failed": _words(error)}] * ctx.world_size, error
    return [
        {"steps": [(head, data[rank]) for head, data in found]} for rank in range(ctx.world_size)
    ], None


def _next(steps: Iterator[Loaded]) -> list[tuple[Opaque, Sequence[Any]]]:
    """The next step, and with it the one after if some ranks have no row there.

    Those ranks take part in that one while they are still busy with this one, so that it
    must be there by then.
    """
    found: list[tuple[Opaque, Sequence[Any]]] = []
    for step, data in steps:
        found.append((Opaque(_bare(step)), data))
        if step.ghost is None:
            break
    return found


def _bare(step: Step) -> Step:
    """A step without the indices, which only its reader needs."""
    ghost = None if step.ghost is None else _bare(step.ghost)
    return step._replace(slot=step.slot._replace(keys=()), ghost=ghost)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _failed(words: str) -> DataError:
    return DataError(f"Rank 0 failed while it read the data for all ranks. It says: {words}")
