"""How a launch ended: the errors that ranks wrote, which failed first, and the message."""

import json
import os
import re
import signal
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# Between the errors of a traceback.
_CHAINED = re.compile(r"(?<=:\n\n)(?=Traceback \(most recent call last\):$)", re.MULTILINE)
_FILES_OF_OTHERS = re.compile(
    rf"""^  File "(?!{re.escape(_PACKAGE)}|[^"]*[\\/]site-packages[\\/]torch[\\/])""", re.MULTILINE
)
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|remote process|store.*closed"
    r"|[\\/]gloo[\\/]|\[FX102\]$",  # the code of a rank that waited in vain for others to connect
    re.IGNORECASE,
)
_QUOTED_RANK = re.compile(r"\w+: rank (\d+)\b")  # an error of that rank, raised on every rank
_KERNEL_COUNTERS = Path("/proc/vmstat")
_PERHAPS_MEMORY = "The kernel does that when memory runs out: run dmesg, or use less memory."
_MEMORY = (
    "Most likely, that was the kernel's out-of-memory killer, which ended a process of this "
    "machine meanwhile. Use a smaller batch, fewer ranks or fewer loader workers, or request more "
    "memory."
)
_NOT_MEMORY = "That was not the kernel's out-of-memory killer: another process sent the signal."
_PERHAPS_WATCHDOG = (
    "C++ code does that: a failed check, or NCCL's watchdog when a collective times out because "
    "another rank failed or never joined it. The output of this rank names the reason."
)


@attrs.frozen(kw_only=True)
class Failure:
    """A failed rank.

    Attributes:
        rank: Its rank.
        code: Exit code of the process; -n if signal n ended it; None if unknown.
        kind: Full name of the exception's type; empty without one.
        error: The exception in one line, such as `ValueError: bad`; empty without one.
        traceback: The exception with its traceback; empty without one.
        time_ns: When it failed, in nanoseconds since 1970; only the order matters.
        stopped: Whether the launcher ended this rank, since another one had failed.
    """

    rank: int
    code: int | None = None
    kind: str = ""
    error: str = ""
    traceback: str = ""
    time_ns: int = 0
    stopped: bool = False


@attrs.frozen(kw_only=True)
class LaunchResult:
    """How all ranks ended.

    Attributes:
        ranks: World size.
        failures: Those that failed, the cause first.
        signal: The signal that ended the launcher, or None.
        left: Exit code of the external launcher, such as mpirun, if one was started; otherwise 0.
        launcher: Its name.
        memory: What the kernel's out-of-memory killer did; empty if unknown.
        node: Name of the node with the failures, if there are several nodes.
        culprit: What failed first on another node, in words; empty if nothing did.
    """

    ranks: int
    failures: tuple[Failure, ...] = ()
    signal: int | None = None
    left: int = 0
    launcher: str = ""
    memory: str = ""
    node: str = ""
    culprit: str = ""

    @property
    def code(self) -> int:
        """The exit code of the launch, by the rules of a shell."""
        if self.signal is not None:
            return 128 + self.signal
        first = self.failures[0].code if self.failures else 0
        code = first or self.left or int(bool(self.failures or self.culprit))
        return 128 - code if code < 0 else code


def by_cause(failures: list[Failure]) -> tuple[Failure, ...]:
    """Sort failures so that the one to look at comes first.

    A failing rank leaves its peers in the middle of a collective, and they may report that before
    it reports its own error. So errors that only say that another rank is lost are sorted after
    all others, and ranks that were ended from outside come last.

    Example:
        >>> from fxtrain.launchers import Failure, by_cause
        >>> lost = Failure(rank=0, kind="fxtrain.errors.CollectiveError", error="...", time_ns=1)
        >>> own = Failure(rank=1, kind="ValueError", error="ValueError: bad", time_ns=2)
        >>> [failure.rank for failure in by_cause([lost, own])]
        [1, 0]
    """
    return tuple(sorted(failures, key=lambda f: (distance(f), f.time_ns, f.rank)))


def describe(result: LaunchResult) -> str:
    """Describe how a launch ended, with the frames of the rank that failed first.

    Example:
        >>> from fxtrain.launchers import LaunchResult, Failure, describe
        >>> describe(LaunchResult(ranks=2, failures=(Failure(rank=1, code=-11),)))
        'Rank 1 of 2 was ended by SIGSEGV.'
    """
    if result.signal is not None:
        return f"Stopped by {_signal_name(result.signal)}."
    if not result.failures:
        if result.culprit or not result.left:
            return result.culprit or f"{result.ranks} ranks succeeded."
        if result.left < 0:
            return f"{result.launcher} was ended by {_signal_name(-result.left)}."
        return f"{result.launcher} exited with code {result.left}."
    first, *others = result.failures
    lines = [result.culprit] if result.culprit else []
    lines.append(one_line(first, result, most_lines=None))
    if first.traceback:
        lines.append(_frames(first))
    # Ranks that were stopped because of the first failure are omitted.
    lines += [
        one_line(other, result)
        for other in others
        if other.error or _own_code(other) or _was_killed(other)
    ]
    return "\n".join(lines)


def distance(failure: Failure) -> int:
    """How far a failure is from the cause.

    0 for an error of the rank's own, 1 for a lost peer, 2 for a rank that was ended from outside,
    3 for one that the launcher ended.
    A rank that aborts without an exception may have waited for a peer: NCCL's watchdog aborts a
    process whose collective times out.
    """
    if not failure.error:
        if failure.stopped:
            return 3
        if failure.code == -signal.SIGABRT:
            return 1
        return 0 if _own_code(failure) else 2
    quoted = _QUOTED_RANK.match(failure.error)
    lost = (
        failure.kind.startswith("torch.distributed.")
        or failure.kind.endswith(".CollectiveError")
        or _LOST_PEER.search(failure.error) is not None
        or (quoted is not None and int(quoted[1]) != failure.rank)
    )
    return int(lost)


def _own_code(failure: Failure) -> bool:
    ended = (None, 0, -signal.SIGTERM, -signal.SIGINT)
    return not failure.stopped and failure.code not in ended


def _was_killed(failure: Failure) -> bool:
    """Whether the launcher killed the rank, such as one for which the others waited in vain."""
    return failure.stopped and failure.code == -signal.SIGKILL


def _frames(failure: Failure) -> str:
    """The traceback without the message, and without fxtrain's frames below the user's call.

    An error from which fxtrain raised its own is shown where it has a frame of another file than
    fxtrain's and torch's.
    """
    text = failure.traceback.rstrip()
    if text.endswith(failure.error):
        text = text[: text.rfind("\n", 0, len(text) - len(failure.error)) + 1]
    if not is_own(failure):
        return text.rstrip()
    *causes, last = _CHAINED.split(text)
    start, *frames = re.split(r"^(?=  File )", last, flags=re.MULTILINE)
    while len(frames) > 1 and frames[-1].startswith(f'  File "{_PACKAGE}'):
        frames.pop()
    shown = [cause for cause in causes if _FILES_OF_OTHERS.search(cause)]
    return "".join((*shown, start, *frames)).rstrip()


def is_own(failure: Failure) -> bool:
    """Whether fxtrain raised the error, whose message says what to do without fxtrain's frames."""
    return failure.kind.startswith("fxtrain.")


def one_line(failure: Failure, result: LaunchResult, *, most_lines: int | None = 1) -> str:
    """How a rank failed; the first lines of its error."""
    who = f"Rank {failure.rank} of {result.ranks}" + (f" on {result.node}" if result.node else "")
    if failure.error:
        shown = "\n".join(failure.error.splitlines()[:most_lines])
        return f"{who} failed: {shown}"
    if _was_killed(failure):
        return (
            f"{who} was still running when another rank failed. It did not exit after SIGTERM, so "
            f"the launcher killed it."
        )
    if failure.code is None:
        return f"{who} failed."
    if failure.code >= 0:
        return f"{who} exited with code {failure.code}."
    text = f"{who} was ended by {_signal_name(-failure.code)}."
    if failure.code == -signal.SIGKILL:
        text += " " + (result.memory or _PERHAPS_MEMORY)
    if failure.code == -signal.SIGABRT:
        text += " " + _PERHAPS_WATCHDOG
    return text


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def count_memory_kills() -> int | None:
    """How often this machine's kernel has ended a process for memory; None if it does not count."""
    if not _KERNEL_COUNTERS.exists():
        return None
    match = re.search(r"^oom_kill (\d+)$", _KERNEL_COUNTERS.read_text(), re.MULTILINE)
    return int(match[1]) if match else None


def describe_memory_kills(before: int | None) -> str:
    """Why a rank was ended by SIGKILL, from the count when the launch began; empty if unknown."""
    after = count_memory_kills()
    if before is None or after is None:
        return ""
    return _MEMORY if after > before else _NOT_MEMORY


def find_failures(
    codes: Mapping[int, int], paths: Iterable[Path], *, stopped: Collection[int] = ()
) -> tuple[Failure, ...]:
    """What the launcher observed, and what ranks wrote in the format of `child.py`, combined.

    A rank that has written its end may still be closing, and is ended by the launcher meanwhile.
    `stopped` are ranks that had not written theirs when the launcher began to end them.
    """
    reports: dict[int, dict[str, Any]] = {}
    for path in paths:
        message = json.loads(path.read_text())["message"]
        if isinstance(message, dict):  # otherwise torch wrote it, for its own errors
            extra = message.get("extraInfo", {})
            reports[int(extra.get("rank", 0))] = {"error": message.get("message", ""), **extra}
    by_launcher = (-signal.SIGTERM, -signal.SIGKILL)
    ended = {rank: code for rank, code in codes.items() if code not in by_launcher}
    failures = [
        Failure(
            rank=rank,
            code=ended.get(rank, report.get("code", codes.get(rank))),
            kind=report.get("kind", ""),
            error=report.get("error", ""),
            traceback=report.get("py_callstack", ""),
            time_ns=int(report.get("time_ns", 0)),
            stopped=rank in stopped,
        )
        for rank in codes.keys() | reports.keys()
        for report in [reports.get(rank, {})]
    ]
    return by_cause(failures)


def keep_tracebacks(result: LaunchResult, folder: str) -> Path | None:
    """Write failures to RANK.txt for each rank, unless there is one that is printed as a whole.

    They are written to a fresh folder, which is returned, in `folder` or among temporary files.
    """
    written = [failure for failure in result.failures if failure.traceback]
    if len(written) < 2 and not any(map(is_own, written)):
        return None
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="tracebacks-", dir=folder or None))
    for failure in written:
        (place / f"{failure.rank}.txt").write_text(failure.traceback)
    return place
