"""Forks of a process that has loaded torch, on a node; each line of its input starts a program."""

import contextlib
import gc
import importlib
import json
import os
import select
import sys
from pathlib import Path

from tests.launched import _forked

# What launchers and the scripts of these tests import.
_LOADED = ("torch.distributed.run", "fxtrain.cli.launch_command", "torch.utils.data")


def main() -> None:
    for name in _LOADED:
        importlib.import_module(name)
    gc.freeze()
    _tell(os.getpid())
    running: dict[int, Path] = {}
    while True:
        if select.select([sys.stdin], [], [], 0.02)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            order = json.loads(line)
            pid = os.fork()
            if not pid:
                _forked._program(order["words"], order["cwd"], order["env"], [order["output"]] * 2)
            running[pid] = Path(order["output"]).with_suffix(".code")
            _tell(pid)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if path := running.pop(pid, None):
                path.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(status)))
                with contextlib.suppress(FileNotFoundError):  # removed with the files of its test
                    os.replace(path.with_suffix(".new"), path)


def _tell(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
