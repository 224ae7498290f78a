"""A function on several ranks, from a script or a notebook cell."""

import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from fxtrain._errors import LaunchError
from fxtrain._optional import optional
from fxtrain.launch._spec import rank_variables, shared_variables

__all__ = ["launch"]


def launch(
    fn: Callable[..., Any], args: Sequence[Any] = (), *, ranks: int = 2, timeout_s: float | None = None
) -> list[Any]:
    """Run a function on several ranks on this machine and return what each returned.

    Every rank is a new process in which `fx.detect()` finds its place. In a script, call it
    under `if __name__ == "__main__":`; in a notebook, the function and what it uses may be
    defined in cells (needs cloudpickle).

    Args:
        fn: Called as `fn(*args)` on every rank; what it returns must pickle.
        args: Its arguments.
        ranks: Processes to start.
        timeout_s: Longest time for all, in seconds; None waits forever.

    Returns:
        One value per rank, by rank.

    Effects:
        Starts processes and ends them all.

    Raises:
        LaunchError: a rank failed (its traceback is in the message) or time ran out.
    """
    if not callable(fn):
        raise LaunchError(f"launch takes a function, found {type(fn).__name__}.")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise LaunchError(f"launch(ranks={ranks!r}): a positive number of ranks was expected.")
    job = _pack(fn, tuple(args))
    port = _free_port()
    spawn = multiprocessing.get_context("spawn")
    workers: list[tuple[Any, Connection]] = []
    for rank in range(ranks):
        here, there = spawn.Pipe(duplex=False)
        variables = rank_variables(rank, ranks, port)
        variables |= shared_variables(os.environ, ranks, os.cpu_count() or 1)
        process = spawn.Process(target=_work, args=(job, variables, there, list(sys.path)))
        with _main_of_its_own():
            process.start()
        there.close()
        workers.append((process, here))
    try:
        return _wait(workers, None if timeout_s is None else time.monotonic() + timeout_s)
    finally:
        for process, pipe in workers:
            pipe.close()
            process.terminate()
        for process, _ in workers:
            process.join(5)
            if process.is_alive():
                process.kill()


def _wait(workers: list[tuple[Any, Connection]], deadline: float | None) -> list[Any]:
    results: dict[int, Any] = {}
    pipes: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(workers)}
    while len(results) < len(workers):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([pipe for pipe, rank in pipes.items() if rank not in results], left)
        if not ready:
            late = sorted(set(pipes.values()) - results.keys())
            raise LaunchError(f"launch: ranks {late} did not return in time and were ended.")
        for pipe in ready:
            rank = pipes[pipe]
            fine, results[rank] = _receive(pipe, workers[rank][0])  # type: ignore[arg-type]
            if not fine:
                raise LaunchError(f"launch: rank {rank} failed.\n{results[rank]}")
    for process, _ in workers:
        process.join(10)
    return [results[rank] for rank in range(len(workers))]


def _receive(pipe: Connection, process: Any) -> tuple[bool, Any]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(5)
        return False, f"Its process ended without a result, exit code {process.exitcode}."


def _pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    # A new process imports a script again, but not what was typed at a prompt.
    if _is_typed() and getattr(fn, "__module__", None) == "__main__":
        cloud = optional("cloudpickle", extra="test", needed_by="launch from a notebook or prompt")
        return cloud.dumps((fn, args))
    try:
        return pickle.dumps((fn, args))
    except Exception as error:  # pickle raises whatever __reduce__ does
        raise LaunchError(
            f"launch: the function or its arguments cannot be sent to another process: {error}. "
            f"Define the function at the top level of its module."
        ) from error


def _is_typed() -> bool:
    """Whether the main module came from a prompt, a notebook or standard input."""
    return not os.path.exists(getattr(sys.modules["__main__"], "__file__", ""))


@contextmanager
def _main_of_its_own() -> Iterator[None]:
    """Keep a new process from importing a main module that is no file, such as <stdin>."""
    main: Any = sys.modules["__main__"]
    if not _is_typed() or not hasattr(main, "__file__"):
        yield
        return
    name = main.__file__
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = name


def _work(job: bytes, variables: dict[str, str], pipe: Connection, path: list[str]) -> None:
    os.environ.update(variables)
    sys.path[:] = path
    try:
        fn, args = pickle.loads(job)
        answer = pickle.dumps((True, fn(*args)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)
    pipe.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
