"""A pool of real ranks: worker processes connected by gloo, kept for many short calls."""

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeVar

import attrs

from fxtrain._addresses import free_port, loopback_route
from fxtrain._secret import SECRET, fresh_secret
from fxtrain.errors import CollectiveError

_START_S = 90.0
# Kinds of failures, from the most likely cause to an echo of another rank's failure.
_ENDED, _RAISED, _SILENT, _ECHO = range(4)
# Importing these takes seconds.
_LOADED = ["fxtrain.testing", "torch._dynamo"]
T = TypeVar("T")


class RankFailure(Exception):
    """A rank of a pool ended, did not answer in time, or returned a value that does not pickle."""


@attrs.frozen(kw_only=True)
class _Outcome:
    """The result of a call on one rank; if `failed`, `value` is the error."""

    value: Any
    words: str = ""
    failed: bool = True
    healthy: bool = False
    order: int = _RAISED


class Cluster:
    """Worker processes that run module-level functions on all ranks at the same time.

    Workers start at the first call and restart after a failure, except after a CollectiveError
    that leaves the process group working. Each runs `fn(ctx, *args)` with a connected context,
    and may have child processes, such as the workers of a `DataLoader`.

    Args:
        n: Number of ranks.
        timeout_s: Group timeout of the ranks' context, in seconds.
        call_s: Longest time for one call, in seconds; then the workers are killed.
        device: Where the ranks compute.
        env: Variables of their processes, beside those of this one.
        keep_groups: Leave open what process groups a call opened and did not close, for
            libraries that keep theirs per process.
        preload: Modules that Python's fork server loads as well, so that not every worker does;
            used by the first pool of a process.
        library: What `torch.distributed.init_process_group` takes as its backend. By default the
            context opens the groups, with the library that is torch's default for the device.
            "gloo" lets ranks share a GPU, which NCCL refuses.

        warnings: What a warning does during a call: "error" raises it on its rank, so that no test
            passes by ignoring it; "default" prints it, and "ignore" does not.

    Effects:
        On Linux, the first call starts Python's fork server with torch imported, so that later
        pools start within a fraction of a second.
    """

    def __init__(
        self,
        n: int,
        *,
        timeout_s: float = 5.0,
        call_s: float = 40.0,
        device: str = "cpu",
        env: Mapping[str, str] | None = None,
        keep_groups: bool = False,
        preload: Sequence[str] = (),
        library: str | None = None,
        warnings: Literal["error", "default", "ignore"] = "error",
    ) -> None:
        self.n = n
        self.timeout_s = timeout_s
        self._call_s = call_s
        self._device, self._env, self._keep_groups = device, dict(env or {}), keep_groups
        self._preload, self._library, self._warnings = tuple(preload), library, warnings
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, fn: Callable[..., T], *args: object) -> list[T]:
        """Call `fn(ctx, *args)` on every rank and return the results by rank.

        Raises:
            The error of a rank that failed, with its traceback and the other ranks' errors as
            notes. RankFailure if a rank ended, did not answer in time, or returned a value that
            does not pickle.
        """
        outcomes = self._call(fn, args)
        failures = [rank for rank, outcome in enumerate(outcomes) if outcome.failed]
        if not failures:
            return [outcome.value for outcome in outcomes]
        self.close()
        first = min(failures, key=lambda rank: outcomes[rank].order)
        error: BaseException = outcomes[first].value
        for rank in failures:
            if rank != first:
                error.add_note(f"Also, on rank {rank} of {self.n}: {outcomes[rank].words}")
        raise error

    def outcomes(self, fn: Callable[..., object], *args: object) -> list[Any]:
        """Like `run`, but the result of a failed rank is its exception."""
        return [outcome.value for outcome in self._call(fn, args)]

    def close(self) -> None:
        """End the workers and their children."""
        for process, pipe in self._workers:
            pipe.close()
            _kill(process)
        for process, _ in self._workers:
            process.join(10)
            process.close()
        self._workers = []

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[_Outcome]:
        try:
            call = pickle.dumps((fn, args))
        except Exception as error:
            raise TypeError(
                f"{fn!r} and its arguments are sent to other processes, so they must pickle. "
                f"Define the function at module level. {error}"
            ) from error
        if not self._workers:
            self._start()
        try:
            for _, pipe in self._workers:
                _send(pipe, call)
            outcomes = self._collect(self._call_s)
        except BaseException:  # Ctrl-C or a test's timeout: answers may still arrive
            self.close()
            raise
        if not all(outcome.healthy for outcome in outcomes):
            self.close()
        return outcomes

    def _collect(self, within_s: float) -> list[_Outcome]:
        deadline = time.monotonic() + within_s
        outcomes: dict[int, _Outcome] = {}
        # A rank that ends closes its pipe, unless workers of its loaders keep it open.
        signs = [(process.sentinel, pipe) for process, pipe in self._workers]
        while len(outcomes) < self.n:
            waiting: dict[Any, int] = {
                sign: rank
                for rank, both in enumerate(signs)
                for sign in both
                if rank not in outcomes
            }
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = f"It did not answer within {within_s:g} s and was killed"
                missing = sorted(set(range(self.n)) - outcomes.keys())
                outcomes |= {rank: self._failure(rank, silent, _SILENT) for rank in missing}
            for rank in {waiting[sign] for sign in ready}:
                outcomes[rank] = self._answered(rank)
        return [outcomes[rank] for rank in range(self.n)]

    def _answered(self, rank: int) -> _Outcome:
        """The outcome of a rank that has answered or ended."""
        pipe = self._workers[rank][1]
        try:
            answer = pipe.recv_bytes() if pipe.poll() else None
        except (EOFError, OSError):
            answer = None
        if answer is None:
            return self._failure(rank, self._ending(rank), _ENDED)
        return self._read(rank, answer)

    def _read(self, rank: int, answer: bytes) -> _Outcome:
        returned, healthy, body, words, trace = pickle.loads(answer)
        if body is None:
            return self._failure(rank, words, _ENDED, trace)
        try:
            value = pickle.loads(body)
        except Exception:
            trace = trace or traceback.format_exc()
            return self._failure(rank, f"{words} (which does not unpickle)", _ENDED, trace)
        if returned:
            return _Outcome(value=value, words=words, failed=False, healthy=healthy)
        value.add_note(f"On rank {rank} of {self.n}:\n{trace}")
        order = _ECHO if isinstance(value, CollectiveError) else _RAISED
        return _Outcome(value=value, words=words, healthy=healthy, order=order)

    def _failure(self, rank: int, words: str, order: int, trace: str = "") -> _Outcome:
        error = RankFailure(f"Rank {rank} of {self.n}: {words}.")
        if trace:
            error.add_note(f"On rank {rank} of {self.n}:\n{trace}")
        return _Outcome(value=error, words=words, order=order)

    def _ending(self, rank: int) -> str:
        process = self._workers[rank][0]
        process.join(5)
        code = process.exitcode
        if code is None:
            return "It closed its pipe"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"Its process ended {how}"

    def _start(self) -> None:
        method = starter(*self._preload)
        # Only these workers reach each other, and only on this machine.
        own = {SECRET: fresh_secret(), **loopback_route().env, **self._env}
        for rank in range(self.n):
            local, remote = method.Pipe()
            process = method.Process(
                target=work,
                args=(
                    *(rank, self.n, self.timeout_s, remote, list(sys.path), dict(os.environ)),
                    *(self._device, own, self._keep_groups, self._library, self._warnings),
                ),
                daemon=True,
            )
            process.start()
            remote.close()
            self._workers.append((process, local))
        try:
            self._await_start()
            # Importing torch on a busy machine may take longer than the group's timeout.
            port = str(free_port()).encode()
            for _, pipe in self._workers:
                _send(pipe, port)
            self._await_start()
        except BaseException:
            self.close()
            raise

    def _await_start(self) -> None:
        failed = [outcome.value for outcome in self._collect(_START_S) if outcome.failed]
        if failed:
            raise RankFailure(f"The ranks of a pool did not start: {failed[0]}") from failed[0]


def _kill(process: Any) -> None:
    """Kill a rank and its children, such as the workers of a loader."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (AttributeError, ProcessLookupError):  # Windows, or just started, or already ended
        process.kill()


def _send(pipe: Connection, request: bytes) -> None:
    """Send a call; if the rank has ended, reading its answer reports it."""
    try:
        pipe.send_bytes(request)
    except (BrokenPipeError, ConnectionResetError):
        return


def starter(*more: str) -> Any:
    """Multiprocessing's context for processes that have torch, and `more`, when they start.

    They are forks of Python's fork server, which imports torch once, when it starts. Forking is
    safe with loaded libraries only on Linux; elsewhere every process imports torch by itself.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([*_LOADED, *more])
    return forks


class MeshContexts(dict[Any, Any]):
    """What a pool keeps about its context: that of the same ranks with the mesh of the last call.

    Empty while a call uses it.
    """


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
    on_warning: Literal["error", "default", "ignore"],
) -> None:
    """Connect to the other ranks, then answer calls until the pipe closes.

    An answer is a pickled tuple: whether the call returned, whether the process group still
    works, the pickled result or error (None if that does not pickle), its description, and the
    traceback. The outer tuple contains only plain values, so that the parent can always read it.
    """
    _become_rank(path, variables | own)
    import torch

    from fxtrain import ops

    torch.set_num_threads(1)
    if numpy := sys.modules.get("numpy"):  # forks share its state
        numpy.random.seed()
    pipe.send_bytes(_returned(None, healthy=True))
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
            torch.distributed.init_process_group(
                library,
                init_method=f"tcp://127.0.0.1:{env['MASTER_PORT']}",
                rank=rank,
                world_size=n,
                timeout=timedelta(seconds=timeout_s),
            )
        variables = own | {name: str(value) for name, value in env.items()}
        ctx = ops.detect(variables, device=device, timeout_s=timeout_s)
    except Exception as error:
        pipe.send_bytes(_failed(error, healthy=False))
        return
    pipe.send_bytes(_returned(None, healthy=True))
    gc.freeze()  # speeds up the collection of what calls leave behind
    with ctx:
        while True:
            try:
                request = pipe.recv_bytes()
            except (EOFError, OSError):
                return
            before = _groups()
            answer = _answer(ctx, request, on_warning)
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


def _groups() -> tuple[int, list[Any]]:
    """The number of process groups ever opened, and those that are open."""
    from torch.distributed.distributed_c10d import _world

    return _world.group_count, list(_world.pg_map)


def _kept_groups(ctx: Any) -> list[Any]:
    """The groups of the pool's context, and of the last one with a mesh."""
    contexts = (ctx, *ctx.comm.slot(MeshContexts).values())
    return [group for each in contexts for group in each.comm.state.opened_groups]


def _close_others(before: tuple[int, list[Any]], own: list[Any]) -> None:
    """Close groups that a call left open: each gloo group has a thread that wakes 100 times a
    second. Groups that the pool's context opened stay open for later calls.
    """
    count, groups = _groups()
    if count == before[0]:
        return
    from torch import distributed as dist

    from fxtrain.backends.core.device_mesh import clear_sharding_caches

    remaining = {id(group) for group in (*before[1], *own)}
    others = [group for group in groups if id(group) not in remaining]
    for group in others:
        dist.destroy_process_group(group)
    if others:
        clear_sharding_caches()
    gc.collect()  # reference cycles keep closed groups and their threads alive


def _answer(ctx: Any, request: bytes, on_warning: Literal["error", "default", "ignore"]) -> bytes:
    try:
        fn, args = pickle.loads(request)
        if "torch._dynamo" in sys.modules:
            # Without compiled code: torch limits how often a function is compiled again. The first
            # call imports the compiler, parts of which warn.
            sys.modules["torch"].compiler.reset()
        with warnings.catch_warnings():
            warnings.simplefilter(on_warning)
            # Loaders fork their workers from a rank, which has gloo threads, as in any run.
            warnings.filterwarnings(
                "ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning
            )
            # torch's loaders, on a machine with fewer cores than workers.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            # torch.compile, on a Python with a fault that 3.13.1 mends.
            warnings.filterwarnings("ignore", message="Guards may run slower on Python 3.13.0")
            # torch.compile reads the gradients of everything that it traces.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is")
            value = fn(ctx, *args)
        return _returned(value, healthy=ctx.comm.state.failure is None)
    except BaseException as error:
        # After a CollectiveError a communicator works unless it recorded a failure. After any
        # other error the ranks may be at different calls.
        from fxtrain.errors import CollectiveError

        healthy = isinstance(error, CollectiveError) and ctx.comm.state.failure is None
        return _failed(error, healthy=healthy)


def _returned(value: Any, *, healthy: bool) -> bytes:
    words = f"its result, a {type(value).__name__}"
    try:
        body = pickle.dumps(value)
    except Exception:
        words = f"{words}, does not pickle"
        return pickle.dumps((False, False, None, words, traceback.format_exc()))
    return pickle.dumps((True, healthy, body, words, ""))


def _failed(error: BaseException, *, healthy: bool) -> bytes:
    trace = traceback.format_exc()
    words = "".join(traceback.format_exception_only(error)).strip()
    error.__traceback__ = error.__cause__ = error.__context__ = None
    # If raised again in the parent, these would end the tests.
    ends = isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit)
    try:
        body = None if ends else pickle.dumps(error)
    except Exception:  # an error with fields that do not pickle
        body = None
    return pickle.dumps((False, healthy and body is not None, body, words, trace))
