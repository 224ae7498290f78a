"""Which thread makes the calls of a communicator.

Collectives are matched between ranks by their order. Two threads that share a communicator may
interleave their calls differently on each rank, so that values reach the wrong call, unnoticed
if the shapes are the same. So one thread makes all calls, and every rank checks this before
anything is sent.
"""

import threading

from fxtrain._errors import CollectiveError
from fxtrain.ops.transport.mismatches import call_site
from fxtrain.state import DistContext

__all__ = ["check_thread"]


def check_thread(ctx: DistContext) -> None:
    """Refuse a call from any thread but the communicator's owner.

    Raises:
        CollectiveError: the communicator belongs to another thread, which is still running.
    """
    state = ctx.comm.state
    me = threading.get_ident()
    if state.thread != me:
        _wrong_thread_error(ctx, me)


def _wrong_thread_error(ctx: DistContext, me: int) -> None:
    state = ctx.comm.state
    # torch's own threads run backward on an accelerator while the calling thread waits.
    if type(threading.current_thread()).__name__ == "_DummyThread":
        return
    running = {thread.ident: thread.name for thread in threading.enumerate()}
    if state.thread is None or state.thread not in running:
        state.thread = me
        return
    raise CollectiveError(
        f"Thread {running[me]!r} calls a collective at {call_site()} on a context owned by "
        f"thread {running[state.thread]!r}. Calls of two threads would interleave differently on "
        f"each rank and mix up their values. Give each thread its own context: call "
        f"ops.duplicate(ctx) on every rank, in the thread that owns this one."
    )
