"""`launch`: a function on several ranks, from a script or a notebook cell."""

import importlib
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import wait
from typing import Any

from fxtrain._errors import LaunchError
from fxtrain.launch._ending import Ending, Failure, by_cause, describe
from fxtrain.launch._machine import usable_cores
from fxtrain.launch._parcel import unpack
from fxtrain.launch._ranks import Rank, end, start
from fxtrain.launch._spec import check_ranks, rank_environment

__all__ = ["launch"]

# For the other ranks to tell their errors, once one has failed, before they are ended.
_GRACE_S = 2.0
_NOT_STARTED = (
    "it ended before the function was called; the reason is in its output above. A script "
    'that calls fx.launch does so under `if __name__ == "__main__":`, since every rank '
    "imports the script."
)
# For ranks that have answered to end by themselves.
_LEAVE_S = 10.0


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    ranks: int = 2,
    timeout_s: float | None = None,
) -> list[Any]:
    """Call a function on several ranks of this machine, each in a process of its own.

    In `fn`, `fx.detect()` finds the rank. The processes are fresh ones, so a script keeps its
    call of `launch` under `if __name__ == "__main__":`. A function that was typed into a
    notebook cell or a prompt is sent by value, for which cloudpickle must be installed; where
    it is not, the processes are forks of this one, of one thread each, as long as no
    accelerator is in use here.

    Args:
        fn: What to run on every rank.
        args: Its arguments, the same on every rank.
        ranks: Processes to start.
        timeout_s: Longest time for the whole call, in seconds; no limit by default.

    Returns:
        What `fn` returned, by rank.

    Effects:
        Starts `ranks` processes and ends them. Opens a TCP port on loopback meanwhile.

    Raises:
        LaunchError: the ranks could not be started, one of them failed (with its number and
            traceback), or they did not end within `timeout_s`.

    Example:
        >>> import fxtrain as fx
        >>> fx.launch(divmod, (7, 2), ranks=1)
        [(3, 1)]
    """
    _check(fn, args, ranks, timeout_s)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    # torch is loaded by now or will be: the store at which the ranks meet is torch's. It
    # listens on a port that the system picks, here, so that nobody can take the port first.
    distributed = importlib.import_module("torch.distributed")
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [rank_environment(rank, ranks, port=store.port) for rank in range(ranks)]
    started = start(fn, tuple(args), places, threads=max(1, len(usable_cores()) // ranks))
    try:
        values = _results(started, deadline, timeout_s)
    except BaseException:
        end(started, patience_s=0)
        raise
    end(started, patience_s=_LEAVE_S)
    return values


def _check(fn: Any, args: Any, ranks: Any, timeout_s: Any) -> None:
    if not callable(fn):
        raise LaunchError(
            f"launch takes a function and its arguments, found a {type(fn).__name__}. "
            f"For example: fx.launch(train, (0.1,), ranks=2), with train and not train(0.1)."
        )
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise LaunchError(
            f"launch(args={args!r}): a tuple of arguments was expected. For one argument: "
            f"args=({args!r},)."
        )
    check_ranks(ranks, said=f"launch(ranks={ranks!r})")
    if timeout_s is not None and not timeout_s > 0:
        raise LaunchError(f"launch(timeout_s={timeout_s}): a timeout is a number of seconds > 0.")


def _results(started: list[Rank], deadline: float | None, timeout_s: float | None) -> list[Any]:
    """Every rank's value by rank, or the error of the one that failed first."""
    outcomes: dict[int, tuple[Any] | Failure] = {}
    ready: set[int] = set()
    failures: list[Failure] = []
    while len(outcomes) < len(started):
        waiting: dict[Any, Rank] = {r.pipe: r for r in started if r.number not in outcomes}
        pipes = wait(list(waiting), _left(deadline))
        if not pipes and not failures:
            raise LaunchError(_too_late(waiting.values(), len(started), timeout_s))
        if not pipes:
            break
        for rank in [waiting[pipe] for pipe in pipes]:
            outcome = _receive(rank, ready)
            if outcome is None:
                ready.add(rank.number)
                continue
            outcomes[rank.number] = outcome
            if isinstance(outcome, Failure):
                failures.append(outcome)
                soon = time.monotonic() + _GRACE_S
                deadline = soon if deadline is None else min(soon, deadline)
    if failures:
        raise LaunchError(describe(Ending(ranks=len(started), failures=by_cause(failures))))
    return [value for rank in started for value in outcomes[rank.number]]  # type: ignore[union-attr]


def _receive(rank: Rank, ready: set[int]) -> tuple[Any] | Failure | None:
    """A rank's value, in a tuple of one; what became of it; or None, when it is ready."""
    try:
        sent = rank.pipe.recv_bytes()
    except (EOFError, OSError):  # it ended without a word
        rank.process.join(_GRACE_S)
        code = rank.process.exitcode
        error = "" if rank.number in ready or (code or 0) < 0 else _NOT_STARTED
        return Failure(rank=rank.number, code=code, error=error, time_ns=time.time_ns())
    return unpack(sent) if sent else None


def _too_late(late: Iterable[Rank], ranks: int, timeout_s: float | None) -> str:
    names = ", ".join(str(rank.number) for rank in late)
    return (
        f"launch(timeout_s={timeout_s:g}): these of {ranks} ranks did not end in time and were "
        f"ended: {names}. Find where they wait, or allow more time."
    )


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
