"""`launch`: a function on several ranks, from a script or a notebook cell."""

import contextlib
import importlib
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from fxtrain._optional import optional
from fxtrain._record import shown
from fxtrain.errors import FxError, LaunchError
from fxtrain.launchers.built_in.native.elastic import run_elastic
from fxtrain.launchers.outcome import describe
from fxtrain.launchers.spec import LONGEST_S, LaunchSpec
from fxtrain.launchers.table import prepare

_WORKER = Path(__file__).with_name("function_worker.py")
_SHUTDOWN_S = 3
_IMPORTS = "rank that imports the script"  # name of a process while it does

T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    args: Sequence[object] = (),
    *,
    ranks: int = 2,
    timeout_s: float | None = None,
    restarts: int = 0,
    nodes: int = 1,
    node_rank: int = 0,
    main_address: str = "",
    main_port: int = 0,
    connect_timeout_s: float = 600.0,
) -> list[T]:
    """Call a function on several ranks of this machine, each in its own process.

    In `fn`, `fx.detect()` finds the rank. Each process is a new interpreter, so a script must call
    `launch` under `if __name__ == "__main__":`. A function defined in a notebook cell or at a
    prompt is sent by value, which needs cloudpickle.

    For a run on several machines, call `launch` on each of them with its own `node_rank` and
    otherwise equal arguments.

    Args:
        fn: What to run on every rank.
        args: Its arguments, the same on every rank.
        ranks: Processes to start, on each node.
        timeout_s: Maximum time for the whole call, in seconds; no limit by default.
        restarts: Maximum restarts of all ranks, on every node, after one has failed.
        nodes: Number of machines.
        node_rank: Number of this one, from 0.
        main_address: Host name or address of node 0.
        main_port: TCP port there; 29500 with several nodes.
        connect_timeout_s: Maximum wait for node 0, in seconds.

    Returns:
        The return values of `fn`, by rank, of the ranks of this node.

    Effects:
        Starts `ranks` processes by the native launcher of `fxtrain launch`, and ends them.
        Meanwhile a TCP port is open: on loopback, chosen by the system, or `main_port` on node 0 of
        several nodes.

    Raises:
        LaunchError: the ranks could not be started, the nodes could not connect, ranks failed
            (the message has rank and traceback) more often than `restarts` allows, or the ranks
            did not finish within `timeout_s`.
        MissingPackageError: the function has to be sent by value, and cloudpickle is not installed.

    Example:
        >>> import fxtrain as fx
        >>> fx.launch(divmod, (7, 2), ranks=1)
        [(3, 1)]
    """
    _check(fn, args, timeout_s)
    with tempfile.TemporaryDirectory(prefix="fxtrain-function-") as folder, _unchanged_process():
        # The record checks numbers and addresses.
        spec = LaunchSpec(
            target=str(_WORKER),
            args=(folder,),
            ranks=ranks,
            restarts=restarts,
            shutdown_s=_SHUTDOWN_S,
            nodes=nodes,
            node_rank=node_rank,
            main_address=main_address,
            main_port=main_port,
            connect_timeout_s=connect_timeout_s,
        )
        Path(folder, "call").write_bytes(_call(fn, tuple(args)))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        results = [Path(folder, str(rank)) for rank in range(ranks)]
        try:
            ending = run_elastic(spec, prepare(spec), deadline=deadline, checks_devices=False)
        except TimeoutError:
            late = [node_rank * ranks + rank for rank in range(ranks) if not results[rank].exists()]
            raise LaunchError(
                f"launch(timeout_s={timeout_s:g}): these of {spec.world_size} ranks did not finish "
                f"in time and were ended: {', '.join(map(str, late))}. Find out what they wait "
                f"for, or allow more time."
            ) from None
        if ending.code and ending.signal is None:
            raise LaunchError(describe(ending))
        if ending.signal is None:
            return [_result(path) for path in results]
    signal.raise_signal(ending.signal)  # to the handler of this process
    raise LaunchError(describe(ending))


def _check(fn: Any, args: Any, timeout_s: Any) -> None:
    if multiprocessing.current_process().name == _IMPORTS:
        raise LaunchError(
            'A script must call fx.launch under `if __name__ == "__main__":`, since every rank '
            "imports the script."
        )
    if not callable(fn):
        raise LaunchError(
            f"launch takes a function and its arguments, found a {type(fn).__name__}. "
            f"For example: fx.launch(train, (0.1,), ranks=2), not fx.launch(train(0.1), ranks=2)."
        )
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise LaunchError(
            f"launch(args=...) takes a tuple of arguments, found a {type(args).__name__}. "
            f"For example: fx.launch(train, (plan,), ranks=2)."
        )
    number = type(timeout_s) in (int, float)
    if timeout_s is not None and not (number and 0 < timeout_s <= LONGEST_S):
        raise LaunchError(
            f"launch(timeout_s={shown(timeout_s)}): a timeout is a number of seconds > 0, at most "
            f"{LONGEST_S}. Use None for no limit."
        )
    core = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
    if core is not None and core._xla_runtime_is_initialized():
        raise LaunchError(
            "launch: XLA is initialized in this process, which then owns the TPU, so no rank could "
            "use it. Restart this session, and use XLA only inside the function."
        )


def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """What `function_worker.py` needs: how a new process becomes like this one, and the call."""
    main = vars(sys.modules["__main__"])
    file = main.get("__file__")
    # A notebook, a prompt or standard input, whose definitions another process cannot import.
    interactive = main.get("__spec__") is None and (file is None or not Path(file).exists())
    try:
        call = pickle_value((fn, args), interactive=interactive)
    except FxError:  # cloudpickle is missing
        raise
    except Exception as error:  # of any kind: each object defines how it is pickled
        value = _unsendable(fn, args, interactive=interactive)
        raise LaunchError(
            f"launch: {value} cannot be sent to other processes: {error}. Create it inside the "
            f"function. fx.launch returns what the function returns on each rank."
        ) from error
    # As multiprocessing's own new processes. A session has no file that they could import.
    hidden = main.pop("__file__", None) if interactive else None
    try:
        process = spawn.get_preparation_data(_IMPORTS)
    finally:
        if hidden is not None:
            main["__file__"] = hidden
    process.pop("authkey", None)
    return pickle.dumps((process, call))


def _unsendable(fn: Callable[..., Any], args: tuple[Any, ...], *, interactive: bool) -> str:
    """Which of a function and its arguments cannot be pickled, in words."""
    for number, value in enumerate(args):
        try:
            pickle_value(value, interactive=interactive)
        except Exception:  # of any kind
            return f"args[{number}], a {type(value).__qualname__},"
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


@contextlib.contextmanager
def _unchanged_process() -> Iterator[None]:
    """Restore the variables of this process, which a launcher passes on to its ranks."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _result(path: Path) -> Any:
    if not path.exists():
        raise LaunchError(f"Rank {path.name} of this node exited before the function returned.")
    return pickle.loads(path.read_bytes())


def pickle_value(value: Any, *, interactive: bool) -> bytes:
    """Turn a value into bytes that pickle reads; if interactive, the main module's by value.

    An object that cannot be sent raises what it likes.
    """
    with contextlib.suppress(Exception):  # of a lambda, a lock, a queue
        data = pickle.dumps(value)
        if not (interactive and b"__main__" in data):
            return data
    return _by_value(value, optional("cloudpickle", extra="notebook", needed_by="fx.launch"))


def _by_value(value: Any, cloudpickle: ModuleType) -> bytes:
    class Pickler(cloudpickle.Pickler):
        # cloudpickle sends only plain modules by name. It takes `ops` beside `torch` in a function
        # for torch.ops, which has another type; modules of other types are sent by name too.
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, ModuleType) and sys.modules.get(obj.__name__) is obj:
                return importlib.import_module, (obj.__name__,)
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
