"""Hearing that another rank has failed, while this one waits for its device or elsewhere."""

import threading
from collections.abc import Callable
from typing import Any

from fxtrain.ops.closing import answered, within

_POLL_S = 0.5
_STORE_S = 1.0


class FailureWatch(threading.Thread):
    """A thread that calls a function once another rank has reported a failure.

    Args:
        store: What the ranks share.
        key: Where a rank that fails writes why, in `report`.
        react: Called once with that text, in this thread.
        patience_s: How long this rank may take to fail by itself.
    """

    def __init__(
        self, store: Any, key: str, react: Callable[[str], None], *, patience_s: float = 0.0
    ) -> None:
        super().__init__(name="fxtrain-failures", daemon=True)
        self._store, self._key, self._react, self._patience_s = store, key, react, patience_s
        self._stopped = threading.Event()

    def run(self) -> None:
        """Ask the store twice a second, until a rank has failed or the watch ends."""
        reasons: list[bytes] = []

        def look() -> None:
            if self._store.check([self._key]):
                reasons.append(self._store.get(self._key))

        while not reasons:
            if self._stopped.wait(_POLL_S) or not answered(_STORE_S, look):
                return  # without a store, collectives fail
        if not self._stopped.wait(self._patience_s):
            self._react(reasons[0].decode(errors="replace"))

    def report(self, reason: str) -> None:
        """Report to the other ranks that this one has failed."""
        within(_STORE_S, lambda: self._store.set(self._key, reason))

    @property
    def stopped(self) -> bool:
        """Whether the watch has ended, so that nothing is to be done any more."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """End the watch."""
        self._stopped.set()
