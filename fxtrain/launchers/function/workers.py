"""The processes of `launch`: starting and ending them, and their main function."""

import multiprocessing
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import attrs

from fxtrain.errors import LaunchError
from fxtrain.launchers.child import end_with_parent
from fxtrain.launchers.function.pickling import UNPICKLABLE, is_interactive, pack
from fxtrain.launchers.orphans import MARK, end_strays, kept
from fxtrain.launchers.outcome import Failure

_KILL_S = 3.0
_REMEDY = (
    "Install cloudpickle with: pip install 'fxtrain[notebook]', or define the function in a "
    "module and import it"
)


@attrs.frozen(kw_only=True, eq=False)
class Rank:
    """A started process, and the pipe through which it answers.

    Attributes:
        number: Its number on this machine.
        place: Its rank.
        world: World size.
        process: The process.
        pipe: Where its answer arrives.
        mark: The launch's mark, which its children inherit.
    """

    number: int
    place: int
    world: int
    process: Any
    pipe: Connection
    mark: str


def start(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    places: Sequence[Mapping[str, str]],
    *,
    threads: int,
) -> list[Rank]:
    """Start one process per rank.

    Args:
        fn: The function to call.
        args: Its arguments.
        places: By rank, the variables that describe it.
        threads: Threads of torch in each process, unless the user chose a number.

    Raises:
        LaunchError: the function cannot be sent to a new process, and this one cannot fork.
    """
    try:
        call = pack((fn, args), interactive=is_interactive())
    except UNPICKLABLE as error:
        raise LaunchError(
            f"launch: {_name(fn)} and its arguments cannot be sent to other processes: {error}. "
            f"Create these objects inside the function."
        ) from error
    context = multiprocessing.get_context("spawn") if call is not None else _forking(fn)
    task = (fn, args) if call is None else call
    started: list[Rank] = []
    try:
        for number, place in enumerate(places):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(dict(place), threads, there, task), name=f"rank {number}"
            )
            rank, world = int(place["RANK"]), int(place["WORLD_SIZE"])
            started.append(
                Rank(
                    number=number,
                    place=rank,
                    world=world,
                    process=process,
                    pipe=here,
                    mark=place[MARK],
                )
            )
            with _startable():
                process.start()
            there.close()
    except BaseException:
        end(started, patience_s=0)
        raise
    return started


def watched(started: Sequence[Rank]) -> AbstractContextManager[None]:
    """Kill the ranks if this process is killed within the block."""
    sessions = [rank.process.pid for rank in started]
    return kept(started[0].mark, patience_s=_KILL_S, sessions=sessions)


def end(started: Sequence[Rank], *, patience_s: float) -> None:
    """Make sure that every process has ended, and its children.

    Args:
        started: The ranks.
        patience_s: Time that the ranks have to exit by themselves before they get SIGTERM. Those
            that still run after that, and their children, are killed.
    """
    running = [rank.process for rank in started if rank.process.pid is not None]
    sessions = [process.pid for process in running]
    deadline = time.monotonic() + patience_s
    for process in running:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in running:
        process.terminate()
    deadline = time.monotonic() + _KILL_S
    for process in running:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
        process.close()
    for rank in started:
        rank.pipe.close()
    if running:
        end_strays(started[0].mark, patience_s=_KILL_S, ask=not patience_s, sessions=sessions)


@contextmanager
def _startable() -> Iterator[None]:
    """Start a process, whatever the state of this one."""
    main = vars(sys.modules["__main__"])
    # A new process would look for the file of `python -`, which is named <stdin>.
    hidden = main.pop("__file__") if is_interactive() and "__file__" in main else None
    try:
        with warnings.catch_warnings():
            # Python warns of forks beside threads; `_set_up_rank` handles that case.
            warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
            yield
    finally:
        if hidden is not None:
            main["__file__"] = hidden


def _forking(fn: Callable[..., Any]) -> Any:
    """The fork context, if a copy of this process can work."""
    torch = sys.modules.get("torch")
    used = [
        device
        for device in ("cuda", "xpu")
        if torch is not None and getattr(torch, device).is_initialized()
    ]
    if used:
        raise LaunchError(
            f"launch: {_name(fn)} is defined in this session, so the ranks would be forks of "
            f"this process, but {used[0]} is initialized here and does not work in a fork. "
            f"{_REMEDY}; or restart, and use {used[0]} only inside the function."
        )
    if "fork" not in multiprocessing.get_all_start_methods():
        raise LaunchError(
            f"launch: {_name(fn)} cannot be sent to other processes by name. {_REMEDY}."
        )
    return multiprocessing.get_context("fork")


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


def _work(place: dict[str, str], threads: int, pipe: Connection, task: Any) -> None:
    """The main function of a rank: set it up, call the function, answer."""
    forked = not isinstance(task, bytes)
    _set_up_rank(place, 1 if forked else threads)
    if forked and "torch" in sys.modules:
        # The parent's thread pool does not exist in a fork, and torch would wait for it forever.
        sys.modules["torch"].set_num_threads(1)
    os.setsid()  # by which its children are found
    end_with_parent()
    pipe.send_bytes(b"")  # this far, the main module could be imported
    outcome = _outcome(task, int(place["RANK"]))
    if outcome is None:
        return
    try:
        # A fork has the parent's main module, a new process does not.
        answer = pack(outcome, interactive=not forked)
        problem = "its type is not importable and cloudpickle is not installed"
    except UNPICKLABLE as error:
        answer, problem = None, str(error)
    if answer is None:
        what = f"TypeError: the return value cannot be sent back: {problem}"
        answer = pickle.dumps(Failure(rank=int(place["RANK"]), kind="TypeError", error=what))
    pipe.send_bytes(answer)
    pipe.close()


def _set_up_rank(place: dict[str, str], threads: int) -> None:
    for name in list(os.environ):
        if name.startswith("TORCHELASTIC_"):  # of a launcher above the parent
            del os.environ[name]
    os.environ.update(place)
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if "torch" in sys.modules:  # it has already read the variable
            sys.modules["torch"].set_num_threads(threads)


def _outcome(task: Any, rank: int) -> tuple[Any] | Failure | None:
    """The function's return value, in a tuple of one, or its error; None if interrupted."""
    try:
        fn, args = pickle.loads(task) if isinstance(task, bytes) else task
        return (fn(*args),)
    except KeyboardInterrupt:
        return None
    except SystemExit as error:
        return (None,) if error.code in (None, 0) else _failure(error, rank)
    except Exception as error:
        return _failure(error, rank)


def _failure(error: BaseException, rank: int) -> Failure:
    kind = type(error)
    name = kind.__qualname__
    tb = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return Failure(
        rank=rank,
        kind=name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}",
        error=f"{name}: {error}" if str(error) else name,
        traceback="".join(traceback.format_exception(kind, error, tb)),
        time_ns=time.time_ns(),
    )
