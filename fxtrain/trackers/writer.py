"""A background thread per tracker, so that neither training nor other trackers wait for it."""

import contextlib
import logging
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import attrs

from fxtrain._record import shown
from fxtrain.trackers.entries import Logged
from fxtrain.trackers.tracker import Start, Tracker

_LOG = logging.getLogger("fxtrain.trackers")
# Between two looks at a queue that is being filled. `put` wakes a thread that waits for an entry,
# which takes the training thread longer than all else that it does for a tracker.
_PAUSE_S = 0.1
_POLL_S = 0.001  # while training waits for room


@attrs.frozen
class Warn:
    """Warnings, each logged once."""

    _told: set[str] = attrs.field(factory=set, init=False)

    def __call__(self, key: str, text: str) -> None:
        """Warn, unless a warning with this key was logged before."""
        if key not in self._told:
            self._told.add(key)
            _LOG.warning("%s", text)


@attrs.frozen(kw_only=True)
class Patience:
    """How long training waits for a tracker.

    Attributes:
        entries: Maximum entries waiting to be written.
        full_s: Seconds that training waits for a tracker with this many entries, once.
        flush_s: Seconds that `state` and `flush` wait until everything is written.
        close_s: Seconds that the end of a run waits for it.
    """

    entries: int = 10_000
    full_s: float = 10.0
    flush_s: float = 30.0
    close_s: float = 120.0


@attrs.define(kw_only=True, eq=False)
class Writer:
    """One opened tracker and the thread that calls it.

    Attributes:
        tracker: Its functions.
        native: The result of its `open`.
        identity: The library's id of the run.
        start: What it was opened with.
        patience: How long others wait for it.
    """

    tracker: Tracker
    native: Any
    identity: str
    start: Start
    patience: Patience = Patience()
    _queue: "queue.SimpleQueue[Any]" = attrs.field(factory=queue.SimpleQueue, init=False)
    _awaited: threading.Event = attrs.field(factory=threading.Event, init=False)
    _stuck: threading.Event = attrs.field(factory=threading.Event, init=False)
    _ended: threading.Event = attrs.field(factory=threading.Event, init=False)
    _warn: Warn = attrs.field(factory=Warn, init=False)
    _lost: "Counter[str]" = attrs.field(factory=Counter, init=False)
    _last_steps: dict[str, int] = attrs.field(factory=dict, init=False)

    def put(self, entry: Logged | threading.Event | bool) -> bool:  # noqa: FBT001
        """Queue an entry, an event to set then, or the end and whether the run failed.

        Returns:
            Whether there was room for it.
        """
        if self._queue.qsize() >= self.patience.entries and not self._wait(entry):
            return False
        self._queue.put(entry)
        return True

    def flush(self, until: float) -> bool:
        """Wait until everything so far is written; False if that took too long.

        Args:
            until: Time of `time.monotonic` at which to give up.
        """
        done = threading.Event()
        if self._stuck.is_set() or not self.put(done):
            return False
        self._awaited.set()
        if done.wait(max(0.0, until - time.monotonic())):
            return True
        self._stuck.set()
        self._warn(
            "flush",
            f"{self.tracker.name} did not write everything within "
            f"{self.patience.flush_s:g} s: {self._behind()} Training does not wait for it again.",
        )
        return False

    def end(self, *, failed: bool) -> None:
        """Request the end: queued entries are written, then the tracker is closed."""
        if not self.put(failed):
            self._warn("close", f"{self.tracker.name} was not closed: {self._behind()}")
        self._awaited.set()

    def wait(self, until: float, *, failed: bool) -> None:
        """Wait for the end, and report lost entries."""
        if not self._ended.wait(max(0.0, until - time.monotonic())):
            self._warn("close", f"{self.tracker.name} was not closed: {self._behind()}")
        elif self.tracker.closed_by_caller:
            self._call("close", self._close, until, failed)
        if lost := sum(self._lost.values()):
            what = ", ".join(f"{count} of {kind}" for kind, count in sorted(self._lost.items()))
            self._warn("lost", f"{self.tracker.name} lost {lost} entries of this run: {what}.")

    def _close(self, until: float, failed: bool) -> None:  # noqa: FBT001
        with _time_limit(until):
            self.tracker.close(self.native, failed)

    def work(self) -> None:
        """Write entries in order until the end."""
        if self.start.resumed:
            self._recall()
        while True:
            entry = self._queue.get()
            if isinstance(entry, Logged):
                self._write(entry)
            elif isinstance(entry, threading.Event):
                self._call("flush", self.tracker.flush, self.native)
                entry.set()
            else:
                if not self.tracker.closed_by_caller:
                    self._call("close", self.tracker.close, self.native, entry)
                self._ended.set()
                return
            if self._queue.empty():
                self._awaited.wait(_PAUSE_S)
                self._awaited.clear()

    def _recall(self) -> None:
        """Find out which entries the library has already, if it cannot remove them."""
        try:
            self._last_steps.update(self.tracker.last_steps(self.native, self.start))
        except BaseException as error:  # any error of a library: training continues
            self._warn(
                "last_steps",
                f"{self.tracker.name} cannot tell which entries it has of this run: "
                f"{type(error).__name__}: {error}. Those after the position where the run resumed "
                f"may appear twice there.",
            )

    def _wait(self, entry: Any) -> bool:
        """Whether there is room now; nobody waits a second time for a tracker that made none."""
        if not self._stuck.is_set():
            until = time.monotonic() + self.patience.full_s
            while time.monotonic() < until:
                self._awaited.set()
                time.sleep(_POLL_S)
                if self._queue.qsize() < self.patience.entries:
                    return True
            self._stuck.set()
            self._warn(
                "stuck",
                f"{self.tracker.name} wrote none of {self.patience.entries} waiting entries "
                f"in {self.patience.full_s:g} s. Training continues; entries beyond these are "
                f"lost to this tracker. Check whether its disk or server responds.",
            )
        if isinstance(entry, Logged):
            self._lost[entry.kind] += 1
        return False

    def _behind(self) -> str:
        return (
            f"about {self._queue.qsize()} entries are waiting. Check whether its disk or "
            f"server responds."
        )

    def _write(self, logged: Logged) -> None:
        kind = logged.kind
        if kind not in self.tracker.kinds:
            text = f"{self.tracker.name} does not support run.{kind}. The other trackers log these "
            self._warn(f"kind {kind}", f"{text}entries.")
            return
        entry = logged.entry()
        if entry is None:
            return
        if kind == "log":
            values = {name: x for name, x in entry.value.items() if self._accepts(name, entry.step)}
            entry = attrs.evolve(entry, value=values)
            if not values:
                return
        elif kind != "params" and not self._accepts(entry.name, entry.step):
            return
        if not self._call(kind, self.tracker.write, self.native, entry):
            self._lost[kind] += 1

    def _accepts(self, name: str, step: int) -> bool:
        if step <= self._last_steps.get(name, -1):
            self._warn(
                "repeated",
                f"{self.tracker.name} cannot remove the entries after the position where the run "
                f"resumed, so it keeps those that it has, up to step "
                f"{max(self._last_steps.values())}. They are not written to it again.",
            )
            return False
        why = self.tracker.refuses(name)
        if why:
            self._warn(
                f"name {name}",
                f"{self.tracker.name} does not accept the name {shown(name)}: {why}. Its values "
                f"are skipped there; the other trackers log them. Use another name.",
            )
        return not why

    def _call(self, what: str, function: Any, *arguments: Any) -> bool:
        try:
            function(*arguments)
            return True
        except BaseException as error:  # any error of a library: training continues
            text = f"{type(error).__name__}: {error}".rstrip(": .")
            self._warn(
                f"failed {what}",
                f"{self.tracker.name} failed in {what}: {text[:500]}. Training continues, and the "
                f"other trackers have the entry; further failures of this kind are counted.",
            )
            return False


@contextlib.contextmanager
def _time_limit(until: float) -> Iterator[None]:
    """Raise TimeoutError in a block that takes longer; only in the main thread, on POSIX."""

    def give_up(*_: Any) -> None:
        raise TimeoutError("it did not end in time. Check whether its disk or server responds")

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "SIGALRM"):
        yield
        return
    started = time.monotonic()
    before = signal.signal(signal.SIGALRM, give_up)
    alarm_s, _ = signal.setitimer(signal.ITIMER_REAL, max(0.001, until - started))
    try:
        yield
    finally:  # the program's own alarm goes on
        rest = max(0.001, alarm_s - (time.monotonic() - started)) if alarm_s else 0
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, rest)


def start_writer(
    tracker: Tracker, native: Any, identity: str, start: Start, patience: Patience
) -> Writer:
    """A writer with a running thread."""
    writer = Writer(
        tracker=tracker, native=native, identity=identity, start=start, patience=patience
    )
    # A daemon: a tracker that hangs must not keep the process from exiting.
    threading.Thread(target=writer.work, name=f"fxtrain {tracker.name}", daemon=True).start()
    return writer
