"""Run a program in a session of its own, with a hard time limit that ends all of it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs

from tests._patience import patience
from tests.launched import _forked

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("scripts")

PYTHON = (sys.executable,)
FXTRAIN = (sys.executable, "-m", "fxtrain")
# torch 2.9 prints a line to standard output for each process group, in pieces, between which those
# of other ranks may come.
_GLOO = re.compile(
    r"^(\[Gloo\] Rank|[\d ]*(is connected|peer ranks|Expected number of connected)).*\n",
    re.MULTILINE,
)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@attrs.frozen(kw_only=True)
class Finished:
    """How a program ended and what it wrote."""

    code: int
    out: str
    err: str


def start(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None, stdin=None):
    """Start a program with fxtrain on its path and one thread for its arithmetic."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=_variables(env),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start_fork(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None):
    """Start a Python program, and ranks of torch's launcher in it, with torch loaded.

    Faster than `start` by seconds for each process, where Linux can.
    """
    if sys.platform != "linux":
        return start(*command, cwd=cwd, env=env)
    return _forked.start(command[1:], cwd, _variables(env))


def _variables(env: dict[str, str] | None) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    ours = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return {**os.environ, **ours, **(env or {})}


def finish(process, *, timeout_s: float = 90.0, text: str | None = None) -> Finished:
    """Wait for a program to end; when its time is up, its whole process group is killed.

    `timeout_s` is for a quiet machine. Its processes say first where they are. The ranks of a
    launcher, which have groups of their own, end with it.
    """
    try:
        out, err = process.communicate(text, timeout=timeout_s * patience())
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        time.sleep(2)
        with contextlib.suppress(ProcessLookupError):  # they may have ended
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"Not done after {timeout_s} s.\n{out}\n{err}") from None
    return Finished(code=process.returncode, out=_GLOO.sub("", out), err=_GLOO.sub("", err))


def run(*command: str, cwd: Path | None = None, timeout_s: float = 90.0, **env: str) -> Finished:
    """Start a program and wait for it."""
    return finish(start(*command, cwd=cwd, env=env), timeout_s=timeout_s)


def run_fork(
    *command: str, cwd: Path | None = None, timeout_s: float = 90.0, **env: str
) -> Finished:
    """Start a Python program with torch loaded and wait for it."""
    return finish(start_fork(*command, cwd=cwd, env=env), timeout_s=timeout_s)


def run_text(text: str, *, timeout_s: float = 90.0, **env: str) -> Finished:
    """Feed a program to Python's standard input."""
    process = start(*PYTHON, "-W", "error", "-", env=env, stdin=subprocess.PIPE)
    return finish(process, timeout_s=timeout_s, text=text)
