"""Preparing the units that come next while one is in use."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import attrs

__all__ = ["ReadAhead", "start"]

_THREADS = 4
_Work = Callable[[], Any]


@attrs.frozen(kw_only=True, eq=False)
class ReadAhead:
    """Threads that prepare units in the order in which they were used before.

    Units are numbered in the order of the model. What follows two units in a row is what followed
    them the last time, which tells forward from backward, and one use of a unit from its second. A
    wrong guess costs the head start, nothing else.

    Attributes:
        work: (unit) → functions that together prepare it, each called in a thread.
        count: Units.
        ahead: Units to prepare while one is in use.
        pool: The threads.
    """

    work: Callable[[int], Sequence[_Work]]
    count: int
    ahead: int
    pool: ThreadPoolExecutor
    _following: dict[tuple[int, int], int] = attrs.field(factory=dict, init=False)
    _pending: dict[int, list[Future[Any]]] = attrs.field(factory=dict, init=False)
    _last: list[int] = attrs.field(factory=lambda: [-1, -1], init=False)  # two units, in order

    def use(self, unit: int) -> list[Any]:
        """Wait until a unit is prepared, and begin with those that come next.

        Returns:
            What its functions returned.

        Raises:
            CheckpointError: as its functions.
        """
        before, now = self._last
        self._following[before, now] = unit
        self._last[:] = now, unit
        running = self._pending.pop(unit, None) or self._begin(unit)
        coming = list(dict.fromkeys(self._predict(now, unit)))
        for stale in self._pending.keys() - coming:
            for future in self._pending.pop(stale):
                future.cancel()
        for other in coming:
            if other not in self._pending:
                self._pending[other] = self._begin(other)
        try:
            return [future.result() for future in running]
        except Exception:
            self._pending.clear()  # what failed ahead is tried again when it is needed
            raise

    def close(self) -> None:
        """End the threads."""
        self._pending.clear()
        self.pool.shutdown(wait=True, cancel_futures=True)

    def _begin(self, unit: int) -> list[Future[Any]]:
        return [self.pool.submit(function) for function in self.work(unit)]

    def _predict(self, before: int, now: int) -> Iterator[int]:
        first = now
        for _ in range(min(self.ahead, self.count - 1)):
            step = 1 if now >= before else -1
            before, now = now, self._following.get((before, now), (now + step) % self.count)
            if now != first:
                yield now


def start(work: Callable[[int], Sequence[_Work]], count: int, ahead: int) -> ReadAhead:
    """Start reading ahead; its threads begin with the first unit in use.

    Args:
        work: (unit) → functions that together prepare it.
        count: Units.
        ahead: Units to prepare while one is in use.
    """
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="fxtrain-offload")
    return ReadAhead(work=work, count=count, ahead=ahead, pool=pool)
