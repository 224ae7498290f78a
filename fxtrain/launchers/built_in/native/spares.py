"""Processes that have imported what a rank needs, and become one when ranks are started again.

A rank takes seconds to import torch and the packages of its script, for which all ranks of a launch
wait after a failure. A spare is started beside each rank by the same command. It imports the
packages that the script imports, and waits; see `child.py`. torch's agent then gets its process in
place of a new one.
"""

import contextlib
import importlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fxtrain.launchers.child import SPARE
from fxtrain.launchers.orphans import MARK

_AFTER_S = 2.0  # after a rank, so that it starts alone
_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
_Process = subprocess.Popen[str]


@contextmanager
def spares_kept(count: int) -> Iterator[Callable[[], None]]:
    """Within the block, keep so many spares for each rank that torch's agent starts.

    Yields a function that starts missing spares. The thread that starts the ranks calls it now and
    then, since Linux ends a child with the thread that has started it.

    Effects:
        torch's agent starts ranks by another function. Starts processes, and ends them.
    """
    handler: Any = importlib.import_module(_HANDLER).SubprocessHandler
    start = handler._popen
    waiting: dict[str, list[_Process]] = {}  # by the rank's number on this machine
    started: dict[str, tuple[float, Sequence[str], Mapping[str, str]]] = {}

    def start_rank(self: Any, args: Sequence[str], env: Mapping[str, str]) -> Any:
        outputs = [file and file.name for file in (self._stdout, self._stderr)]
        started[env["LOCAL_RANK"]] = time.monotonic(), args, env
        spares = waiting.setdefault(env["LOCAL_RANK"], [])
        return _become(spares, env, outputs) or start(self, args, env)

    def replace() -> None:
        for rank, (since, args, env) in started.items():
            while time.monotonic() - since > _AFTER_S and len(waiting[rank]) < count:
                # Without the mark by which what ranks leave behind is found and ended.
                variables = {key: value for key, value in env.items() if key != MARK}
                process = subprocess.Popen(
                    args,
                    env={**variables, SPARE: "1"},
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                    text=True,
                )
                waiting[rank].append(process)

    handler._popen = start_rank
    try:
        yield replace
    finally:
        handler._popen = start
        for spares in waiting.values():
            for process in spares:
                _end(process)


def _become(
    spares: list[_Process], env: Mapping[str, str], outputs: Sequence[str | None]
) -> _Process | None:
    """Have a spare become a rank; None if there is none that still waits."""
    while spares:
        process = spares.pop()
        with contextlib.suppress(BrokenPipeError):  # it has ended meanwhile
            if process.poll() is None and process.stdin is not None:
                process.stdin.write(json.dumps({"env": dict(env), "outputs": outputs}))
                process.stdin.close()
                return process
        _end(process)
    return None


def _end(process: _Process) -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError):
        process.communicate()
