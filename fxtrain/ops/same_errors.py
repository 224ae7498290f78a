"""Failing together: a failure on one rank is the same error on every rank."""

import contextlib
from collections.abc import Iterator

from fxtrain import ops
from fxtrain._errors import CheckpointError, CollectiveError
from fxtrain.state import DistContext

__all__ = ["fail_together", "raise_on_all_ranks"]


@contextlib.contextmanager
def fail_together(ctx: DistContext | None, action: str) -> Iterator[None]:
    """Run a block on every rank; if it fails on any of them, raise one error on all.

    Args:
        ctx: The ranks that run the block; None for this process only.
        action: What the block does, for errors of the operating system.

    Effects:
        One exchange of packets at the end of the block; none at one rank.

    Raises:
        CheckpointError: on some rank the block raised it or an error of the operating system;
            with every rank's message.
    """
    problem: Exception | None = None
    try:
        yield
    except CollectiveError:
        raise  # every rank has it
    except Exception as error:
        problem = error
    raise_on_all_ranks(problem, ctx, action)


def raise_on_all_ranks(problem: Exception | None, ctx: DistContext | None, action: str) -> None:
    """Raise on every rank if any rank has a problem, and on none otherwise; see `fail_together`."""
    mine = None if problem is None else _problem_text(problem, action)
    if ctx is None or ctx.world_size == 1:
        if isinstance(problem, OSError):
            raise CheckpointError(mine) from problem
        if problem is not None:
            raise problem
        return
    found = [(rank, text) for rank, text in enumerate(ops.gather_objects(mine, ctx)) if text]
    if not found:
        return
    texts = {text for _, text in found}
    if len(texts) == 1:
        raise CheckpointError(texts.pop()) from problem
    raise CheckpointError("\n".join(f"rank {rank}: {text}" for rank, text in found)) from problem


def _problem_text(problem: Exception, action: str) -> str:
    if isinstance(problem, CheckpointError):
        return str(problem)
    if isinstance(problem, OSError):
        where = "" if problem.filename is None else f" ({problem.filename})"
        return f"{action}: {problem.strerror or problem}{where}."
    return f"{action}: {type(problem).__name__}: {problem}"
