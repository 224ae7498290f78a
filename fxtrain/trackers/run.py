"""A tracked run: the methods that the loop calls."""

import atexit
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs

from fxtrain._reading import StrPath
from fxtrain._record import shown
from fxtrain.checkpoint.folder_lock import Lock
from fxtrain.errors import PlanError
from fxtrain.state import Position
from fxtrain.trackers.entries import (
    Logged,
    Numbers,
    image_of,
    numbers_of,
    place_of,
    reported,
    table_of,
)
from fxtrain.trackers.tracker import Entry, Tracker
from fxtrain.trackers.writer import Patience, Warn, Writer


@attrs.define(kw_only=True, eq=False)
class Run:
    """A run logged by trackers; created by `fx.track`, and usable as a context manager.

    Every rank makes the same calls. On ranks that do not track they do nothing, without any
    exchange between ranks. They do not wait for the device: background threads read the values, in
    the order in which they were logged. If a tracker raises there, the logger `fxtrain.trackers`
    warns once; training and the other trackers continue. A call on a closed run, or with a `step`
    that is neither a position nor a number, is a PlanError.

    Attributes:
        id: The same on every rank, and after the run is resumed.
        path: The folder of the run.
    """

    id: str
    path: str
    _identities: Sequence[Mapping[str, str]] = attrs.field(alias="identities", repr=False)
    _kinds: Sequence[str] = attrs.field(alias="kinds", repr=False)
    _writers: Sequence[Writer] = attrs.field(default=(), alias="writers", repr=False)
    _patience: Patience = attrs.field(default=Patience(), alias="patience", repr=False)
    _warn: Warn = attrs.field(factory=Warn, init=False, repr=False)
    _process: int = attrs.field(factory=os.getpid, init=False, repr=False)
    _lock: Lock | None = attrs.field(default=None, alias="lock", repr=False)
    # Calls of `log` without a step while none was passed, counted from where the run began.
    _calls: int = attrs.field(default=0, alias="calls", repr=False)
    _step: Position | int | None = attrs.field(default=None, init=False, repr=False)  # the last one
    _is_closed: bool = attrs.field(default=False, init=False, repr=False)

    def log(self, values: Mapping[str, object], step: Position | int | None = None) -> None:
        """Log numbers by name.

        Args:
            values: Numbers, tensors of one element, NumPy scalars, `fx.Weighted`; names of nested
                mappings are joined by "/"; None is skipped. A tensor has the value of this rank:
                reduce it first for a global value.
            step: `report.position`, or a number of updates. None is the last one that was given; if
                none was, the calls are counted.

        Raises:
            PlanError: `values` is not a mapping.

        Example:
            >>> import fxtrain as fx, tempfile, torch
            >>> with fx.detect(env={}, device="cpu") as ctx:
            ...     with fx.track(tempfile.mkdtemp(), ctx) as run:
            ...         run.log({"loss": torch.tensor(0.5)}, fx.Position(updates=1))
        """
        if not isinstance(values, Mapping):
            raise PlanError(
                f"run.log takes a mapping of names to numbers, found {shown(values)}. For "
                f'example: run.log({{"loss": report.loss}}, report.position).'
            )
        self._put("log", "", step, lambda at: self._checked(numbers_of(values), at))

    def text(self, name: str, text: str, step: Position | int | None = None) -> None:
        """Log text."""
        self._put("text", name, step, lambda _: lambda: str(text))

    def image(self, name: str, image: object, step: Position | int | None = None) -> None:
        """Log an image.

        Args:
            image: Tensor or array of shape (channels, height, width) or (height, width), floats
                from 0 to 1 or uint8. It is copied.
        """
        self._put("image", name, step, lambda _: image_of(image))

    def table(
        self, name: str, columns: Mapping[str, object], step: Position | int | None = None
    ) -> None:
        """Log a table.

        Args:
            columns: By name, sequences or tensors of equal length. They are copied.
        """
        self._put("table", name, step, lambda _: table_of(columns))

    def artifact(self, name: str, path: StrPath, step: Position | int | None = None) -> None:
        """Log a file or folder, which must exist until the run is closed or flushed."""

        def read() -> Path:
            if not Path(path).exists():
                raise FileNotFoundError(f"{Path(path)} does not exist")
            return Path(path).resolve()

        self._put("artifact", name, step, lambda _: read)

    def native(self, config: object) -> Any:
        """The library's own object, for features that the methods here do not cover.

        Args:
            config: The config type, such as `fx.WandB`, or the config or tracker that was passed to
                `fx.track`.

        Returns:
            For example a `wandb.Run`; None on ranks that do not track, and for a tracker that
            could not be opened. Background threads use it too.

        Raises:
            PlanError: this run has no such tracker.
        """
        kind = config if isinstance(config, type) else type(config)
        for writer in self._writers:
            if writer.tracker is config or writer.tracker.config is kind:
                return writer.native
        name = config.name if isinstance(config, Tracker) else kind.__name__
        if name not in self._kinds:
            known = ", ".join(self._kinds) or "no tracker"
            raise PlanError(f"run.native({name}): this run has {known}.")
        return None

    def flush(self) -> bool:
        """Wait until everything logged so far is written; False if a tracker takes too long.

        Effects:
            Waits for the device and for the trackers of this rank, at most 30 s.
        """
        until = time.monotonic() + self._patience.flush_s
        return not self._here() or all([writer.flush(until) for writer in self._writers])

    def state(self) -> dict[str, Any]:
        """The value that continues this run: save it in a checkpoint, and pass it as `resume`.

        It is plain, and the same on every rank. Everything logged so far is written first, so that
        no metric before a checkpoint is lost if the process is killed after it.

        Effects:
            The same as `flush`.

        Example:
            >>> import fxtrain as fx, tempfile, torch
            >>> with fx.detect(env={}, device="cpu") as ctx:
            ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
            ...     folder = tempfile.mkdtemp()
            ...     with fx.track(folder, ctx) as run:
            ...         _ = fx.save(folder, ctx, model, extra={"run": run.state()})
            ...     again = fx.restore(folder, ctx, model)
            ...     saved = again.extra["run"]
            ...     with fx.track(folder, ctx, resume=saved, position=again.position) as more:
            ...         more.id == run.id
            True
        """
        if not self._is_closed:
            self.flush()
        return {"id": self.id, "identities": [dict(ids) for ids in self._identities]}

    def close(self, *, failed: bool = False) -> None:
        """Write everything and close the trackers; a second call does nothing.

        Args:
            failed: Whether the run failed, which is passed to the trackers.

        Effects:
            Waits for the trackers of this rank, at most 120 s.
        """
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if os.getpid() == self._process:
            until = time.monotonic() + self._patience.close_s
            for writer in self._writers:
                writer.end(failed=failed)
            for writer in self._writers:
                writer.close(until, failed=failed)
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=error is not None)

    def _here(self) -> bool:
        """Whether this process writes; a forked process has no threads."""
        return bool(self._writers) and os.getpid() == self._process

    def _place(self, call: str, step: Any) -> dict[str, Any]:
        if self._is_closed:
            raise PlanError(
                f"run.{call}: this run is closed. Log inside its `with` block, or continue it with "
                f"fx.track(path, ctx, resume=run.state(), position=...)."
            )
        if step is None and self._step is None:
            self._calls += call == "log"
            return place_of(self._calls)
        step = self._step if step is None else step
        place = place_of(step)
        self._step = step
        return place

    def _put(
        self, kind: str, name: Any, step: Any, capture: Callable[[int], Callable[[], Any]]
    ) -> None:
        """Hand a value as it is now to the trackers of this rank; its problems are reported."""
        place = self._place(kind, step)
        if not self._here():
            return
        with reported(kind, self._warn):
            read = capture(place["step"])
            logged = Logged(
                kind, lambda: Entry(kind=kind, name=str(name), value=read(), **place), self._warn
            )
            for writer in self._writers:
                writer.put(logged)

    def _checked(self, read: Numbers, step: int) -> Callable[[], dict[str, float]]:
        def checked() -> dict[str, float]:
            values, problems = read()
            for name, problem in problems.items():
                self._warn(
                    f"value {name}",
                    f"run.log at step {step}: the metric {shown(name)} is not a number: "
                    f"{problem}. It is skipped, and the other metrics are logged.",
                )
            for name, value in values.items():
                if not math.isfinite(value):
                    self._warn(f"finite {name}", f"The metric {name} is {value} at step {step}.")
            return values

        return checked
