"""Which thread makes the calls of a communicator.

Ranks are told apart by the order of their calls. Two threads that share a communicator make
their calls in another order on each rank, so that values would reach the wrong call; that
cannot be seen when they happen to be of one shape. So all calls are those of one thread, which
every rank checks before anything travels.
"""

import threading

from fxtrain._errors import CollectiveError
from fxtrain.ops.transport.mismatches import call_site
from fxtrain.state import DistContext

__all__ = ["check_thread"]


def check_thread(ctx: DistContext) -> None:
    """Refuse a call from a thread other than the communicator's own.

    Raises:
        CollectiveError: the communicator is that of another thread, which is still running.
    """
    state = ctx.comm.state
    me = threading.get_ident()
    if state.thread != me:
        _wrong_thread_error(ctx, me)


def _wrong_thread_error(ctx: DistContext, me: int) -> None:
    state = ctx.comm.state
    # torch's own threads run backward on an accelerator while the thread that asked waits.
    if type(threading.current_thread()).__name__ == "_DummyThread":
        return
    running = {thread.ident: thread.name for thread in threading.enumerate()}
    if state.thread is None or state.thread not in running:
        state.thread = me
        return
    raise CollectiveError(
        f"The thread {running[me]!r} calls a collective at {call_site()} on a context of the "
        f"thread {running[state.thread]!r}. Calls of two threads come in another order on each "
        f"rank, so their values would be mixed up. Give each thread a context of its own, made "
        f"on every rank by the thread that has this one: ops.duplicate(ctx)."
    )
