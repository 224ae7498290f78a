"""The launcher record, and how the command line of one is run, with signals forwarded to it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs

from fxtrain.errors import LaunchError
from fxtrain.launchers.child import end_with_parent
from fxtrain.launchers.machine import Machine
from fxtrain.launchers.outcome import (
    LaunchResult,
    count_memory_kills,
    describe_memory_kills,
    find_failures,
)
from fxtrain.launchers.spec import Invocation, LaunchSpec

# Fields of a spec that every launcher supports, ...
COMMON = frozenset(
    ("target", "args", "ranks", "module", "executable", "launcher", "options", "nodes", "env",
     "cpu", "gpus", "threads")
)  # fmt: skip
# ... and those for how ranks connect, and what torch's elastic launcher does on each node.
RENDEZVOUS_FIELDS = ("main_address", "main_port")
PER_NODE = (
    "connect_timeout_s", "monitor_interval_s", "shutdown_s", "role", "log_dir", "redirect", "tee",
    "show_ranks", "bind", "restarts",
)  # fmt: skip
# In a command line, a placeholder for the folder for errors of ranks, known only when it runs.
ERRORS = "%ERRORS%"
_POLL_INTERVAL_S = 0.2
# Time for other ranks to report their errors after one has failed.
_GRACE_S = 5.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Signals by which a scheduler or a person notifies a program; they end nothing here.
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def run_program(spec: LaunchSpec, invocation: Invocation) -> LaunchResult:
    """Write the files of an invocation, run its command line and wait for its end.

    Signals are forwarded to the program, which passes them to its ranks. Call it in the main
    thread, where they arrive.
    """
    program = shutil.which(invocation.argv[0])
    if program is None:
        raise LaunchError(
            f"The launcher {spec.launcher} runs {invocation.argv[0]!r}, which is not installed "
            f"here or not on the PATH. Use --dry to show what it would do.",
            code="FX702",
        )
    write_files(invocation)
    kills = count_memory_kills()
    with tempfile.TemporaryDirectory(prefix="fxtrain-launch-") as folder:
        errors = folder
        if spec.log_dir:
            Path(spec.log_dir).mkdir(parents=True, exist_ok=True)
            errors = os.path.abspath(tempfile.mkdtemp(prefix="errors-", dir=spec.log_dir))
        argv = [word.replace(ERRORS, errors) for word in invocation.argv]
        code, stopped = _wait(argv, {**os.environ, **invocation.env}, Path(errors))
        # Ranks on other machines see this folder only where log_dir is shared.
        failures = find_failures({}, Path(errors).glob("*.json")) if code else ()
    return LaunchResult(
        ranks=spec.world_size,
        failures=failures,
        signal=stopped,
        left=code,
        launcher=invocation.argv[0],
        memory=describe_memory_kills(kills),
    )


@attrs.frozen(kw_only=True)
class Launcher:
    """How one launcher starts ranks: functions of a spec, no state.

    A package adds one with an entry point in the group `fxtrain.launchers` that loads it.

    Attributes:
        name: The name to choose it by.
        help: A one-line description.
        invocation: (spec, machine) → what to start; pure.
        run: (spec, invocation) → how it ended: starts the invocation and waits for its end.
        options: The record of options that only this launcher has, or None.
        uses: Fields of `LaunchSpec` beyond the common ones that it supports; setting another
            field is an error.
        here: Whether the program is on this machine, so that it can be checked.
    """

    name: str
    help: str
    invocation: Callable[[LaunchSpec, Machine], Invocation]
    run: Callable[[LaunchSpec, Invocation], LaunchResult] = run_program
    options: type | None = None
    uses: frozenset[str] = attrs.field(default=frozenset(), converter=frozenset)
    here: bool = True


def write_files(invocation: Invocation) -> None:
    """Write the files of an invocation, for this user only: they may hold variables of the ranks.

    A file that exists, and that others could read, becomes this user's only as well.
    """
    for name, text in invocation.files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(number, "w", encoding="utf-8") as file:
            os.chmod(path, 0o600)
            file.write(text)


def _wait(argv: list[str], env: dict[str, str], errors: Path) -> tuple[int, int | None]:
    """The exit code of a program, and the signal with which this process was ended.

    If a rank has written an error and the program continues, the program is ended: MPICH's does
    not end the other ranks.
    """
    received: list[int] = []
    sys.stdout.flush()
    process = subprocess.Popen(
        argv,
        env=env,
        # Ctrl-C in a terminal is sent to every process there, so it need not be forwarded.
        start_new_session=True,
        preexec_fn=end_with_parent if sys.platform == "linux" else None,
    )

    def give(number: int) -> None:
        received.append(number)
        process.send_signal(number)

    with forward_signals((*FORWARDED_SIGNALS, *_ENDING), give):
        code = _ended(process, errors)
    ended = [number for number in received if number in _ENDING]
    return code, ended[0] if ended and code else None


def _ended(process: "subprocess.Popen[bytes]", errors: Path) -> int:
    failed_at: float | None = None
    while True:
        try:
            return process.wait(_POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if failed_at is None and any(errors.glob("*.json")):
            failed_at = now
        if failed_at is not None and now - failed_at > _GRACE_S:
            process.terminate()
            failed_at = now


@contextmanager
def forward_signals(numbers: tuple[int, ...], give: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, call `give` with each of these signals, in the main thread.

    Restores their handlers afterwards, and those of signals that end a launch, which torch's
    launcher replaces. Outside of the main thread, where signals do not arrive, does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        give(number)

    before = {number: signal.getsignal(number) for number in (*numbers, *_ENDING)}
    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is a handler that was not set by Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def signal_children(number: int) -> None:
    """Send a signal to every process that this one has started, where Linux shows them."""
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            with suppress(ProcessLookupError):  # it has just exited
                os.kill(int(pid), number)
