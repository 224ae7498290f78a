"""What a plan takes from the config of DeepSpeed that it names."""

import math
from collections.abc import Mapping
from typing import Any

import attrs

from fxtrain._reading import read_text
from fxtrain._record import shown
from fxtrain.errors import PlanError
from fxtrain.state import DeepSpeed, Plan
from fxtrain.state.parsing import parse_json

# The rows of a micro-batch, the micro-batches of an update, and the rows of an update.
WINDOW_ENTRIES = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}


def read_config(config: DeepSpeed) -> dict[str, Any]:
    """The content of a strategy's config, from its text or its file, which is a JSON table."""
    text, where = config.config, "DeepSpeed(config=...)"
    if text is None:
        return {}
    if not text.startswith("{"):
        where = f"DeepSpeed(config={shown(text)})"
        try:
            text = read_text(text)
        except OSError as error:
            raise PlanError(f"{where}: {error}. Pass a JSON file's path, or its text.") from error
    try:
        data = parse_json(text)
    except ValueError as error:
        raise PlanError(f"{where} is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise PlanError(f"{where} holds a {type(data).__name__}. Write a table: {{...}}.")
    return data


def fill_from_config(plan: Plan, data: Mapping[str, Any], ranks: int) -> Plan:
    """A plan whose default precision, accumulation and clipping are those of its DeepSpeed config.

    Data is split over `ranks`, for a config that has the rows of an update only.
    """
    changes: dict[str, Any] = {}
    count = data.get("gradient_accumulation_steps")
    if count is None or count == "auto":
        count = _window(plan, data, ranks)
    if plan.accumulate == 1 and type(count) is int and count > 1:
        changes["accumulate"] = count
    norm: Any = data.get("gradient_clipping")
    if plan.clip_norm is None and type(norm) in (int, float) and 0 < norm < math.inf:
        changes["clip_norm"] = float(norm)
    compute = _compute(data)
    if plan.precision.compute == "fp32" and compute in ("bf16", "fp16"):
        changes["precision"] = attrs.evolve(plan.precision, compute=compute)
    return attrs.evolve(plan, **changes) if changes else plan


def _window(plan: Plan, data: Mapping[str, Any], ranks: int) -> int | None:
    """Micro-batches of an update, from its rows and those of a micro-batch."""
    total = data.get("train_batch_size")
    rows = plan.strategy.micro_batch or data.get("train_micro_batch_size_per_gpu")
    if type(total) is not int or type(rows) is not int or rows < 1 or total % (rows * ranks):
        return None
    return total // (rows * ranks)


def _compute(data: Mapping[str, Any]) -> str | None:
    if is_enabled(data, "torch_autocast"):
        return autocast_dtype(data)
    names = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
    chosen = {compute for name, compute in names.items() if is_enabled(data, name)}
    return chosen.pop() if len(chosen) == 1 else None


def is_enabled(data: Mapping[str, Any], name: str) -> bool:
    """Whether a section of a config is there and enabled."""
    section = data.get(name)
    return isinstance(section, Mapping) and section.get("enabled") is True


def autocast_dtype(data: Mapping[str, Any]) -> str:
    """The dtype of a config's autocast section, by its name in plans."""
    dtype = str(data["torch_autocast"].get("dtype", "bfloat16")).split(".")[-1]
    return _DTYPES.get(dtype, dtype)
