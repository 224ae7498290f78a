"""The background thread that writes what a run logs, so that training never waits for a tracker."""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import attrs

from fxtrain._record import shown
from fxtrain.trackers.tracker import Entry, Start, Tracker

_LOG = logging.getLogger("fxtrain.trackers")
_MOST_ENTRIES = 10_000  # that wait to be written
# Between two looks at a queue that is being filled. `put` wakes a thread that waits for an entry,
# which takes the training thread longer than all else that it does for a tracker.
_PAUSE_S = 0.1


@attrs.define(kw_only=True, eq=False)
class OpenedTracker:
    """A tracker of a run, what its `open` returned, and what it was opened with."""

    tracker: Tracker
    native: Any
    start: Start
    last_steps: Mapping[str, int] = attrs.field(factory=dict)  # that a resumed run has there
    lost: int = 0  # entries that it could not write
    is_dropped: bool = False  # it held up the others, and is not called again

    def recall(self, native: Any) -> None:
        """Find out which entries the library has already, if it cannot remove them."""
        self.last_steps = self.tracker.last_steps(native, self.start)

    def write(self, native: Any, entry: Entry, warn: Callable[[str, str], None]) -> None:
        """Write an entry without names that the library refuses, and without what it has."""
        called, kept = self.tracker.name, list[str]()
        names = entry.value if entry.kind == "log" else (entry.name,)
        for name in names:
            if entry.step <= self.last_steps.get(name, -1):
                warn(
                    f"repeated {called}",
                    f"{called} cannot remove the entries after the position where the run resumed. "
                    f"It keeps those that it has, and they are not written to it again.",
                )
            elif why := self.tracker.refuses(name):
                warn(
                    f"name {called} {name}",
                    f"{called} does not accept the name {shown(name)}: {why}. Its values are "
                    f"skipped there; the other trackers log them. Use another name.",
                )
            else:
                kept.append(name)
        if kept and len(kept) < len(names):
            entry = attrs.evolve(entry, value={name: entry.value[name] for name in kept})
        if kept:
            self.tracker.write(native, entry)


# A call of a function of a tracker: what it is for, the function, and its arguments after `native`.
_Call = tuple[OpenedTracker, str, Callable[..., object], tuple[Any, ...]]


class Writer:
    """The trackers of a run, and the thread that calls them one after the other.

    A tracker that is in one call when training has waited for `patience_s` is dropped: another
    thread continues with the others.
    """

    def __init__(self, patience_s: float) -> None:
        self.opened: list[OpenedTracker] = []
        self._patience_s = patience_s
        self._queue: queue.Queue[Iterable[_Call] | None] = queue.Queue(_MOST_ENTRIES)
        self._calls = chain.from_iterable(iter(self._next, None))
        self._calling: OpenedTracker | None = None
        self._lock = threading.Lock()
        self._awaited = threading.Event()
        self._warned: set[str] = set()
        self._start_thread()

    def warn(self, key: str, text: str) -> None:
        """Warn, unless a warning with this key was logged before."""
        if key not in self._warned:
            self._warned.add(key)
            _LOG.warning("%s", text)

    def add(self, opened: OpenedTracker, params: Entry) -> None:
        """Add a tracker, and write the hyperparameters to it."""
        self.opened.append(opened)
        if opened.start.resumed:
            self._put([(opened, "last_steps", opened.recall, ())])
        if "params" in opened.tracker.kinds:
            self._put([(opened, "params", opened.tracker.write, (params,))])

    def log(
        self, kind: str, name: str, place: Mapping[str, Any], capture: Callable[..., Any]
    ) -> None:
        """Log an entry of these fields; `capture` returns a function that reads the value later."""
        with self._reported(kind):
            self._put(self._entry(kind, name, place, capture()))

    def flush(self) -> bool:
        """Wait until everything so far is written; False if a tracker was dropped meanwhile."""
        return self._wait((each, "flush", each.tracker.flush, ()) for each in self.opened)

    def close(self, *, failed: bool) -> None:
        """Write everything so far, close the trackers, and report lost entries."""
        calls = [(each, "close", each.tracker.close, (failed,)) for each in self.opened]
        self._wait(call for call in calls if not call[0].tracker.closed_by_caller)
        self._put(None)
        self._awaited.set()
        self._thread.join(self._patience_s)
        for call in calls:
            opened, name = call[0], call[0].tracker.name
            if opened.tracker.closed_by_caller:
                self._call(call)
            if opened.lost:
                self.warn(f"lost {name}", f"{name} lost {opened.lost} entries of this run.")

    def _put(self, calls: Iterable[_Call] | None) -> None:
        while True:
            with contextlib.suppress(queue.Full):
                return self._queue.put(calls, timeout=self._patience_s)
            self._drop()

    def _next(self) -> Iterable[_Call] | None:
        if self._queue.empty():
            self._awaited.wait(_PAUSE_S)
            self._awaited.clear()
        return self._queue.get()

    def _wait(self, calls: Iterable[_Call]) -> bool:
        """Wait for some calls after all others; False if a tracker was dropped meanwhile."""
        done, dropped = threading.Event(), False

        def until_done() -> Iterator[_Call]:
            yield from calls
            done.set()

        self._put(until_done())
        self._awaited.set()
        while not done.wait(self._patience_s):
            if not self._drop():  # the thread waits for the device
                return False
            dropped = True
        return not dropped

    def _drop(self) -> bool:
        """Continue without the tracker that is being called, in another thread."""
        with self._lock:
            stuck, self._calling = self._calling, None
            if stuck is None:
                return False
            stuck.is_dropped = True
        _LOG.warning(
            "%s does not respond: training has waited %g s for it. It is not called again, and is "
            "not closed; the other trackers continue. Check its disk or server.",
            *(stuck.tracker.name, self._patience_s),
        )
        self._start_thread()
        return True

    def _start_thread(self) -> None:
        # A daemon: a tracker that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._work, name="fxtrain trackers", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        for call in self._calls:
            if not self._call(call):
                return  # the thread that replaced this one continues

    def _call(self, call: _Call) -> bool:
        """Call a function of a tracker; False if the tracker was dropped during the call."""
        opened, what, function, arguments = call
        if opened.is_dropped:
            return True
        problem = None
        self._calling = opened
        try:
            function(opened.native, *arguments)
        except BaseException as error:  # any error of a library: training continues
            problem = error
        with self._lock:
            self._calling = None if self._calling is opened else self._calling
            if opened.is_dropped:
                return False
        if problem is not None:
            opened.lost += isinstance(arguments[0] if arguments else None, Entry)
            name, text = opened.tracker.name, f"{type(problem).__name__}: {problem}"
            self.warn(
                f"failed {name} {what}",
                f"{name} failed in {what}: {text.rstrip(': .')[:500]}. Training and the other "
                f"trackers continue; further failures of this kind are only counted.",
            )
        return True

    @contextlib.contextmanager
    def _reported(self, kind: str) -> Iterator[None]:
        """Report any error of a value of the user that a block reads."""
        try:
            yield
        except Exception as error:
            self.warn(
                f"{kind} {error}",
                f"run.{kind}: {type(error).__name__}: {error}. No tracker received this entry; "
                f"training continues.",
            )

    def _entry(
        self, kind: str, name: str, place: Mapping[str, Any], read: Callable[[], Any]
    ) -> Iterator[_Call]:
        entry = None
        with self._reported(kind):
            entry = Entry(kind=kind, name=name, value=read(), **place)
        for opened in self.opened if entry else ():
            if kind in opened.tracker.kinds:
                yield opened, kind, opened.write, (entry, self.warn)
            else:
                called = opened.tracker.name
                text = f"{called} does not support run.{kind}. The other trackers log it."
                self.warn(f"kind {called} {kind}", text)
