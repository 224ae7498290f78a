"""Captures logged values as they are at a call; what is returned reads them, in the background."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fxtrain._record import shown
from fxtrain.errors import PlanError
from fxtrain.state import Position, Weighted

_CHANNELS = (1, 3, 4)


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


def numbers_of(
    values: Mapping[str, Any], problem: Callable[[str, object], None]
) -> Callable[[], dict[str, float]]:
    """Capture metrics; the returned function waits for the device and returns floats by name.

    Tensors are copied on the device or on the way to host memory, in stream order, so the caller
    may change them afterwards.

    Args:
        values: By name, as `Run.log` takes them.
        problem: Called with the name of a value that is not a number, and what it is.

    Example:
        >>> numbers_of({"loss": torch.tensor(0.5), "note": "good"}, print)()
        note found 'good', which is a str
        {'loss': 0.5}
    """
    metrics: dict[str, Any] = {}
    events: dict[torch.device, Any] = {}
    for name, value in _leaves("", values):
        try:
            metrics[name] = _captured(value, events) if isinstance(value, Tensor) else value
        except ValueError as error:
            problem(name, error)
    for device in events:
        events[device] = torch.cuda.current_stream(device).record_event()

    def read() -> dict[str, float]:
        for event in events.values():
            event.synchronize()
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            try:
                numbers[name] = _number(value)
            except (TypeError, ValueError, OverflowError) as error:
                problem(name, f"found {shown(value)}, {error}")
        return numbers

    return read


def image_of(image: Any) -> Callable[[], Tensor]:
    """Capture an image; the returned function gives uint8 on the CPU, (height, width, channels).

    Args:
        image: Tensor or array of shape (channels, height, width) or (height, width); floats from
            0 to 1, or uint8.
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


def _captured(value: Any, events: dict[torch.device, Any]) -> Any:
    """A tensor of one element as it is now; the device whose event to wait for goes to `events`."""
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
        events[value.device] = None
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
