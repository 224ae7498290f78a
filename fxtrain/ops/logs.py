"""Logging that knows its rank."""

import logging
from collections.abc import MutableMapping
from typing import Any

from fxtrain.state import DistContext

__all__ = ["RankLogger", "log"]


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A standard library logger that logs on rank 0 by default.

    Every call takes two more keywords: `everyone=True` logs on all ranks, each line prefixed
    with its rank; `rank=3` logs on that rank only.
    """

    def __init__(self, logger: logging.Logger, ctx: DistContext) -> None:
        super().__init__(logger, {})
        self._ctx = ctx

    def log(
        self, level: int, msg: object, *args: Any, everyone: bool = False, rank: int = 0, **kw: Any
    ) -> None:
        """Log on the chosen ranks; the others return without formatting the message."""
        if (everyone or self._ctx.rank == rank) and self.isEnabledFor(level):
            text = f"[rank {self._ctx.rank}] {msg}" if everyone or rank else msg
            kw["stacklevel"] = kw.get("stacklevel", 1) + 1
            self.logger.log(level, text, *args, **kw)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message and keywords unchanged."""
        return msg, kwargs


def log(ctx: DistContext, name: str = "fxtrain.run") -> RankLogger:
    """A logger for this rank, which logs on rank 0 unless a call asks for other ranks.

    Args:
        name: Name of the underlying standard library logger; you configure its handlers and
            level.

    Example:
        >>> import fxtrain as fx, logging
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.log(ctx).warning("loss %.1f", 0.25, everyone=True)
    """
    return RankLogger(logging.getLogger(name), ctx)
