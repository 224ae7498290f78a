"""Python programs as forks of a server that has loaded torch, which takes a process seconds.

A program, and the ranks that torch's elastic launcher starts in it, run as `__main__` with their
own arguments, variables, folder, output, process group and exit code. What a fork cannot show is
the start of a process itself: its command line and variables in /proc, and what is imported. Each
launcher has tests with real starts for that.
"""

import atexit
import faulthandler
import io
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from fxtrain.testing.cluster import starter

# What launchers and scripts of tests import.
LOADED = (
    "torch.distributed.run",
    "fxtrain.cli.launch_command",
    "sklearn.datasets",
    "sklearn.model_selection",
    "transformers.models.bert.modeling_bert",
    "accelerate",
)
_LAUNCHERS = ("torch.distributed.run", "fxtrain")
# Processes that a launcher keeps ready to become ranks: as many as any test starts.
_SPARES = 16
_ORDER_BYTES = 1 << 17


@attrs.frozen(kw_only=True)
class Program:
    """A program that runs, with its output in files."""

    process: Any
    folder: tempfile.TemporaryDirectory

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, text: None = None, timeout: float | None = None) -> tuple[str, str]:
        """Its output, once it has ended."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("program", timeout or 0.0)
        out, err = (Path(self.folder.name, name).read_text() for name in ("out", "err"))
        self.folder.cleanup()
        return out, err

    @property
    def returncode(self) -> int:
        return self.process.exitcode


def start(words: Sequence[str], cwd: Path | None, variables: Mapping[str, str]) -> Program:
    """Start `python WORDS`: a script or `-m` and a module, and arguments."""
    folder = tempfile.TemporaryDirectory()
    files = [str(Path(folder.name, name)) for name in ("out", "err")]
    task = (tuple(words), str(cwd or Path.cwd()), dict(variables), files)
    process = starter(*LOADED).Process(target=_program, args=task, daemon=True)
    process.start()
    return Program(process=process, folder=folder)


def _program(words: Sequence[str], cwd: str, variables: dict[str, str], files: list[str]) -> None:
    for number, name in enumerate(files, start=1):
        with open(name, "ab") as file:
            os.dup2(file.fileno(), number)
    os.chdir(cwd)
    if any(word in _LAUNCHERS for word in words) or "fx.launch(" in _text(words[0]):
        spares = [_Spare() for _ in range(_SPARES)]
        subprocess_handler.Popen = lambda **order: _Rank(spares.pop(0), **order)
    _run(words, variables)


def _text(script: str) -> str:
    return Path(script).read_text() if script.endswith(".py") else ""


class _Spare:
    """A process that waits to become a rank, and ends with this one otherwise."""

    def __init__(self) -> None:
        self.pipe, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid:
            theirs.close()
            return
        self.pipe.close()
        order, files, _, _ = socket.recv_fds(theirs, _ORDER_BYTES, 3)
        if not order:
            os._exit(0)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        theirs.close()
        words, variables, cwd = pickle.loads(order)
        os.chdir(cwd)
        _run(words, variables)


class _Rank:
    """As much of `subprocess.Popen` as torch's elastic launcher uses."""

    def __init__(
        self,
        spare: _Spare,
        *,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: Any,
        stderr: Any,
        start_new_session: bool,
    ) -> None:
        assert start_new_session and args[0] == sys.executable, args
        self.pid = spare.pid
        self.returncode: int | None = None
        order = pickle.dumps((args[1:], dict(env), os.getcwd()))
        files = [0, *(one.fileno() if one else n for n, one in ((1, stdout), (2, stderr)))]
        with spare.pipe:
            socket.send_fds(spare.pipe, [order], files)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.02)
        return self.poll()


def _run(words: Sequence[str], variables: dict[str, str]) -> None:
    """Be `python WORDS` in a session of its own, to the end of this process."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(variables)
    # Daemons must not have children, and would start them as they were started themselves.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    numpy.random.seed()  # whose state all forks would share
    faulthandler.enable()
    code = 1
    try:
        code = _main(list(words))
    finally:
        threading._shutdown()  # as every program ends: threads first
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# What the script's names refer to, which a program also keeps until functions of `atexit` have run.
_ended: list[dict[str, object]] = []


def _main(words: list[str]) -> int:
    """Run a script or module as `__main__`; its exit code."""
    if words[0] == "-u":
        words.pop(0)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "wb", closefd=False), write_through=True)
    if words[:2] == ["-W", "error"]:
        del words[:2]
        warnings.simplefilter("error")
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.realpath(words[0])))
    try:
        if is_module:
            _ended.append(runpy.run_module(words[1], run_name="__main__", alter_sys=True))
        else:
            _ended.append(runpy.run_path(words[0], run_name="__main__"))
    except SystemExit as leaving:
        if isinstance(leaving.code, int | None):
            return leaving.code or 0
        sys.stderr.write(f"{leaving.code}\n")
        return 1
    except BaseException as error:
        tb = error.__traceback__
        sys.last_value = error
        sys.excepthook(type(error), error, tb and tb.tb_next)  # less this function's own frame
        return 1
    return 0
