"""Calling a script's main function again, inside its process, after a rank has failed."""

import contextlib
import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from fxtrain.errors import CollectiveError, ContextError
from fxtrain.ops.closing import interrupt
from fxtrain.ops.connecting import DEFAULT_TIMEOUT_S, detect
from fxtrain.ops.failure_watch import FailureWatch
from fxtrain.ops.objects import barrier
from fxtrain.state import DistContext, Mesh

R = TypeVar("R")
_SHARE = 0.1  # of the timeout, in which collectives of a rank fail by themselves
_LONGEST_S = 5.0
_FAILED = "restarting/failed"


def restarting(
    main: Callable[[DistContext], R],
    *,
    restarts: int = 1,
    env: Mapping[str, str] | None = None,
    device: str | torch.device | None = None,
    mesh: Mesh | None = None,
    timeout_s: float | None = None,
    checks: bool = True,
) -> R:
    """Connect the ranks and call a function; after a failure on any rank, do so again on all.

    Saves what a new process costs: importing torch, compiling, and loading what the script has
    loaded before. The function continues from its latest checkpoint, as with `fx.fit`. A rank whose
    process has ended, or that does not return within the timeout of the context, cannot be
    restarted so: the others raise, and `fxtrain launch --restarts` starts all processes again.

    Args:
        main: Called with a new context each time. It must not keep anything of the last one, such
            as a model outside of it.
        restarts: How often it may be called again.
        env: As of `fx.detect`, like those that follow.
        device: Where to compute.
        mesh: Ranks per axis.
        timeout_s: Longest wait for another rank, from which all other times follow.
        checks: Compare every collective call between the ranks.

    Returns:
        What `main` returned, once it has returned on all ranks.

    Effects:
        As `fx.detect`, each time. A rank that fails reports it through the store. The others'
        collectives fail since its groups are closed; in a rank that waits elsewhere, SIGURG
        interrupts the main thread with a CollectiveError after a tenth of the timeout, at most
        5 s, and NCCL's communicators are aborted, for which its device may wait. Other C code that
        does not return is not interrupted. One barrier at the end.

    Raises:
        ContextError: a process group exists already, or a rank does not connect again within
            `timeout_s`.
        Exception: what `main` raised, if it failed once more than `restarts`; if the accelerator
            reported an error, after which a process cannot use it; or under XLA or DeepSpeed, which
            keep what belongs to closed groups.

    Example:
        >>> import fxtrain as fx
        >>> calls = []
        >>> def main(ctx):
        ...     calls.append(ctx.rank)
        ...     if len(calls) == 1:
        ...         raise OSError("a disk that failed once")
        ...     return ctx.world_size
        >>> fx.ops.restarting(main, device="cpu"), len(calls)
        (1, 2)
    """
    if dist.is_available() and dist.is_initialized():
        raise ContextError(
            "restarting: a process group exists already, which cannot be opened again after a "
            "failure. Call fx.ops.restarting before init_process_group and fx.detect."
        )
    for left in range(restarts, -1, -1):
        ctx = detect(env, device=device, mesh=mesh, timeout_s=timeout_s, checks=checks)
        try:
            with ctx, _reporting_failures(ctx):
                result = main(ctx)
                barrier(ctx)
                return result
        except Exception as error:
            if not left or _must_end(error):
                raise
            _say(error, left)
        rank, ranks, store = ctx.rank, ctx.world_size, ctx.comm.store
        del ctx
        gc.collect()  # groups that frames of the traceback kept open, for which others wait
        if ranks > 1 and store is not None:
            _join(rank, ranks, store, DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    raise AssertionError("restarts is at least 0")


def _join(rank: int, ranks: int, store: Any, timeout_s: float) -> None:
    """Wait until every rank has failed, which takes the timeout of a collective at most.

    Connecting then raises, with the ranks that are missing, if one has not.
    """
    with contextlib.suppress(RuntimeError):
        store.set(f"restarting/back/{rank}", "")
        keys = [f"restarting/back/{other}" for other in range(ranks)]
        store.wait(keys, timedelta(seconds=timeout_s + _LONGEST_S))


def _must_end(error: Exception) -> bool:
    """Whether this process cannot train any more, so that it has to end with the error."""
    if dist.is_available() and dist.is_initialized():
        return True  # a collective under way keeps the group open
    broken = isinstance(error, torch.AcceleratorError)
    return broken or "deepspeed" in sys.modules or "torch_xla" in sys.modules


def _say(error: Exception, left: int) -> None:
    logging.getLogger("fxtrain.restarting").warning(
        "%s: %s. The main function is called again in this process; %d more to come.",
        type(error).__name__,
        str(error).partition("\n")[0].rstrip("."),
        left - 1,
    )


@contextlib.contextmanager
def _reporting_failures(ctx: DistContext) -> Iterator[None]:
    """Report a failure in the block to the other ranks, and interrupt it after one of theirs."""
    if ctx.world_size == 1 or ctx.comm.store is None:
        yield
        return
    interrupts = _Interrupts(ctx)
    interrupts.watch.start()
    try:
        yield
    except Exception as error:
        interrupts.watch.report(f"rank {ctx.rank} failed with {type(error).__name__}: {error}")
        raise
    finally:
        interrupts.stop()


class _Interrupts:
    """Interrupts the main thread some time after another rank has failed."""

    def __init__(self, ctx: DistContext) -> None:
        patience_s = min(_SHARE * ctx.comm.timeout_s, _LONGEST_S)
        self.watch = FailureWatch(ctx.comm.store, _FAILED, self._react, patience_s=patience_s)
        self._ctx = ctx
        self._reason = ""
        in_main = threading.current_thread() is threading.main_thread()
        self._before = signal.signal(signal.SIGURG, self._interrupt) if in_main else None

    def _react(self, reason: str) -> None:
        self._reason = reason
        if self._before is not None:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGURG)
        # Python answers the signal once the main thread does not wait for the device any more.
        comm = self._ctx.comm
        interrupt([comm.group, *comm.state.opened_groups])

    def stop(self) -> None:
        """The block has ended, so nothing is interrupted any more."""
        self.watch.stop()
        if self._before is not None:
            signal.signal(signal.SIGURG, self._before)

    def _interrupt(self, *_: object) -> None:
        if not self.watch.stopped:
            self.watch.stop()
            raise CollectiveError(
                f"This rank was interrupted, to start again with the others: {self._reason}",
                code="FX302",
            )
