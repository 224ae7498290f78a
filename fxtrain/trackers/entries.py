"""Logged values, kept until a background thread reads them: nothing here waits for a device."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._record import shown
from fxtrain.errors import PlanError
from fxtrain.state import Position, Weighted
from fxtrain.trackers.tracker import Entry

_CHANNELS = (1, 3, 4)
# Reads metrics: floats by name, and problems by name.
Numbers = Callable[[], tuple[dict[str, float], dict[str, str]]]


@attrs.define(eq=False)
class Logged:
    """An entry whose value is read from the device when the first tracker writes it.

    Attributes:
        kind: That of the entry.
    """

    kind: str
    _read: Callable[[], Entry]
    _warn: Callable[[str, str], None]
    _entry: Entry | None = attrs.field(default=None, init=False)
    _is_read: bool = attrs.field(default=False, init=False)
    _lock: Any = attrs.field(factory=threading.Lock, init=False)

    def entry(self) -> Entry | None:
        """The entry; None if no tracker can write the value, which has been reported."""
        with self._lock:
            if not self._is_read:
                self._is_read = True
                with reported(self.kind, self._warn):
                    self._entry = self._read()
        return self._entry


@contextlib.contextmanager
def reported(kind: str, warn: Callable[[str, str], None]) -> Iterator[None]:
    """Report any error of a value of the user that a block reads."""
    try:
        yield
    except Exception as error:
        warn(
            f"{kind} {error}",
            f"run.{kind}: {type(error).__name__}: {error}. No tracker received this entry; "
            f"training continues.",
        )


def place_of(step: Any) -> dict[str, Any]:
    """The position at which something is logged, as fields of an `Entry`.

    Raises:
        PlanError: `step` is neither a position nor a whole number.

    Example:
        >>> import fxtrain as fx
        >>> place_of(fx.Position(updates=3, samples=96, epoch=1))["rows"]
        96
    """
    if isinstance(step, Position):
        known = {"step": step.updates, "rows": step.samples, "epoch": step.epoch}
        return {**known, "time": time.time()}
    if type(step) is int and step >= 0:
        return {"step": step, "time": time.time()}
    raise PlanError(
        f"log: step takes a Position, such as report.position, or a whole number from 0; found "
        f"{shown(step)}."
    )


def numbers_of(values: Mapping[str, Any]) -> Numbers:
    """Capture metrics as they are now; the returned function reads them and waits for the device.

    Tensors are copied on the device or on the way to host memory, in stream order, so the caller
    may change them afterwards. The function returns floats by name, and by name the problems of
    values that are not numbers.

    Example:
        >>> numbers_of({"loss": torch.tensor(0.5), "note": "good"})()
        ({'loss': 0.5}, {'note': "found 'good', which is a str"})
    """
    metrics: dict[str, Any] = {}
    problems: dict[str, str] = {}
    events: dict[torch.device, Any] = {}
    for name, value in _leaves("", values):
        if type(value) is Tensor and value.is_cpu and value.numel() == 1:
            metrics[name] = value.item()  # sooner than a copy
        elif not isinstance(value, Tensor):
            metrics[name] = value
        elif problem := _tensor_problem(value):
            problems[name] = problem
        else:
            metrics[name] = _copy(value.detach(), events)
    for device in events:
        events[device] = torch.cuda.current_stream(device).record_event()

    def read() -> tuple[dict[str, float], dict[str, str]]:
        for event in events.values():
            event.synchronize()
        numbers: dict[str, float] = {}
        wrong = dict(problems)
        for name, value in metrics.items():
            try:
                numbers[name] = _number(value)
            except (TypeError, ValueError, OverflowError) as error:
                wrong[name] = f"found {shown(value)}, {error}"
        return numbers, wrong

    return read


def image_of(image: Any) -> Callable[[], Tensor]:
    """Capture an image as it is now; the returned function gives uint8 on the CPU, rows first.

    Args:
        image: Tensor or array of shape (channels, height, width) or (height, width); floats from
            0 to 1, or uint8.
    """
    tensor = image if isinstance(image, Tensor) else torch.as_tensor(image, device="cpu")
    tensor = tensor.detach().clone()

    def read() -> Tensor:
        pixels = tensor[None] if tensor.ndim == 2 else tensor
        if pixels.ndim != 3 or pixels.shape[0] not in _CHANNELS or not pixels.numel():
            raise ValueError(
                f"expected an image of shape (channels, height, width) with 1, 3 or 4 channels, or "
                f"(height, width); found {tuple(tensor.shape)}"
            )
        if pixels.dtype.is_floating_point:
            pixels = pixels.nan_to_num(0.0).clamp(0, 1).mul(255).round()
        elif pixels.dtype is not torch.uint8:
            raise ValueError(
                f"expected an image of floats from 0 to 1, or uint8; found {pixels.dtype}"
            )
        return pixels.to("cpu", torch.uint8).permute(1, 2, 0).contiguous()

    return read


def table_of(columns: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Capture the columns of a table as they are; the returned function gives names and rows."""
    copies = {
        str(name): column.detach().clone() if isinstance(column, Tensor) else list(column)
        for name, column in columns.items()
    }

    def read() -> dict[str, Any]:
        plain = [
            column.tolist() if isinstance(column, Tensor) else [_cell(value) for value in column]
            for column in copies.values()
        ]
        if len({len(column) for column in plain}) > 1:
            sizes = ", ".join(f"{n}: {len(c)}" for n, c in zip(copies, plain, strict=True))
            raise ValueError(f"the columns of a table must have equal lengths; found {sizes}")
        return {"columns": [*copies], "rows": [list(row) for row in zip(*plain, strict=True)]}

    return read


def _leaves(path: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{path}{key}"
        if isinstance(value, Tensor | float):  # first, since most values are one
            yield name, value
        elif isinstance(value, Mapping):
            yield from _leaves(f"{name}/", value)
        elif isinstance(value, Weighted):
            yield name, value.total.detach() / value.weight
        elif value is not None:
            yield name, value


def _tensor_problem(value: Tensor) -> str:
    if value.numel() != 1:
        return f"found a tensor of shape {tuple(value.shape)}; log its mean, or another number"
    placements = getattr(value, "placements", ())  # a DTensor
    if any(not placement.is_replicate() for placement in placements):
        return "found a sharded DTensor; log value.full_tensor(), called on all ranks"
    return ""


def _copy(value: Any, events: dict[torch.device, Any]) -> Tensor:
    if hasattr(value, "to_local"):
        value = value.to_local()
    if value.is_cuda:
        events[value.device] = None
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True, device="cpu")
        return host.copy_(value, non_blocking=True)
    if value.device.type == "xla":  # a copy would be one more operation in the next graph
        return value
    return value.clone()


def _number(value: Any) -> float:
    """The float of a number, a tensor, or a NumPy scalar or array of one element."""
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, bool | int | float):
        raise TypeError(f"which is a {type(number).__name__}")
    return float(number)


def _cell(value: Any) -> Any:
    """A value that every library can write: a number, text or None."""
    if isinstance(value, Tensor) or hasattr(value, "dtype"):
        value = value.item() if value.ndim == 0 else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)
