"""A pool of real ranks: worker processes joined by gloo, kept for many short calls."""

import multiprocessing
import pickle
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["Cluster", "RankFailure", "free_port"]

_START_S = 90.0


class RankFailure(Exception):
    """Ranks of a pool failed, or did not answer in time."""


class Cluster:
    """World-size worker processes that run module-level functions on all ranks at once.

    Workers start at the first call and again after a failure that left the ranks unable to
    talk. Each runs `fn(ctx, *args)` with a connected context on the CPU.

    Args:
        n: Ranks.
        timeout_s: Group timeout of the ranks' context, in seconds.
        call_s: Longest time for one call, in seconds; then the workers are killed.
    """

    def __init__(self, n: int, *, timeout_s: float = 5.0, call_s: float = 40.0) -> None:
        self.n = n
        self._timeout_s = timeout_s
        self._call_s = call_s
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn(ctx, *args)` on every rank and return the results by rank.

        Raises:
            The error of a rank that failed, with its traceback as a note.
        """
        outcomes = self.outcomes(fn, *args)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            self.close()
            # A CollectiveError is mostly the echo of what failed on another rank.
            raise min(errors, key=lambda error: type(error).__name__ == "CollectiveError")
        return outcomes

    def outcomes(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Like `run`, but a rank that failed gives its exception as its result."""
        if not self._workers:
            self._start()
        request = pickle.dumps((fn, args))
        for _, pipe in self._workers:
            pipe.send_bytes(request)
        answers = self._collect(time.monotonic() + self._call_s)
        if not all(healthy for _, healthy in answers):
            self.close()
        return [value for value, _ in answers]

    def close(self) -> None:
        """End the workers."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join(10)
            process.close()
        self._workers = []

    def _collect(self, deadline: float) -> list[tuple[Any, bool]]:
        answers: dict[int, tuple[Any, bool]] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        while len(answers) < self.n:
            waiting: list[Any] = [pipe for pipe, rank in pipes.items() if rank not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = sorted(set(range(self.n)) - answers.keys())
                self.close()
                raise RankFailure(f"Ranks {silent} of {self.n} did not answer and were killed.")
            for pipe in ready:
                rank = pipes[pipe]  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = (RankFailure(f"Rank {rank} of {self.n} died."), False)
        return [answers[rank] for rank in range(self.n)]

    def _start(self) -> None:
        port = free_port()
        spawn = multiprocessing.get_context("spawn")
        for rank in range(self.n):
            here, there = spawn.Pipe()
            process = spawn.Process(
                target=_work,
                args=(rank, self.n, port, self._timeout_s, there, list(sys.path)),
                daemon=True,
            )
            process.start()
            there.close()
            self._workers.append((process, here))
        failed = [value for value, fine in self._collect(time.monotonic() + _START_S) if not fine]
        if failed:
            self.close()
            raise RankFailure(f"The ranks of a pool did not start: {failed[0]}") from failed[0]


def free_port() -> int:
    """A TCP port on loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _work(
    rank: int, n: int, port: int, timeout_s: float, pipe: Connection, path: list[str]
) -> None:
    sys.path[:] = path
    import torch

    from fxtrain import ops

    torch.set_num_threads(1)
    env = {
        "RANK": rank,
        "WORLD_SIZE": n,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": n,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    try:
        variables = {name: str(value) for name, value in env.items()}
        ctx = ops.detect(variables, device="cpu", timeout_s=timeout_s)
    except Exception as error:
        pipe.send_bytes(pickle.dumps((error, False)))
        return
    pipe.send_bytes(pickle.dumps((None, True)))
    with ctx:
        while True:
            try:
                request = pipe.recv_bytes()
            except (EOFError, OSError):
                return
            pipe.send_bytes(_answer(ctx, request))


def _answer(ctx: Any, request: bytes) -> bytes:
    try:
        fn, args = pickle.loads(request)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # torch.compile looks at the gradients of whatever it traces.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is")
            value = fn(ctx, *args)
        return pickle.dumps((value, ctx.comm.ledger.broken is None))
    except BaseException as error:
        # After its own errors a communicator is usable unless it says that it broke; an
        # error of another kind may have left the ranks at different calls.
        from fxtrain._errors import CollectiveError

        healthy = isinstance(error, CollectiveError) and ctx.comm.ledger.broken is None
        error.add_note(f"On rank {ctx.rank} of {ctx.world_size}:\n{traceback.format_exc()}")
        error.__traceback__ = error.__cause__ = error.__context__ = None
        try:
            return pickle.dumps((error, healthy))
        except Exception:  # an error with fields that do not pickle
            return pickle.dumps((RankFailure(traceback.format_exc()), False))
