"""Where each rank stands, in files: written when a run makes no progress, or when someone asks.

A thread of each rank looks at the rank's own counters a few times per second: updates, and
collectives started and completed. Steps and collectives do nothing for it. If nothing has changed
for most of the context's timeout, it writes the Python stacks of all threads and what the rank was
doing. A thread of Python cannot run while C code holds the interpreter's lock, so `faulthandler`,
which needs no lock, then writes the stacks: after a time that starts again with each sign of
progress, and at the signal SIGUSR2, unless the script handles it.
"""

import faulthandler
import json
import os
import pickle
import platform
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fxtrain._host_memory import process_memory
from fxtrain.diagnosis.stacks import (
    ASK,
    NO_PROGRESS,
    STARTED,
    process_start,
    read_stands,
    record_path,
    wait_for_stacks,
    write_report,
)
from fxtrain.ops.closing import within
from fxtrain.ops.standing import FOLDER, RunFolder, Windows
from fxtrain.ops.transport.exchange import CallState
from fxtrain.state import AccumulationWindow, Comm, DistContext

_TICK_S = 0.2
_SHARE = 0.75  # of the timeout of collectives, so that ranks write before they fail
_PATIENCE_S = 5.0  # for the other ranks to write, before rank 0 compares them; less before it fails
_STORE_S = 1.0
_ARM_S = 2.0  # less than rank 0 waits, by which stacks of a locked rank may come later
_TORCH_CALLS = 64  # the last ones of a rank
_SILENT = NO_PROGRESS + " for {:.0f} s"


def watch_standing(ctx: DistContext, folder: str) -> None:
    """Write where this rank stands into a folder, when it makes no progress or is asked.

    Starts a thread until the context closes. Registers `faulthandler` for SIGUSR2 in the main
    thread, unless the signal has a handler.
    """
    watch = _Watch(ctx, Path(folder))
    ctx.comm.state.at_close.append(watch.stop)
    watch.start()


class _Watch(threading.Thread):
    def __init__(self, ctx: DistContext, folder: Path) -> None:
        super().__init__(name="fxtrain-standing", daemon=True)
        self._ctx = ctx
        self._folder = folder
        self._stopped = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._path = record_path(folder, ctx.rank)
        # Appended to, so that what faulthandler writes begins where the file was cut to.
        flags = os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_WRONLY
        self._stacks = os.open(self._path.with_suffix(".stacks"), flags, 0o600)
        self._bound_s = _SHARE * ctx.comm.timeout_s
        self._signal = _answers_signal(self._stacks)
        self._asked = _written_at(folder / ASK)
        self._armed = 0.0
        self._write_record(STARTED)

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        faulthandler.cancel_dump_traceback_later()
        if self._signal:
            faulthandler.unregister(signal.SIGUSR2)
        os.close(self._stacks)

    def run(self) -> None:
        seen, since, written = self._progress(), time.monotonic(), False
        size = self._arm()
        while not self._stopped.wait(_TICK_S):
            asked, now = _written_at(self._folder / ASK), self._progress()
            if os.fstat(self._stacks).st_size != size:
                self._write_record("signal")
            if now != seen:
                seen, since, written = now, time.monotonic(), False
                self._arm()
            elif not written and time.monotonic() - since > self._bound_s:
                written = True
                self._write(_SILENT.format(time.monotonic() - since))
                if self._ctx.is_main:
                    self._report()
            if asked != self._asked:
                self._asked = asked
                self._write("asked")
            size = os.fstat(self._stacks).st_size

    def _progress(self) -> tuple[object, ...]:
        calls = [(state.count, state.completed) for _, state in self._states()]
        return (calls, *((window.updates, window.micro) for window in self._windows()))

    def _arm(self) -> int:
        """Have stacks written if this thread cannot do it; bytes in their file now."""
        every_s = min(_ARM_S, self._bound_s / 20)  # each time starts a thread of C
        if time.monotonic() - self._armed >= every_s:
            self._armed = time.monotonic()
            late_s = self._bound_s + every_s + 2 * _TICK_S
            faulthandler.dump_traceback_later(late_s, file=self._stacks)
        return os.fstat(self._stacks).st_size

    def _write(self, why: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._armed = 0.0
        os.ftruncate(self._stacks, 0)
        faulthandler.dump_traceback(self._stacks)
        self._write_record(why)
        within(_STORE_S, self._publish)

    def _publish(self) -> None:
        """Give the record to rank 0, which may not see this folder."""
        if self._ctx.num_nodes > 1 and not self._ctx.is_main:
            stacks = self._path.with_suffix(".stacks").read_text()
            text = json.dumps([self._path.read_text(), stacks])
            self._ctx.comm.store.set(f"stands/{self._ctx.rank}", text)

    def _report(self) -> None:
        """Compare where all ranks stand, once they have written it, and print it."""
        paths = [record_path(self._folder, rank) for rank in range(self._ctx.world_size)]
        here = [path for path in paths if path.exists()]
        left_s = _SHARE * (self._ctx.comm.timeout_s - self._bound_s)
        wait_for_stacks(here, time.time() - self._bound_s, min(_PATIENCE_S, left_s))
        if self._ctx.num_nodes > 1:
            within(_PATIENCE_S, self._receive)
        text = write_report(self._folder, read_stands(self._folder))
        text += self._kept()
        sys.stderr.write(f"fxtrain: no progress for {self._bound_s:.0f} s. {text}\n")
        sys.stderr.flush()

    def _kept(self) -> str:
        """Copy what ranks have written into the folder of the run; how to show it again."""
        run = self._ctx.comm.slot(RunFolder).path
        if not run:
            return ""
        stacks = Path(run, FOLDER)
        try:
            if not stacks.exists() or not stacks.samefile(self._folder):
                drafts = shutil.ignore_patterns("*.new")
                shutil.copytree(self._folder, stacks, ignore=drafts, dirs_exist_ok=True)
        except OSError as error:  # a full disk, say: the run may still continue
            return f"\nThis is not kept in {stacks}: {error}"
        return f"\nTo print this again: fxtrain diagnose {shlex.quote(run)}"

    def _receive(self) -> None:
        for rank in range(1, self._ctx.world_size):
            path, key = record_path(self._folder, rank), f"stands/{rank}"
            if not path.exists() and self._ctx.comm.store.check([key]):
                record, stacks = json.loads(self._ctx.comm.store.get(key))
                path.write_text(record)
                path.with_suffix(".stacks").write_text(stacks)

    def _states(self) -> list[tuple[Comm, CallState]]:
        """The collectives of the context, and of its axes."""
        comms = {id(ctx.comm): ctx.comm for ctx in (self._ctx, *self._ctx._axes.values())}
        return [(comm, comm.slot(CallState)) for comm in comms.values()]

    def _windows(self) -> list[AccumulationWindow]:
        return list(self._ctx.comm.slot(Windows))

    def _write_record(self, why: str) -> None:
        calls = {
            comm.name: {
                "ranks": comm.ranks,
                "completed": state.completed,
                "last": [[n, *call[:2], at] for n, call, at in recent],
            }
            for comm, state in self._states()
            if (recent := tuple(state.recent))
        }
        record: dict[str, Any] = {
            "rank": self._ctx.rank,
            "world_size": self._ctx.world_size,
            "host": platform.node(),
            "pid": os.getpid(),
            "process_start": process_start(os.getpid()),
            "signal": self._signal,
            "main_thread": threading.main_thread().ident,
            "why": why,
            "time": time.time(),
            "asked": self._asked,
            "timeout_ms": round(self._ctx.comm.timeout_s * 1000),
            "models": [
                {"updates": window.updates, "micro": window.micro} for window in self._windows()
            ],
            "calls": calls,
            "torch_calls": _torch_calls([comm for comm, _ in self._states()]),
            "host_memory_bytes": process_memory()[0],
            "device_memory_bytes": _device_memory(self._ctx.device),
        }
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(record))
        new.replace(self._path)


def _torch_calls(comms: Sequence[Comm]) -> list[dict[str, Any]]:
    """The last collectives of strategies, if torch's Flight Recorder is on: TORCH_FR_BUFFER_SIZE.

    Those of the groups in which fxtrain compares calls are left out, and messages of two ranks.
    """
    ranks = {comm.group.group_name: comm.ranks for comm in comms if comm.group is not None}
    c10d: Any = torch._C._distributed_c10d  # pyright: ignore
    calls = [
        entry | {"ranks": ranks[entry["process_group"][0]]}
        for entry in pickle.loads(c10d._dump_fr_trace()).get("entries", ())
        if entry["process_group"][0] in ranks and not entry["is_p2p"]
    ]
    return calls[-_TORCH_CALLS:]


def _answers_signal(stacks: int) -> bool:
    """Have faulthandler answer SIGUSR2, which ends a process otherwise."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if not hasattr(signal, "SIGUSR2") or signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        return False
    faulthandler.register(signal.SIGUSR2, stacks)
    return True


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _device_memory(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
