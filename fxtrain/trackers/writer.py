"""A background thread per tracker, so that neither training nor other trackers wait for it."""

import logging
import queue
import threading
import time
from collections import Counter
from typing import Any

import attrs

from fxtrain._record import shown
from fxtrain.trackers.entries import Logged
from fxtrain.trackers.tracker import Start, Tracker

_LOG = logging.getLogger("fxtrain.trackers")
# Between two looks at a queue that is being filled. `put` wakes a thread that waits for an entry,
# which takes the training thread longer than all else that it does for a tracker.
_PAUSE_S = 0.1


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
    _queue: "queue.Queue[Any]" = attrs.field(init=False)
    _awaited: threading.Event = attrs.field(factory=threading.Event, init=False)
    _is_stuck: bool = attrs.field(default=False, init=False)  # nobody waits for it again
    _ends: bool = attrs.field(default=False, init=False)
    _ended: threading.Event = attrs.field(factory=threading.Event, init=False)
    _warn: Warn = attrs.field(factory=Warn, init=False)
    _lost: "Counter[str]" = attrs.field(factory=Counter, init=False)
    _last_steps: dict[str, int] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._queue = queue.Queue(self.patience.entries)
        # A daemon: a tracker that hangs must not keep the process from exiting.
        name = f"fxtrain {self.tracker.name}"
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def put(self, entry: Logged | threading.Event | bool) -> bool:  # noqa: FBT001
        """Queue an entry, an event to set then, or the end and whether the run failed.

        Returns:
            Whether there was room for it.
        """
        try:
            self._queue.put(entry, block=not self._is_stuck, timeout=self.patience.full_s)
            return True
        except queue.Full:
            self._is_stuck = True
        self._warn(
            "stuck",
            f"{self.tracker.name} wrote none of {self.patience.entries} waiting entries "
            f"in {self.patience.full_s:g} s. Training continues; entries beyond these are "
            f"lost to this tracker. Check whether its disk or server responds.",
        )
        if isinstance(entry, Logged):
            self._lost[entry.kind] += 1
        return False

    def flush(self, until: float) -> bool:
        """Wait until everything so far is written; False if that took too long.

        Args:
            until: Time of `time.monotonic` at which to give up.
        """
        done = threading.Event()
        if self._is_stuck or not self.put(done):
            return False
        self._awaited.set()
        if done.wait(max(0.0, until - time.monotonic())):
            return True
        self._is_stuck = True
        self._warn(
            "flush",
            f"{self.tracker.name} did not write everything within "
            f"{self.patience.flush_s:g} s: {self._behind()} Training does not wait for it again.",
        )
        return False

    def end(self, *, failed: bool) -> None:
        """Request the end: queued entries are written, then the tracker is closed."""
        if not self._ends:
            self._ends = True
            self.put(failed)
            self._awaited.set()

    def close(self, until: float, *, failed: bool) -> None:
        """Wait for the end until a time of `time.monotonic`, and report lost entries."""
        self.end(failed=failed)
        if not self._ended.wait(max(0.0, until - time.monotonic())):
            self._warn("close", f"{self.tracker.name} was not closed: {self._behind()}")
        elif self.tracker.closed_by_caller:
            self._call("close", self.tracker.close, self.native, failed)
        if lost := sum(self._lost.values()):
            what = ", ".join(f"{count} of {kind}" for kind, count in sorted(self._lost.items()))
            self._warn("lost", f"{self.tracker.name} lost {lost} entries of this run: {what}.")

    def _work(self) -> None:
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
