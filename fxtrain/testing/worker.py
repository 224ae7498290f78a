"""One rank of a pool: a process that receives calls, runs them and sends the results."""

import gc
import multiprocessing
import os
import pickle
import sys
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import attrs

# Numbers of the answers that a rank sends before its first call. Between them it waits for a
# port, because importing torch on a busy machine may take longer than the group's timeout.
LOADED, CONNECTED = range(2)


@attrs.define
class MeshContext:
    """What a pool keeps about its context.

    Attributes:
        mesh: The mesh that a call asked for last.
        ctx: The context of the same ranks with that mesh, for the next call that asks for it; None
            while a call uses it.
    """

    mesh: Any = None
    ctx: Any = None


def work(
    rank: int,
    n: int,
    timeout_s: float,
    pipe: Connection,
    path: list[str],
    variables: dict[str, str],
    device: str,
    own: dict[str, str],
    keep_groups: bool,  # noqa: FBT001
    library: str | None,
) -> None:
    """Connect to the other ranks, then answer calls until the pipe closes.

    An answer is a pickled tuple: the number of its call, whether the call returned, whether the
    process group still works, the pickled result or error (None if that does not pickle), its
    description, and the traceback. The outer tuple contains only plain values, so that the
    parent can always read it.
    """
    _become_rank(path, variables | own)
    import torch

    from fxtrain import ops

    torch.set_num_threads(1)
    if numpy := sys.modules.get("numpy"):  # forks share its state
        numpy.random.seed()
    pipe.send_bytes(_returned(LOADED, None, healthy=True))
    env = {
        "RANK": rank,
        "WORLD_SIZE": n,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": n,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": int(pipe.recv_bytes()),
    }
    try:
        if library is not None:
            _open_group(library, rank, n, int(env["MASTER_PORT"]), timeout_s)
        variables = own | {name: str(value) for name, value in env.items()}
        ctx = ops.detect(variables, device=device, timeout_s=timeout_s)
    except Exception as error:
        pipe.send_bytes(_failed(CONNECTED, error, healthy=False))
        return
    pipe.send_bytes(_returned(CONNECTED, None, healthy=True))
    gc.freeze()  # speeds up the collection of what calls leave behind
    with ctx:
        while True:
            try:
                request = pipe.recv_bytes()
            except (EOFError, OSError):
                return
            before = _groups()
            answer = _answer(ctx, request)
            if not keep_groups:
                _close_others(before, _kept_groups(ctx))
            pipe.send_bytes(answer)


def _become_rank(path: list[str], variables: dict[str, str]) -> None:
    """Set up this process like a launched one, in a separate process group of the system."""
    if sys.platform != "win32":
        os.setpgrp()
    # The fork server still has the path and variables of its start.
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(variables)
    # Python does not allow daemon processes to have children. The start method is reset, because
    # children would otherwise start through a fork server too, which takes seconds.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method(None, force=True)


def _open_group(library: str, rank: int, n: int, port: int, timeout_s: float) -> None:
    from torch import distributed as dist

    dist.init_process_group(
        library,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=timeout_s),
    )


def _groups() -> tuple[int, list[Any]]:
    """The number of process groups ever opened, and those that are open."""
    from torch.distributed.distributed_c10d import _world

    return _world.group_count, list(_world.pg_map)


def _kept_groups(ctx: Any) -> list[Any]:
    """The groups of the pool's context, and of the last one with a mesh."""
    groups, placed = ctx.comm.state.opened_groups, ctx.comm.slot(MeshContext).ctx
    return groups if placed is None else groups + placed.comm.state.opened_groups


def _close_others(before: tuple[int, list[Any]], own: list[Any]) -> None:
    """Close groups that a call left open: each gloo group has a thread that wakes 100 times a
    second. Groups that the pool's context opened stay open for later calls.
    """
    count, groups = _groups()
    if count == before[0]:
        return
    from torch import distributed as dist

    from fxtrain.backends.core.device_mesh import clear_sharding_caches

    kept = {id(group) for group in (*before[1], *own)}
    others = [group for group in groups if id(group) not in kept]
    for group in others:
        dist.destroy_process_group(group)
    if others:
        clear_sharding_caches()
    gc.collect()  # reference cycles keep closed groups and their threads alive


def _answer(ctx: Any, request: bytes) -> bytes:
    number, call = pickle.loads(request)
    try:
        fn, args = pickle.loads(call)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Loaders fork their workers from a rank, which has gloo threads, as in any run.
            warnings.filterwarnings(
                "ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning
            )
            # torch.compile reads the gradients of everything that it traces.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is")
            _drop_compiled()
            value = fn(ctx, *args)
        return _returned(number, value, healthy=ctx.comm.state.failure is None)
    except BaseException as error:
        # After a CollectiveError a communicator works unless it recorded a failure. After any
        # other error the ranks may be at different calls.
        from fxtrain.errors import CollectiveError

        healthy = isinstance(error, CollectiveError) and ctx.comm.state.failure is None
        return _failed(number, error, healthy=healthy)


def _drop_compiled() -> None:
    """Start a call without compiled code: torch limits how often a function is compiled again."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()


def _returned(number: int, value: Any, *, healthy: bool) -> bytes:
    words = f"its result, a {type(value).__name__}"
    try:
        body = pickle.dumps(value)
    except Exception:
        words = f"{words}, does not pickle"
        return pickle.dumps((number, False, False, None, words, traceback.format_exc()))
    return pickle.dumps((number, True, healthy, body, words, ""))


def _failed(number: int, error: BaseException, *, healthy: bool) -> bytes:
    trace = traceback.format_exc()
    words = "".join(traceback.format_exception_only(error)).strip()
    error.__traceback__ = error.__cause__ = error.__context__ = None
    # If raised again in the parent, these would end the tests.
    ends = isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit)
    try:
        body = None if ends else pickle.dumps(error)
    except Exception:  # an error with fields that do not pickle
        body = None
    return pickle.dumps((number, False, healthy and body is not None, body, words, trace))
