"""Where ranks stand, read from the files that they wrote, and which of them stands apart."""

import json
import os
import pickle
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from fxtrain.errors import LaunchError
from fxtrain.ops.transport.exchange import HEADER, capacity
from fxtrain.ops.transport.mismatches import by_rank, ranges

ASK = "ask"  # whoever changes the time of this file asks all ranks
NO_PROGRESS = "no progress"  # how the reason for a record begins, if nobody asked for it
STARTED = "started"  # the reason for the first record, before any collective
REPORT = "stacks.txt"
DUMPS = "flight_recorder"  # a folder beside the report
SILENT = "no answer"  # how it begins, if the stacks are older than the question
SPIED = "py-spy"
_FIELDS = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_THREAD = re.compile(r"(?:Current t|T)hread (0x[0-9a-f]+)")
_OURS = str(Path(__file__).resolve().parents[1])
_LIBRARIES = (_OURS, sysconfig.get_paths()["stdlib"], "<")
# Where a rank waits for others: frames of libraries, by the end of their file, and their function.
_WAITS = (
    ("fxtrain/ops/transport/exchange.py", ""),
    ("torch/autograd/graph.py", "_engine_run_backward"),
    ("torch/distributed/", ""),
)
_STARTS = ("fxtrain/launchers/child.py", "<frozen runpy>")  # frames below those of the script
_RECORDED = {  # fields of a record that are read here
    *("rank", "world_size", "host", "pid", "process_start", "signal", "main_thread", "why", "time"),
    *("asked", "timeout_ms", "models", "calls", "torch_calls"),
}
_FORMAT = "2.10"  # of torch's Flight Recorder, in torch 2.13
_SHOWN, _GROUPS = 12, 4  # frames of a stack, stacks
_POLL_S = 0.1


@attrs.frozen
class Frame:
    """A line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@attrs.frozen(kw_only=True)
class Stand:
    """Where a rank stands: its record, and the stack of its main thread, innermost first.

    A record has the fields of `standing.py`, or of `diagnosis/flight_recorder.py`.
    """

    rank: int
    record: dict[str, Any]
    stack: tuple[Frame, ...]

    @property
    def line(self) -> Frame | None:
        """The innermost line of the script: the innermost that is in no library."""
        own = (frame for frame in self.stack if not _is_library(frame.file))
        return next(own, self.stack[0] if self.stack else None)

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks: by its stack, unless the record says so."""
        if "waits" in self.record:
            return self.record["waits"]
        return any(
            end in frame.file and function in frame.function
            for frame in self.stack[:6]
            for end, function in _WAITS
        )

    @property
    def call(self) -> str:
        """The collective that it has started and not completed; empty if none."""
        for axis, calls in self.record["calls"].items():
            number, op, args, _ = calls["last"][-1]
            if number > calls["completed"]:
                return f"{op}({args}), call {number} of {axis}"
        return ""


def record_path(folder: Path, rank: int) -> Path:
    """The record of a rank; its stacks have the same name with another suffix."""
    return folder / f"rank-{rank}.json"


def process_start(pid: int) -> str:
    """When a process started, in the kernel's ticks: a later one of its number has another start.

    Empty where there is no such process, or the system does not say.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def has_records(folder: Path) -> bool:
    """Whether ranks have written into this folder."""
    return bool(_records(folder))


def _records(folder: Path) -> list[Path]:
    """The files of ranks in this folder; of text that is no path, none, where `glob` may raise."""
    return list(folder.glob("rank-*.json")) if folder.is_dir() else []


def read_stands(folder: Path) -> list[Stand]:
    """Where ranks stood when they last wrote it, by rank; a LaunchError if none has."""
    paths = sorted(_records(folder), key=lambda path: (len(path.name), path.name))
    if not paths:
        raise LaunchError(
            f"{folder} has no records of ranks. Pass the folder of fxtrain launch --log-dir, or of "
            f"the variable FXTRAIN_STACKS, into which ranks write once fx.detect has connected "
            f"them; or, after a hang, the folder of the run."
        )
    stands = [_read(path) for path in paths]
    last = max(stands, key=lambda stand: stand.record["time"])  # an earlier attempt had other ranks
    return [stand for stand in stands if stand.rank < last.record["world_size"]]


def _read(path: Path) -> Stand:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if missing := sorted(_RECORDED - record.keys()):
            raise ValueError(
                f"it has no {', '.join(missing)}. If another version of fxtrain wrote it, use that "
                f"version"
            )
        stacks = _threads(path.with_suffix(".stacks").read_text(encoding="utf-8", errors="replace"))
        main = stacks.get(int(record["main_thread"]), ())
        stack = tuple(frame for frame in main if not frame.file.endswith(_STARTS))
        return Stand(rank=int(record["rank"]), record=record, stack=stack)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise LaunchError(f"{path} is not a record of a rank: {error}.") from error


def _threads(text: str) -> dict[int, tuple[Frame, ...]]:
    """By thread, its stack; that of the last time, if it was written several times."""
    stacks: dict[int, tuple[Frame, ...]] = {}
    thread = 0
    for line in text.splitlines():
        if head := _THREAD.match(line):
            thread = int(head[1], 16)
            stacks[thread] = ()
        elif (frame := _FIELDS.match(line)) and thread:
            stacks[thread] += (Frame(frame[1], int(frame[2]), frame[3]),)
    return stacks


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or "site-packages" in file


def groups_of(stands: Iterable[Stand]) -> list[list[Stand]]:
    """Ranks with equal stacks, the groups that stand apart first.

    Ranks that wait for others come last, and so do those of which there are more.
    """
    groups: dict[tuple[Any, ...], list[Stand]] = {}
    for stand in stands:
        groups.setdefault((stand.stack, stand.waits), []).append(stand)
    return sorted(groups.values(), key=lambda group: (group[0].waits, len(group), group[0].rank))


def describe_stacks(stands: Sequence[Stand]) -> str:
    """Which ranks stand apart, in which line; where the others wait; and the stacks of both."""
    groups = groups_of(stands)
    hosts = {stand.rank: stand.record["host"] for stand in stands}
    hosts = hosts if len(set(hosts.values())) > 1 else {}
    apart = len(groups) > 1 and (not groups[0][0].waits or len(groups[0]) < len(groups[-1]))
    size = stands[0].record["world_size"]
    lines = [f"{len(stands)} of {size} ranks wrote where they stand:"]
    for number, group in enumerate(groups):
        odd = apart and number == 0
        # The Flight Recorder only has the lines in which collectives started.
        at = "last seen at" if "last" in group[0].record and not group[0].waits else "at"
        place = f"apart from the others, {at}" if odd else "waiting at" if group[0].waits else at
        lines += by_rank(((stand.rank, f"{place} {_described(stand)}") for stand in group), hosts)
    for group in (group for group in groups[:_GROUPS] if group[0].stack):
        lines.append(f"Stack of rank {group[0].rank} ({len(group)} with the same), innermost last:")
        lines += [f"    {frame}" for frame in reversed(_shortened(group[0].stack))]
    missing = sorted(set(range(size)) - {stand.rank for stand in stands})
    if missing:
        lines.append(f"No record of ranks {ranges(missing)} is in this folder.")
    lines += by_rank(
        (stand.rank, f"the stack is an older one; {stand.record['why']}")
        for stand in stands
        if stand.record["why"].startswith(SILENT)
    )
    return "\n".join(lines)


def _shortened(stack: Sequence[Frame]) -> list[str]:
    """The innermost frames of a stack, and those of the script, which may be far from them."""
    own = [number for number, frame in enumerate(stack) if not _is_library(frame.file)]
    kept = sorted({*range(min(_SHOWN, len(stack))), *own[:_SHOWN]})
    shown: list[str] = []
    for number, before in zip(kept, [-1, *kept], strict=False):
        if gap := number - before - 1:
            shown.append(f"({gap} more of libraries)")
        shown.append(str(stack[number]))
    return shown


def _described(stand: Stand) -> str:
    updates = [model["updates"] for model in stand.record["models"]]
    facts = [f"after {max(updates)} updates"] if updates else []
    if stand.waits:
        facts.append(f"in {stand.call or stand.stack[0].function}")
    elif "last" in stand.record:
        facts.append(f"in {stand.record['last']}")
    return ", ".join([str(stand.line or "an unknown line"), *facts])


def write_report(folder: Path, stands: Sequence[Stand]) -> str:
    """Write which rank stands apart, and all collectives for `torchfrtrace`.

    Returns the report's text.
    """
    text = describe_stacks(stands)
    (folder / REPORT).write_text(text, encoding="utf-8")
    write_dumps(folder / DUMPS, stands)
    return text


def write_dumps(folder: Path, stands: Iterable[Stand]) -> None:
    """Write the collectives of ranks in the format of torch's Flight Recorder, one file per rank.

    A collective of fxtrain is one all-gather of packets of one size, in a group of its name. The
    frames of one that has not completed are those where its rank stands. A rank that could not
    write its collectives, since C code holds the interpreter's lock, or it is stopped, gets no
    file.
    """
    entries = {
        stand.rank: _entries(stand)
        for stand in stands
        if not stand.record["why"].startswith((STARTED, SPIED, SILENT))
    }
    # Calls that some rank has forgotten would seem to be missing there.
    first: dict[tuple[Any, ...], int] = {}
    for calls in entries.values():
        oldest = {_group_of(call): call["collective_seq_id"] for call in reversed(calls)}
        for group, number in oldest.items():
            first[group] = max(first.get(group, 0), number)
    shutil.rmtree(folder, ignore_errors=True)  # an earlier attempt had other ranks
    folder.mkdir()
    for rank, calls in entries.items():
        known = [call for call in calls if call["collective_seq_id"] >= first[_group_of(call)]]
        groups = {
            name: {"name": name, "desc": desc, "ranks": str(list(ranks))}
            for name, desc, ranks in dict.fromkeys(map(_group_of, calls))
        }
        dump = {
            "version": _FORMAT,
            "comm_lib_version": "",
            "pg_config": groups,
            "entries": [call | {"record_id": number} for number, call in enumerate(known)],
        }
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump))


def _group_of(call: dict[str, Any]) -> tuple[str, str, tuple[int, ...]]:
    name, desc = call["process_group"]
    return name, desc, tuple(call["ranks"])


def _entries(stand: Stand) -> list[dict[str, Any]]:
    """The collectives of a rank as the Flight Recorder has them: those of fxtrain, then torch's."""
    frames = [
        {"name": frame.function, "filename": frame.file, "line": frame.line}
        for frame in stand.stack
    ]
    entries: list[dict[str, Any]] = []
    for number, (axis, calls) in enumerate(stand.record["calls"].items()):
        size = HEADER + capacity(len(calls["ranks"]))
        for sequence, op, _, started_ns in calls["last"]:
            done = sequence <= calls["completed"]
            entries.append(
                {
                    "frames": [] if done else frames,
                    "pg_id": number,
                    "process_group": (f"fxtrain-{axis}", axis),
                    "ranks": calls["ranks"],
                    "collective_seq_id": sequence,
                    "p2p_seq_id": 0,
                    "op_id": sequence,
                    "profiling_name": f"gloo:all_gather {op}",
                    "time_created_ns": started_ns,
                    "input_sizes": [[size]],
                    "input_dtypes": ["Byte"],
                    "output_sizes": [[size * len(calls["ranks"])]],
                    "output_dtypes": ["Byte"],
                    "state": "completed" if done else "started",
                    "time_discovered_started_ns": started_ns,
                    "time_discovered_completed_ns": None,
                    "retired": done,
                    "timeout_ms": stand.record["timeout_ms"],
                    "is_p2p": False,
                }
            )
    return entries + stand.record["torch_calls"]


def unreported(folder: Path) -> str:
    """What a launcher reports of failed ranks, if rank 0 could not; otherwise empty."""
    if not has_records(folder):
        return ""
    stands, report = read_stands(folder), folder / REPORT
    silent = [stand for stand in stands if stand.record["why"].startswith(NO_PROGRESS)]
    if not silent or (report.exists() and report.stat().st_mtime >= silent[0].record["time"]):
        return ""
    return write_report(folder, stands)


def ask(folder: Path, *, patience_s: float = 3.0) -> list[Stand]:
    """Ask all ranks of a run where they stand, without stopping them; wait `patience_s` at most.

    Changes the time of a file, which ranks look at. Ranks of this machine that do not answer,
    because C code holds the interpreter's lock, get SIGUSR2 if `faulthandler` answers it. Of those
    that do not answer either, because their process is stopped or handles the signal itself,
    py-spy writes the stacks if it is installed.
    """
    read_stands(folder)
    (folder / ASK).touch()
    asked = (folder / ASK).stat().st_mtime
    deadline = time.monotonic() + patience_s
    stands = read_stands(folder)
    while time.monotonic() < deadline and any(stand.record["asked"] != asked for stand in stands):
        time.sleep(_POLL_S)
        stands = read_stands(folder)
    silent = [stand.record for stand in stands if stand.record["asked"] != asked]
    silent = [record for record in silent if _is_here(record)]
    signaled = [record for record in silent if record["signal"]]
    for record in signaled:
        os.kill(record["pid"], signal.SIGUSR2)
    paths = [record_path(folder, record["rank"]) for record in signaled]
    wait_for_stacks(paths, asked, patience_s)
    for record in silent:
        path = record_path(folder, record["rank"])
        if path.with_suffix(".stacks").stat().st_mtime < asked:
            _spy(path, record)
    stands = read_stands(folder)
    write_report(folder, stands)
    return stands


def wait_for_stacks(records: Sequence[Path], since: float, patience_s: float) -> None:
    """Wait until stacks have been written after a time and no longer grow; `patience_s` at most.

    Frame by frame, `faulthandler` writes into a file that others read.
    """
    late = [path.with_suffix(".stacks") for path in records]
    sizes: dict[Path, int] = {}
    deadline = time.monotonic() + patience_s
    while late and time.monotonic() < deadline:
        time.sleep(2 * _POLL_S)
        found = {path: path.stat() for path in late}
        before = sizes
        sizes = {path: stat.st_size for path, stat in found.items() if stat.st_mtime >= since}
        late = [path for path in late if path not in sizes or sizes[path] != before.get(path)]


def _is_here(record: dict[str, Any]) -> bool:
    """Whether the process of a rank is one of this machine, and the rank has not ended."""
    here = record["host"] == platform.node()
    return here and record["process_start"] == process_start(record["pid"]) != ""


def _spy(path: Path, record: dict[str, Any]) -> None:
    """Write the stacks of a process that cannot write them; or in its record, why that failed."""
    beside = str(Path(sys.executable).parent)
    program = shutil.which("py-spy", path=beside) or shutil.which("py-spy")
    if program is None:
        problem = "py-spy is not installed (pip install py-spy)"
    else:
        # Without pausing the process, since py-spy cannot pause one that is stopped.
        words = [program, "dump", "--json", "--nonblocking", "--pid", str(record["pid"])]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        problem = done.stderr.strip().splitlines()[0] if done.returncode else ""
        if not problem:
            text = "".join(
                f"Thread {thread['thread_id']:#x}\n"
                + "".join(
                    f'  File "{frame["filename"]}", line {frame["line"]} in {frame["name"]}\n'
                    for frame in thread["frames"]
                )
                for thread in json.loads(done.stdout)
            )
            path.with_suffix(".stacks").write_text(text, encoding="utf-8")
    why = f"{SILENT}: {problem}" if problem else SPIED
    new = path.with_suffix(".spy")
    new.write_text(json.dumps({**record, "why": why}))
    new.replace(path)
