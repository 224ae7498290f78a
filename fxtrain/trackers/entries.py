"""Logged values, kept until a background thread reads them: nothing here waits for a device."""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._record import shown
from fxtrain.errors import PlanError
from fxtrain.state import Position, Weighted
from fxtrain.trackers.tracker import Entry

_DEEPEST = 20
_CHANNELS = (1, 3, 4)
_USUAL = frozenset({Tensor, float, int, bool})


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
                try:
                    self._entry = self._read()
                except Exception as error:  # any error of the user's value
                    self._warn(
                        f"{self.kind} {error}",
                        f"run.{self.kind}: {type(error).__name__}: {error}. No tracker received "
                        f"this entry; training continues.",
                    )
        return self._entry


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


def hold(values: Mapping[str, Any]) -> Callable[[], tuple[dict[str, float], dict[str, str]]]:
    """Capture metrics as they are now; the returned function reads them and waits for the device.

    Tensors are copied on the device or on the way to host memory, in stream order, so the caller
    may change them afterwards.
    """
    metrics: dict[str, Any] = {}
    problems: dict[str, str] = {}
    events: dict[torch.device, Any] = {}
    for name, value in _leaves("", values, 0):
        if type(value) is Tensor and value.is_cpu and value.numel() == 1 and not value.is_complex():
            metrics[name] = value.item()  # sooner than a copy
        elif isinstance(value, Tensor):
            if problem := _tensor_problem(value):
                problems[name] = problem
            else:
                metrics[name] = _copy(value, events)
        elif value is not None:
            metrics[name] = value

    def read() -> tuple[dict[str, float], dict[str, str]]:
        for event in events.values():
            event.synchronize()
        values, not_numbers = numbers(metrics)
        return values, {**problems, **not_numbers}

    for device in events:
        events[device] = torch.cuda.current_stream(device).record_event()
    return read


def numbers(values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Floats by name, and the problems of values that are not numbers.

    Example:
        >>> numbers({"loss": torch.tensor(0.5), "note": "good"})
        ({'loss': 0.5}, {'note': "found 'good'"})
    """
    floats: dict[str, float] = {}
    problems: dict[str, str] = {}
    for name, value in values.items():
        if not _is_number(value):
            problems[name] = f"found {shown(value)}"
            continue
        try:
            floats[name] = float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            problems[name] = f"found a {type(value).__name__}, {error}"
    return floats, problems


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
        name: column.detach().clone() if isinstance(column, Tensor) else list(column)
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
        rows = [list(row) for row in zip(*plain, strict=True)]
        return {"columns": [str(name) for name in copies], "rows": rows}

    return read


def artifact_of(path: Any) -> Callable[[], Path]:
    """A file or folder, which must exist when it is written."""

    def read() -> Path:
        artifact = Path(path)
        if not artifact.exists():
            raise FileNotFoundError(f"{artifact} does not exist")
        return artifact.resolve()

    return read


def _leaves(path: str, values: Any, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{path}{key}"
        if type(value) in _USUAL:  # checked first, since every step passes here
            yield name, value
        elif isinstance(value, Mapping) and depth < _DEEPEST:
            yield from _leaves(f"{name}/", value, depth + 1)
        elif isinstance(value, Weighted):
            yield name, value.total.detach() / value.weight
        else:
            yield name, value


def _tensor_problem(value: Tensor) -> str:
    if value.numel() != 1:
        return f"found a tensor of shape {tuple(value.shape)}; log its mean, or another number"
    if value.dtype.is_complex:
        return f"found a tensor of dtype {value.dtype}"
    if type(value) is Tensor:
        return ""
    placements = getattr(value, "placements", ())  # a DTensor
    if any(not placement.is_replicate() for placement in placements):
        return "found a sharded DTensor; log value.full_tensor(), called on all ranks"
    return ""


def _copy(value: Tensor, events: dict[torch.device, Any]) -> Tensor:
    value = value.detach()
    if type(value) is not Tensor and hasattr(value, "to_local"):
        value = value.to_local()  # pyright: ignore[reportAttributeAccessIssue]
    if value.is_cuda:
        events[value.device] = None
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True, device="cpu")
        return host.copy_(value, non_blocking=True)
    if value.device.type == "xla":  # a copy would be one more operation in the next graph
        return value
    return value.clone()


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | int | float | Tensor):
        return True
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
        return False
    return value.size == 1 and value.dtype.kind in "biuf"


def _cell(value: Any) -> Any:
    """A value that every library can write: a number, text or None."""
    if isinstance(value, Tensor) or hasattr(value, "dtype"):
        value = value.item() if value.ndim == 0 else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)
