"""Processes that have imported what a rank needs, and become one when ranks are started again.

A rank takes seconds to import torch and the packages of its script, for which all ranks of a launch
wait after a failure. A spare is started beside each rank by the same command. It imports the
packages that the script imports, and waits; see `child.py`. torch's agent then gets its process in
place of a new one.
"""

import contextlib
import importlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from fxtrain.launchers.child import SPARE
from fxtrain.launchers.orphans import MARK

_AFTER_S = 2.0  # after a rank, so that it starts alone
_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"


@contextmanager
def spares_kept(count: int) -> Iterator[None]:
    """Within the block, keep so many spares for each rank that torch's agent starts.

    Effects:
        torch's agent starts ranks by another function. Starts processes, and ends them.
    """
    if not count:
        yield
        return
    handler: Any = importlib.import_module(_HANDLER).SubprocessHandler
    spares, start = _Spares(count), handler._popen

    def start_rank(self: Any, args: Sequence[str], env: Mapping[str, str]) -> Any:
        outputs = [file and file.name for file in (self._stdout, self._stderr)]
        process = spares.take(args, env, outputs) or start(self, args, env)
        spares.replace_later(args, env)
        return process

    handler._popen = start_rank
    try:
        yield
    finally:
        handler._popen = start
        spares.close()


@attrs.define
class _Spares:
    """The spares of each rank of this machine. It is mutable: they are taken and replaced.

    Attributes:
        count: How many are kept for each rank.
        waiting: By the rank's number on this machine, its spares with their arguments.
    """

    count: int
    waiting: dict[str, list[tuple[Sequence[str], subprocess.Popen[str]]]] = attrs.field(
        factory=dict[str, Any]
    )
    _lock: threading.Lock = attrs.field(factory=threading.Lock)
    _closed: threading.Event = attrs.field(factory=threading.Event)
    _missing: queue.SimpleQueue[Any] = attrs.field(factory=queue.SimpleQueue)

    def __attrs_post_init__(self) -> None:
        # Linux ends a child with the thread that has started it, so one thread starts all.
        threading.Thread(target=self._replace, name="fxtrain-spares", daemon=True).start()

    def take(
        self, args: Sequence[str], env: Mapping[str, str], outputs: Sequence[str | None]
    ) -> subprocess.Popen[str] | None:
        """Have a spare become a rank; None if there is none that still waits."""
        with self._lock:
            waiting = self.waiting.get(env["LOCAL_RANK"], [])
            while waiting:
                started, process = waiting.pop()
                with contextlib.suppress(BrokenPipeError):  # it has ended meanwhile
                    if started == args and process.poll() is None and process.stdin is not None:
                        process.stdin.write(json.dumps({"env": dict(env), "outputs": outputs}))
                        process.stdin.close()
                        return process
                _end(process)
        return None

    def replace_later(self, args: Sequence[str], env: Mapping[str, str]) -> None:
        """Start what is missing, after the ranks."""
        self._missing.put((time.monotonic() + _AFTER_S, args, env))

    def _replace(self) -> None:
        while True:
            due, args, env = self._missing.get()
            if self._closed.wait(max(0.0, due - time.monotonic())):
                return
            with self._lock:
                waiting = self.waiting.setdefault(env["LOCAL_RANK"], [])
                while len(waiting) < self.count and not self._closed.is_set():
                    # Without the mark by which what ranks leave behind is found and ended.
                    variables = {key: value for key, value in env.items() if key != MARK}
                    process = subprocess.Popen(
                        args,
                        env={**variables, SPARE: "1"},
                        stdin=subprocess.PIPE,
                        start_new_session=True,
                        text=True,
                    )
                    waiting.append((args, process))

    def close(self) -> None:
        """End the spares."""
        self._closed.set()
        with self._lock:
            for waiting in self.waiting.values():
                for _, process in waiting:
                    _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError):
        process.communicate()
