"""Failing together: a failure on one rank is an error on every rank."""

import contextlib
import platform
from collections.abc import Iterator
from typing import Any

from fxtrain import errors
from fxtrain.errors import CheckpointError, CollectiveError, FxError, PlanError
from fxtrain.ops.objects import gather_objects
from fxtrain.ops.transport.exchange import CallState, collect_payloads, exchange_texts
from fxtrain.ops.transport.mismatches import by_rank
from fxtrain.ops.transport.pickled import dump, error_text, unpickle_all
from fxtrain.state import DistContext
from fxtrain.state.context import check_connected


def raise_together(problem: BaseException | None, ctx: DistContext) -> None:
    """Raise on every rank if any rank has a problem, and on none otherwise.

    Args:
        problem: This rank's error, or None.

    Effects:
        One exchange of packets; none at one rank.

    Raises:
        The rank's own problem if it has one; on every other rank a CollectiveError with the
        problems by rank.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.raise_together(None, ctx)
    """
    check_connected("raise_together", ctx)
    if ctx.world_size > 1:
        local_text = "" if problem is None else error_text(problem)
        texts = exchange_texts(ctx, ("raise_together", "", local_text), local_text)
        if problem is None and any(texts):
            lines = [f"  rank {rank}: {text}" for rank, text in enumerate(texts) if text]
            raise CollectiveError("\n".join(["Another rank failed:", *lines]), code="FX303")
    if problem is not None:
        raise problem


@contextlib.contextmanager
def fail_together(ctx: DistContext | None, action: str = "") -> Iterator[None]:
    """Run a block on every rank; if it fails on any, raise on all, by one exchange of packets.

    With an `action`, in words, all raise one CheckpointError with every rank's message. Without
    one, a rank raises its own error, as in `raise_together`. `ctx=None` is this process alone.
    Where the calls of the ranks differ inside the block, all have that error, without an exchange.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        if isinstance(error, CollectiveError) and (action or _differed(ctx)):
            raise  # every rank has it
        problem = error
    if not action and ctx is not None:
        try:
            raise_together(problem, ctx)
        except CollectiveError:
            if problem is not None:  # and perhaps why the exchange failed
                raise problem from problem.__cause__
            raise
    elif ctx is None or ctx.world_size == 1:
        if isinstance(problem, OSError):
            raise CheckpointError(_problem_text(problem, action)) from problem
        if problem is not None:
            raise problem
    else:
        text = "" if problem is None else _problem_text(problem, action)
        if problems := problem_of_ranks("raise_together", text, ctx):
            raise CheckpointError(problems) from problem


def _differed(ctx: DistContext | None) -> bool:
    """Whether the last calls of a context were different ones, which all its ranks have heard."""
    if ctx is None:
        return False
    state = ctx.comm.slot(CallState)
    return state.count > 0 and state.differed == state.count


def problem_of_ranks(op: str, words: str, ctx: DistContext) -> str:
    """The problems of all ranks as one text, equal on every rank; empty if there is none.

    That is the problem, if all ranks with one have the same; otherwise a line per rank. On several
    machines, ranks that do not share a problem with all others are named with theirs. One exchange
    of packets; `op` is the call, for the error if a rank makes another one.
    """
    machine = f" on {platform.node()}" if ctx.num_nodes > 1 else ""
    line = words and f"{machine}: {words}"
    rows = exchange_texts(ctx, (op, "", line), line)
    problems = {rank: row.partition(": ") for rank, row in enumerate(rows) if row}
    texts = {text for _, _, text in problems.values()}
    if len(texts) <= 1 and (not machine or len(problems) in (0, ctx.world_size)):
        return next(iter(texts), "")
    return "\n".join(f"rank {rank}{where}: {text}" for rank, (where, _, text) in problems.items())


def collect_with_errors(
    value: Any, problem: BaseException | None, ctx: DistContext
) -> tuple[list[Any], list[str]]:
    """The values of all ranks, and a line per problem with its ranks, on rank 0.

    Other ranks get no values and no lines, and wait for rank 0 to tell what follows. One exchange,
    in which payloads are sent along a tree.
    """
    text = "" if problem is None else error_text(problem)
    own = (value, text, text and platform.node())
    if ctx.world_size == 1:
        rows = [own]
    else:
        call = ("gather_objects", "dst=0")
        blobs = collect_payloads(ctx, call, dump(own, ctx))
        try:
            rows = unpickle_all(call[0], dict(enumerate(blobs)), ctx, sure=True)
        except CollectiveError as error:  # the others wait for an answer
            return [], [f"  rank 0: {error}"]
    hosts = {rank: host for rank, (*_, host) in enumerate(rows) if host and ctx.num_nodes > 1}
    problems = by_rank(((rank, text) for rank, (_, text, _) in enumerate(rows) if text), hosts)
    return [value for value, *_ in rows], problems


def gather_or_raise(value: Any, problem: FxError | None, ctx: DistContext) -> list[Any]:
    """Every rank's value; if a rank has a problem, raise the first one on every rank.

    Its class is that of the problem, or PlanError for one of another package.
    """
    words = None if problem is None else (type(problem).__name__, str(problem))
    own = (words, value)
    of_ranks = [own] if ctx.comm.simulated else gather_objects(own, ctx)
    for words, _ in of_ranks:
        if words is not None:
            kind, text = words
            raise getattr(errors, kind, PlanError)(text) from problem
    return [each for _, each in of_ranks]


def _problem_text(problem: Exception, action: str) -> str:
    if isinstance(problem, CheckpointError):
        return str(problem)
    if isinstance(problem, OSError):
        where = "" if problem.filename is None else f" ({problem.filename})"
        return f"{action}: {problem.strerror or problem}{where}."
    return f"{action}: {type(problem).__name__}: {problem}"
