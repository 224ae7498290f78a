"""Rank 0 reads the data and sends each rank its part."""

from collections.abc import Callable, Iterator
from typing import Any

from fxtrain import ops
from fxtrain.data.rank_slices import Batching, Cursor
from fxtrain.data.sources import Loaded, Source
from fxtrain.errors import DataError
from fxtrain.ops.objects import Opaque
from fxtrain.ops.plan_agreement import digest_of_plan, raise_plan_differences
from fxtrain.ops.transport.pickled import error_text
from fxtrain.state import DistContext, Plan


def dispatch_source(
    make: Callable[[], tuple[Source, Batching]], ctx: DistContext, plan: Plan
) -> tuple[Source, Batching]:
    """Batches that rank 0 reads; the other ranks never touch the dataset.

    Args:
        make: Creates the source that serves all ranks; called on rank 0 only.

    Effects:
        One gather here, and one scatter per global batch.

    Raises:
        DataError: rank 0 could not create its source; rank 0 raises its own error.
        PlanError: the ranks pass different plans; on every rank.
    """
    inner, batching, length, stateful = _broadcast_layout(make, ctx, plan)

    def run(cursor: Cursor) -> Iterator[Loaded]:
        steps = iter(()) if inner is None else inner.run(cursor)
        while True:
            letters, problem, state = _messages(steps, ctx) if ctx.is_main else (None, None, None)
            letter = ops.scatter(letters, ctx)
            if problem is not None:
                raise problem
            if "failed" in letter:
                raise _failed(letter["failed"])
            if "step" not in letter:
                return
            batch, position = letter["step"].value
            yield (batch, Cursor(position, state)), (letter["data"],)
            if position.is_last:
                return

    source = Source(
        run=run,
        length=lambda: length,
        shuffled=(lambda: False) if inner is None else inner.shuffled,
        stateful=stateful,
    )
    return source, batching


def _broadcast_layout(
    make: Callable[[], tuple[Source, Batching]], ctx: DistContext, plan: Plan
) -> tuple[Source | None, Batching, int | None, bool]:
    """Rank 0's source and, on every rank, its batching, the length of an epoch, and `stateful`."""
    source, problem, facts = None, None, {}
    if ctx.is_main:
        try:
            source, batching = make()
            facts = {
                "batching": batching,
                "length": source.length(),
                "stateful": source.stateful,
            }
        except Exception as error:
            problem, facts = error, {"failed": error_text(error)}
    layouts: list[Any] = ops.gather_objects((digest_of_plan(plan, {}), facts), ctx)
    if any(digest != layouts[0][0] for digest, _ in layouts):
        raise_plan_differences("shard", ctx, plan, {})
    facts = layouts[0][1]
    if problem is not None:
        raise problem
    if "failed" in facts:
        raise _failed(facts["failed"])
    return source, facts["batching"], facts["length"], facts["stateful"]


def _messages(
    steps: Iterator[Loaded], ctx: DistContext
) -> tuple[list[dict[str, Any]], Exception | None, Any]:
    """What each rank receives next: a step with its data, None at the end, or an error text.

    Returns:
        That, the error, and the state of the stream, which stays here.
    """
    try:
        step = next(steps, None)
    except Exception as error:
        return [{"failed": error_text(error)}] * ctx.world_size, error, None
    if step is None:
        return [{}] * ctx.world_size, None, None
    (batch, cursor), data = step
    # Only the reading rank needs the indices.
    head = Opaque((batch._replace(keys=(), state=None), cursor.position))
    letters = [{"step": head, "data": data[rank]} for rank in range(ctx.world_size)]
    return letters, None, cursor.state


def _failed(words: str) -> DataError:
    return DataError(f"Rank 0 failed while reading the data for all ranks: {words}", code="FX402")
