"""The program of a launched process: runs the user's script and records its error.

Run as a file, `python child.py script|module|program [--cores=0,1/2,3] [--errors=FOLDER] --
TARGET ARGS...`, and with the standard library only, so that nothing is imported or changed before
the user's script starts. An error is not printed here but written for the launcher, which shows the
first one: eight ranks that fail together would otherwise interleave eight tracebacks.
"""

import ast
import atexit
import contextlib
import ctypes
import faulthandler
import functools
import importlib
import importlib.util
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import TracebackType

# A rank that cannot exit, for example in a library's clean-up, prints its error after this time.
_PATIENCE_S = 10.0
SPARE = "FXTRAIN_SPARE"  # this process waits until a rank is needed
# What torch and fxtrain import when a model is wrapped.
_LATER = {"torch": "torch._dynamo", "fxtrain": "fxtrain.loop"}
# torchrun's, Open MPI's, MPICH's and SLURM's.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def main() -> dict[str, object]:
    """Become the program that the arguments name; what its names refer to at its end."""
    split = sys.argv.index("--")
    how, *options = sys.argv[1:split]
    target, *args = sys.argv[split + 1 :]
    given = dict(option.removeprefix("--").split("=", 1) for option in options)
    end_with_parent()
    if SPARE in os.environ:
        with _ignored_signals():
            _import_packages(how, target)
            _wait_until_needed()
    if "cores" in given:
        _pin_to_cores(given["cores"].split("/"))
    if how == "program":
        _replace(target, args)
    faulthandler.enable()
    if hasattr(signal, "SIGUSR2"):  # which would end this process, before fx.detect and after
        faulthandler.register(signal.SIGUSR2)
    folder = given.get("errors")
    sys.excepthook = functools.partial(_record, folder)
    atexit.register(_end_at_once)  # registered first, so it runs last
    sys.argv[:] = [target, *args]
    # `python -u` writes the end of a line on its own, before which those of other ranks may come.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    try:
        return become(how, target)
    except SystemExit as leaving:
        code = leaving.code
        # As the system has it, which takes -1 as 255.
        if number := code & 255 if isinstance(code, int) else int(code is not None):
            # mpirun may not pass it on, and torch's launcher may see another rank end first.
            _report(folder, "", code=number)
        raise


@contextlib.contextmanager
def _ignored_signals() -> Iterator[None]:
    """Ignore the signals that a launcher forwards to its ranks, and end other processes."""
    numbers = [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    yield
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)


def _import_packages(how: str, target: str) -> None:
    """Import the packages that a script or module imports, but no modules of its own folder.

    Those may depend on the rank, and are short.
    """
    _set_own_path(how, target)
    own = os.path.abspath(sys.path[0])
    source = target
    if how == "module":
        spec = importlib.util.find_spec(target)
        source = spec.origin if spec is not None and spec.origin is not None else target
    with open(source, "rb") as file:  # whose first lines may declare its encoding
        tree = ast.parse(file.read())
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    for name in names:
        # What fails here fails again in the rank, where it is reported.
        with contextlib.suppress(Exception):
            module = importlib.util.find_spec(name.partition(".")[0])
            if module is None or not (module.origin or "").startswith(own + os.sep):
                importlib.import_module(name)
    for package, later in _LATER.items():
        if package in sys.modules:
            importlib.import_module(later)


def _wait_until_needed() -> None:
    """Wait for the launcher, and take over the variables and streams of a rank."""
    order = sys.stdin.read()
    if not order:  # the launcher has ended
        os._exit(0)
    rank = json.loads(order)
    os.environ.clear()
    os.environ.update(rank["env"])
    for number, path in enumerate(rank["outputs"], start=1):
        if path is not None:
            file = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.dup2(file, number)
            os.close(file)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def become(how: str, target: str) -> dict[str, object]:
    """Run a script or a module as Python itself would; what its names refer to at its end."""
    _set_own_path(how, target)
    if how == "module":
        return runpy.run_module(target, run_name="__main__", alter_sys=True)
    # Absolute, as Python itself makes `__file__` of the script it runs.
    return runpy.run_path(os.path.abspath(target), run_name="__main__")


def end_with_parent() -> None:
    """Make this process end with its launcher if that is killed, where Linux supports it."""
    if sys.platform == "linux":
        parent_dies = 1  # PR_SET_PDEATHSIG, see prctl(2)
        ctypes.CDLL(None).prctl(parent_dies, signal.SIGTERM)


def _pin_to_cores(shares: list[str]) -> None:
    """Run on this rank's cores."""
    share = shares[int(os.environ.get("LOCAL_RANK", "0"))]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, map(int, share.split(",")))


def _replace(target: str, args: list[str]) -> None:
    """Replace this process by a program that is not Python."""
    try:
        os.execvp(target, [target, *args])
    except OSError as error:
        # Messages and exit codes of a shell.
        sys.stderr.write(f"{target}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def _set_own_path(how: str, target: str) -> None:
    """Have imports look where they would if Python ran the target itself."""
    folder = os.getcwd() if how == "module" else os.path.dirname(os.path.realpath(target))
    # Python adds the folder of this file, unless it runs in safe-path mode.
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _record(
    folder: str | None,
    kind: type[BaseException],
    error: BaseException,
    tb: TracebackType | None,
) -> None:
    name = kind.__qualname__
    if issubclass(kind, KeyboardInterrupt):  # of this rank, or of the launcher, which says so
        _report(folder, name, code=-signal.SIGINT, kind=name)
        return
    shown = _skip_own_frames(tb)
    written = _report(
        folder,
        f"{name}: {error}" if str(error) else name,
        code=1,  # Python's exit code
        kind=name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}",
        py_callstack="".join(traceback.format_exception(kind, error, shown)),
    )
    if not written:
        sys.__excepthook__(kind, error, shown)
        return
    timer = threading.Timer(_PATIENCE_S, sys.__excepthook__, (kind, error, shown))
    timer.daemon = True
    timer.start()


def _end_at_once() -> None:
    """End a failed rank before Python tears its modules down.

    A gloo thread whose collective is still pending may release a tensor at that moment, which
    aborts the process, so that SIGABRT would hide the error (pytorch/pytorch#190489).
    """
    error = getattr(sys, "last_value", None)
    if error is None or isinstance(error, KeyboardInterrupt) or "torch" not in sys.modules:
        return
    for stream in (sys.stdout, sys.stderr):
        # Its reader may have ended, or the script has closed or replaced it.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)  # Python's own exit code for an uncaught error


def _report(folder: str | None, message: str, *, code: int, **more: str) -> bool:
    """Write how this rank ends, where a launcher reads that; whether there is such a place.

    The format is that of torch's elastic launcher plus a few fields.
    """
    if folder is not None and os.path.isdir(folder):
        path = os.path.join(folder, f"{_rank()}.json")
    elif "TORCHELASTIC_ERROR_FILE" in os.environ:
        path = os.environ["TORCHELASTIC_ERROR_FILE"]
    else:
        return False
    now_ns = time.time_ns()
    times = {"timestamp": str(now_ns // 10**9), "time_ns": now_ns}
    extra = {**times, "rank": _rank(), "code": code, **more}
    # Atomically, since the launcher may end this process at any moment.
    with open(f"{path}.new", "w") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)
    os.replace(f"{path}.new", path)
    return True


def _rank() -> int:
    """Number of this rank, as whoever started it says."""
    ranks = (os.environ[name] for name in _RANKS if name in os.environ)
    return int(next(ranks, "0"))


def _skip_own_frames(tb: TracebackType | None) -> TracebackType | None:
    """Start the traceback in the user's script, where it starts without a launcher."""
    worker = os.path.join(os.path.dirname(__file__), "function_worker.py")
    own = {__file__, worker, runpy.__file__, "<frozen runpy>"}
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename in own:
        tb = tb.tb_next
    return tb


if __name__ == "__main__":
    names = main()  # kept until functions of `atexit` have run, as a program keeps its names
