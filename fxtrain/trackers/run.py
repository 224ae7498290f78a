"""A tracked run: the methods that the loop calls."""

import atexit
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs

from fxtrain._reading import StrPath
from fxtrain._record import shown
from fxtrain.checkpoint.folder_lock import Lock
from fxtrain.errors import PlanError
from fxtrain.state import Position, unstructure
from fxtrain.trackers.entries import image_of, numbers_of, place_of, table_of
from fxtrain.trackers.run_folder import Identity
from fxtrain.trackers.writer import Writer


@attrs.define(kw_only=True, eq=False)
class Run:
    """A run logged by trackers; created by `fx.track`, and usable as a context manager.

    Every rank makes the same calls. On ranks that do not track they do nothing, without any
    exchange between ranks. They do not wait for the device: a background thread reads the values,
    in the order in which they were logged. If a tracker raises there, the logger `fxtrain.trackers`
    warns once; training and the other trackers continue. A call on a closed run, or with a `step`
    that is neither a position nor a number, is a PlanError.

    Attributes:
        path: The folder of the run.
    """

    path: str
    _identity: Identity = attrs.field(alias="identity", repr=False)
    _writer: Writer | None = attrs.field(default=None, alias="writer", repr=False)
    _process: int = attrs.field(factory=os.getpid, init=False, repr=False)
    _lock: Lock | None = attrs.field(default=None, alias="lock", repr=False)
    # Calls of `log` without a step while none was passed, counted from where the run began.
    _calls: int = attrs.field(default=0, alias="calls", repr=False)
    _step: Position | int | None = attrs.field(default=None, init=False, repr=False)  # the last one
    _is_closed: bool = attrs.field(default=False, init=False, repr=False)

    @property
    def id(self) -> str:
        """The same on every rank, and after the run is resumed."""
        return self._identity.id

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
        self._put("log", "", step, lambda at, warn: _checked(values, at, warn))

    def text(self, name: str, text: str, step: Position | int | None = None) -> None:
        """Log text."""
        self._put("text", name, step, lambda *_: lambda: str(text))

    def image(self, name: str, image: object, step: Position | int | None = None) -> None:
        """Log an image.

        Args:
            image: Tensor or array of shape (channels, height, width) or (height, width), floats
                from 0 to 1 or uint8. It is copied.
        """
        self._put("image", name, step, lambda *_: image_of(image))

    def table(
        self, name: str, columns: Mapping[str, object], step: Position | int | None = None
    ) -> None:
        """Log a table.

        Args:
            columns: By name, sequences or tensors of equal length. They are copied.
        """
        self._put("table", name, step, lambda *_: table_of(columns))

    def artifact(self, name: str, path: StrPath, step: Position | int | None = None) -> None:
        """Log a file or folder, which must exist until the run is closed or flushed."""

        self._put("artifact", name, step, lambda *_: lambda: Path(path).resolve(strict=True))

    def native(self, config: object) -> Any:
        """The library's own object, for features that the methods here do not cover.

        Args:
            config: The config type, such as `fx.WandB`, or the config or tracker that was passed to
                `fx.track`.

        Returns:
            For example a `wandb.Run`; None on ranks other than 0, and if this run has no such
            tracker, or could not open it. The background thread uses it too.
        """
        kind = config if isinstance(config, type) else type(config)
        for opened in self._writer.opened if self._writer else ():
            if opened.tracker is config or opened.tracker.config is kind:
                return opened.native
        return None

    def flush(self) -> bool:
        """Wait until everything logged so far is written; False if a tracker takes too long.

        Effects:
            Waits for the device and for the trackers of this rank, each at most `patience_s`.
        """
        return self._here is None or self._here.flush()

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
        return unstructure(self._identity)

    def close(self, *, failed: bool = False) -> None:
        """Write everything and close the trackers; a second call does nothing.

        Args:
            failed: Whether the run failed, which is passed to the trackers.

        Effects:
            The same as `flush`.
        """
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if self._here is not None:
            self._here.close(failed=failed)
        if os.getpid() == self._process and self._lock is not None:
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

    @property
    def _here(self) -> Writer | None:
        """What writes in this process; a forked process has no threads."""
        return self._writer if os.getpid() == self._process else None

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

    def _put(self, kind: str, name: Any, step: Any, capture: Callable[..., Any]) -> None:
        """Hand a value as it is now to the trackers of this rank; its problems are reported."""
        place, writer = self._place(kind, step), self._here
        if writer is not None:
            writer.log(kind, str(name), place, lambda: capture(place["step"], writer.warn))


def _checked(
    values: Mapping[str, object], step: int, warn: Callable[[str, str], None]
) -> Callable[[], dict[str, float]]:
    """Capture metrics; the returned function warns once of each that is not a finite number."""

    def problem(name: str, what: object) -> None:
        warn(
            f"value {name}",
            f"run.log at step {step}: the metric {shown(name)} is not a number: {what}. It is "
            f"skipped, and the other metrics are logged.",
        )

    read = numbers_of(values, problem)

    def checked() -> dict[str, float]:
        numbers = read()
        for name, value in numbers.items():
            if not math.isfinite(value):
                warn(f"finite {name}", f"The metric {name} is {value} at step {step}.")
        return numbers

    return checked
