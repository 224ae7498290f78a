"""A tracked run: the methods that the loop calls, and capturing the values that they log.

A value is captured as it is at the call; what is returned reads it, in the background.
"""

import atexit
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._reading import StrPath
from fxtrain._record import shown
from fxtrain.checkpoint.folder_lock import Lock
from fxtrain.errors import PlanError
from fxtrain.state import Position, Weighted
from fxtrain.trackers.writer import Writer

_CHANNELS = (1, 3, 4)


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
    _state: dict[str, Any] = attrs.field(alias="state", repr=False)
    _writer: Writer | None = attrs.field(default=None, alias="writer", repr=False)
    _process: int = attrs.field(factory=os.getpid, init=False, repr=False)
    _lock: Lock | None = attrs.field(default=None, alias="lock", repr=False)
    # Calls of `log` without a step while none was passed, counted from where the run began.
    _calls: int = attrs.field(default=0, alias="calls", repr=False)
    _step: Position | int | None = attrs.field(default=None, init=False, repr=False)  # the last one
    _is_closed: bool = attrs.field(default=False, init=False, repr=False)
    # Whether no process has opened this run before; the same on every rank.
    _is_new: bool = attrs.field(default=True, alias="is_new", repr=False)

    @property
    def id(self) -> str:
        """The same on every rank, and after the run is resumed."""
        return self._state["id"]

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
        self._put("log", "", step, lambda at, warn: numbers_of(values, at, warn))

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
        return {**self._state}

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

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
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


def place_of(step: Any) -> dict[str, Any]:
    """The position at which something is logged, as fields of an `Entry`."""
    if isinstance(step, Position):
        known = {"step": step.updates, "rows": step.samples, "epoch": step.epoch}
        return {**known, "time": time.time()}
    if type(step) is int and step >= 0:
        return {"step": step, "time": time.time()}
    raise PlanError(
        f"log: step takes a Position, such as report.position, or a whole number from 0; found "
        f"{shown(step)}."
    )


def numbers_of(
    values: Mapping[str, Any], step: int, warn: Callable[[str, str], None]
) -> Callable[[], dict[str, float]]:
    """Capture metrics; the returned function waits for the device and returns floats by name.

    Tensors are copied on the device or on the way to host memory, in stream order, so the caller
    may change them afterwards. A value that is not a finite number is reported once.
    """
    metrics: dict[str, Any] = {}
    devices: set[torch.device] = set()

    def problem(name: str, what: object) -> None:
        warn(
            f"value {name}",
            f"run.log at step {step}: the metric {shown(name)} is not a number: {what}. It is "
            f"skipped, and the other metrics are logged.",
        )

    def number_of(name: str, value: Any) -> float | None:
        try:
            number = _number(value)
        except (TypeError, ValueError, OverflowError) as error:
            return problem(name, f"found {shown(value)}, {error}")
        if not math.isfinite(number):
            warn(f"finite {name}", f"The metric {name} is {number} at step {step}.")
        return number

    def read() -> dict[str, float]:
        for event in events:
            event.synchronize()
        numbers = {name: number_of(name, value) for name, value in metrics.items()}
        return {name: number for name, number in numbers.items() if number is not None}

    for name, value in _leaves("", values):
        try:
            metrics[name] = _captured(value, devices) if isinstance(value, Tensor) else value
        except ValueError as error:
            problem(name, error)
    events = [torch.cuda.current_stream(device).record_event() for device in devices]
    return read


def image_of(image: Any) -> Callable[[], Tensor]:
    """Capture an image; the returned function gives uint8 on the CPU, (height, width, channels).

    It is (channels, height, width) or (height, width), of floats from 0 to 1 or uint8.
    """
    tensor = image if isinstance(image, Tensor) else torch.as_tensor(image, device="cpu")
    tensor = tensor.detach().clone()

    def read() -> Tensor:
        pixels = tensor[None] if tensor.ndim == 2 else tensor
        if pixels.dtype.is_floating_point:
            pixels = pixels.nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)
        if pixels.ndim != 3 or pixels.shape[0] not in _CHANNELS or pixels.dtype != torch.uint8:
            raise ValueError(
                f"expected an image of shape (channels, height, width) with 1, 3 or 4 channels, or "
                f"(height, width), of floats from 0 to 1 or uint8; found {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}"
            )
        return pixels.cpu().permute(1, 2, 0).contiguous()

    return read


def table_of(columns: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Capture the columns of a table; the returned function gives names and rows."""
    copies = {
        str(name): column.detach().clone() if isinstance(column, Tensor) else list(column)
        for name, column in columns.items()
    }

    def read() -> dict[str, Any]:
        plain = [
            column.tolist() if isinstance(column, Tensor) else [_cell(value) for value in column]
            for column in copies.values()
        ]
        return {"columns": [*copies], "rows": [list(row) for row in zip(*plain, strict=True)]}

    return read


def _leaves(path: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(f"{name}/", value)
        elif isinstance(value, Weighted):
            yield name, value.total.detach() / value.weight
        elif value is not None:
            yield name, value


def _captured(value: Any, devices: set[torch.device]) -> Any:
    """A tensor of one element as it is now; a device to wait for is added to `devices`."""
    if value.numel() != 1:
        raise ValueError(f"found a tensor of shape {tuple(value.shape)}; log its mean, for example")
    if hasattr(value, "placements"):  # a DTensor
        if not all(placement.is_replicate() for placement in value.placements):
            raise ValueError("found a sharded DTensor; log value.full_tensor(), on all ranks")
        value = value.to_local()
    value = value.detach()
    if value.is_cpu:
        return value.item()
    if value.is_cuda:
        devices.add(value.device)
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True, device="cpu")
        return host.copy_(value, non_blocking=True)
    # Under XLA, a copy would be one more operation in the next graph.
    return value if value.device.type == "xla" else value.clone()


def _number(value: Any) -> float:
    """The float of a number, a tensor, or a NumPy scalar or array of one element."""
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, bool | int | float):
        raise TypeError(f"which is a {type(number).__name__}")
    return float(number)


def _cell(value: Any) -> Any:
    """A value that every library can write: a number, text or None."""
    if hasattr(value, "dtype") and value.ndim == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
