"""Logging that knows its rank."""

import logging
from collections.abc import Mapping
from typing import Any

from fxtrain._other_names import hint
from fxtrain._record import shown
from fxtrain.errors import ContextError
from fxtrain.state import DistContext


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A standard library logger that logs on rank 0 by default.

    Every call takes two more keywords: `everyone=True` logs on all ranks, each line prefixed
    with its rank; `rank=3` logs on that rank only.
    """

    def __init__(self, logger: logging.Logger, ctx: DistContext) -> None:
        super().__init__(logger, {})
        self._ctx = ctx

    def log(  # the keywords of `logging.Logger.log`; others fail on every rank
        self,
        level: int,
        msg: object,
        *args: Any,
        everyone: bool = False,
        rank: int = 0,
        exc_info: Any = None,
        stack_info: bool = False,
        stacklevel: int = 1,
        extra: Mapping[str, object] | None = None,
        **others: object,
    ) -> None:
        """Log on the chosen ranks; the others return without formatting the message."""
        for name in others:
            raise TypeError(f"log() got an unexpected keyword argument {name!r}.{hint(name)}")
        if (everyone or self._ctx.rank == rank) and self.isEnabledFor(level):
            text = f"[rank {self._ctx.rank}] {msg}" if everyone or rank else msg
            self.logger.log(
                level,
                text,
                *args,
                exc_info=exc_info,
                stack_info=stack_info,
                stacklevel=stacklevel + 1,
                extra=extra,
            )


def log(ctx: DistContext, name: str = "fxtrain.run") -> RankLogger:
    """A logger for this rank, which logs on rank 0 unless a call asks for other ranks.

    Args:
        ctx: The context of this process.
        name: Name of the underlying standard library logger; you configure its handlers and
            level. While it has no handler, records from INFO up, or from the level that you set,
            go to standard error.

    Raises:
        ContextError: the first argument is not a context, or the name is not a string.

    Example:
        >>> import fxtrain as fx, logging
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.log(ctx).warning("loss %.1f", 0.25, everyone=True)
    """
    if not isinstance(ctx, DistContext):
        raise ContextError(
            f"log takes a context, found {shown(ctx)}. For example: "
            f"fx.ops.log(ctx).info('loss %.3f', report.loss)."
        )
    if not isinstance(name, str):
        raise ContextError(f"log(ctx, name={shown(name)}): pass the name of a logger, a string.")
    logger = logging.getLogger(name)
    return RankLogger(logger if logger.hasHandlers() else _to_stderr(logger), ctx)


def _to_stderr(logger: logging.Logger) -> logging.Logger:
    """A logger that writes to standard error, in place of one without a handler."""
    plain = logging.Logger(logger.name, _level_of(logger))
    plain.addHandler(logging.StreamHandler())
    return plain


def _level_of(logger: logging.Logger) -> int:
    """The level of a logger or of the nearest one above it, without the root; INFO by default."""
    if logger.parent is None:
        return logging.INFO
    return logger.level or _level_of(logger.parent)
