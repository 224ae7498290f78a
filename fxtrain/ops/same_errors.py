"""Failing together: a failure on one rank is an error on every rank."""

import contextlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import attrs

from fxtrain import errors
from fxtrain.errors import CheckpointError, CollectiveError, FxError
from fxtrain.ops.objects import broadcast_object, gather_given
from fxtrain.ops.transport.exchange import CallState
from fxtrain.ops.transport.mismatches import by_rank
from fxtrain.ops.transport.pickled import error_text
from fxtrain.state import DistContext
from fxtrain.state.context import check_connected


@attrs.define(eq=False)
class Together:
    """What ranks exchange at the end of a block of `fail_together`.

    Attributes:
        value: Of this rank, which the block may set. Anything that pickles.
        values: After the block, the value of every rank, by rank.
    """

    value: Any = None
    values: Sequence[Any] = ()


@attrs.frozen
class _Problem:
    """Why a rank failed."""

    kind: str  # the class of fxtrain's error; empty for an error of another package
    code: str
    text: str
    host: str = ""  # the machine of the rank, where there are several


@contextlib.contextmanager
def fail_together(
    ctx: DistContext | None, action: str = "", *, src: int | None = None
) -> Iterator[Together]:
    """Run a block on every rank; if it fails on one of them, raise on all of them.

    A rank that waits in a collective for one that failed would wait until the timeout. So code
    that may fail on some ranks only belongs into such a block, without collectives of `ctx` after
    the statement that may fail.

    Args:
        ctx: The ranks. None is this process alone.
        action: What the block does, in words. An error of the operating system in the block, such
            as a full disk, then becomes a CheckpointError that begins with them.
        src: The only rank whose block does something, in place of all ranks.

    Yields:
        An object whose `value` the block may set. After the block, its `values` has those of all
        ranks, by rank; with `src`, that of this rank for all of them.

    Effects:
        One exchange of packets at the end of the block; a second one for values that might not
        unpickle, as in `gather_objects`. None at one rank. There is none either if the last call of
        `ctx` in the block raised on every rank, as collectives do whose arguments differ.

    Raises:
        FxError: an error of fxtrain is raised on every rank, with the same text: that of the error
            if the block failed alike on all ranks, or on `src`; otherwise with the ranks that
            failed. Its class is that of the lowest of them.
        Exception: any other error is raised on its own rank; every other rank raises a
            CollectiveError with its text.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     with fx.ops.fail_together(ctx) as together:
        ...         together.value = len("abc")
        ...     together.values
        [3]
    """
    together, before = Together(), 0
    if ctx is not None:
        check_connected("fail_together", ctx)
        before = ctx.comm.slot(CallState).count
    problem: BaseException | None = None
    try:
        yield together
    except OSError as error:
        problem = error
        if action:
            problem = CheckpointError(_system_text(error, action))
            problem.__cause__ = error
    except (Exception, SystemExit) as error:
        problem = error
    if ctx is not None and ctx.world_size > 1 and ctx.comm.control is not None:
        _compare(together, problem, ctx, src, before)
        return
    if problem is not None:
        raise problem
    together.values = [together.value] * (1 if ctx is None else ctx.world_size)


def _compare(
    together: Together,
    problem: BaseException | None,
    ctx: DistContext,
    src: int | None,
    before: int,
) -> None:
    """Give every rank the values of all, or raise on all; `before` counts the earlier calls."""
    if problem is not None and _is_known(ctx, before):
        raise problem
    try:
        problems, together.values = _exchange(problem, together.value, ctx, src)
    except CollectiveError:
        if problem is not None:  # and perhaps why the exchange failed
            raise problem from problem.__cause__
        raise
    if problems or problem is not None:
        state = ctx.comm.slot(CallState)
        state.raised = state.count
        _raise(problem, problems, by_all=src is not None or len(problems) == ctx.world_size)


def _is_known(ctx: DistContext, before: int) -> bool:
    """Whether the last call of a context, since an earlier one, was an error on every rank."""
    state = ctx.comm.slot(CallState)
    return before < state.count == state.raised


def _exchange(
    problem: BaseException | None, value: Any, ctx: DistContext, src: int | None
) -> tuple[dict[int, _Problem], list[Any]]:
    """The problems of the ranks that failed, and the values of all ranks."""
    own = None
    if problem is not None:
        own = (_described(problem, ctx), None)
    elif value is not None:
        own = (None, value)
    if src is not None:
        given = broadcast_object(own, ctx, src)
        rows, sent = {src: given}, [given] * ctx.world_size
    else:
        text = "" if problem is None else error_text(problem)
        sent = gather_given(("fail_together", "", text), own, ctx)
        rows = dict(enumerate(sent))
    problems = {rank: row[0] for rank, row in rows.items() if row and row[0] is not None}
    return problems, [row and row[1] for row in sent]


def _described(problem: BaseException, ctx: DistContext) -> _Problem:
    host = platform.node() if ctx.num_nodes > 1 else ""
    if not isinstance(problem, FxError):
        return _Problem("", "FX303", error_text(problem), host)
    names = (base.__name__ for base in type(problem).__mro__)
    kind = next(name for name in names if name in (*errors.__all__, FxError.__name__))
    return _Problem(kind, problem.code, str(problem), host)


def _raise(
    problem: BaseException | None, problems: Mapping[int, _Problem], *, by_all: bool
) -> NoReturn:
    """Raise the error of the ranks that failed, as on every other rank."""
    first = problems[min(problems)] if problems else None
    if first is None or (problem is not None and not isinstance(problem, FxError)):
        assert problem is not None
        raise problem
    text = first.text
    if first.kind and by_all and {each.text for each in problems.values()} == {text}:
        if problem is not None:
            raise problem
    else:
        hosts = {rank: each.host for rank, each in problems.items() if each.host}
        lines = by_rank(((rank, each.text) for rank, each in problems.items()), hosts)
        text = "\n".join(line.strip() for line in lines)
        if not first.kind:
            text = "\n".join(["Another rank failed:", *lines])
    kind = getattr(errors, first.kind or "CollectiveError")
    raise kind(text, code=first.code) from problem


def _system_text(error: OSError, action: str) -> str:
    where = "" if error.filename is None else f" ({error.filename})"
    return f"{action}: {error.strerror or error}{where}."
