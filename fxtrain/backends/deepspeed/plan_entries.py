"""The values that a plan sets in a DeepSpeed config."""

import math
from collections.abc import Mapping
from typing import Any

import attrs

from fxtrain.backends.deepspeed.config_entries import AUTO, ZERO, autocasts, device, section
from fxtrain.errors import PlanError
from fxtrain.state import DeepSpeed, LossScale, Plan

_OFFLOADED = {"offload_optimizer": "offload_optimizer", "offload_parameters": "offload_param"}


@attrs.frozen
class PlanEntry:
    """The plan's value for one entry; None leaves it open. Messages show `told` in its place."""

    path: str
    value: Any
    by: str
    write: bool = True
    told: Any = None


def all_plan_entries(plan: Plan, base: Mapping[str, Any]) -> list[PlanEntry]:
    """Every entry that a plan may set, except the batch sizes."""
    config: DeepSpeed = plan.strategy
    return [
        PlanEntry("gradient_accumulation_steps", plan.accumulate, "Plan.accumulate"),
        PlanEntry(
            "gradient_clipping",
            plan.clip_norm or 0.0,
            "Plan.clip_norm",
            write=plan.clip_norm is not None,
        ),
        *_precision_entries(plan, base),
        *_zero_entries(config),
        *_offload_entries(config, section(base, ZERO)),
        PlanEntry("tensor_parallel.autotp_size", config.tensor_parallel, "tensor_parallel"),
        PlanEntry("sequence_parallel_size", config.sequence_parallel, "sequence_parallel"),
    ]


def _precision_entries(plan: Plan, base: Mapping[str, Any]) -> list[PlanEntry]:
    compute = "fp32" if autocasts(base) else plan.precision.compute
    said = [
        PlanEntry(
            f"{name}.enabled",
            compute == name,
            "Plan.precision",
            write=compute == name,
            told=plan.precision.compute,
        )
        for name in ("bf16", "fp16")
    ]
    scale = plan.precision.scale
    if compute == "fp16" and scale != LossScale():
        by = "Plan.precision.scale"
        said += [
            PlanEntry("fp16.loss_scale", 0, by),
            PlanEntry("fp16.initial_scale_power", power_of_two(scale.initial), by),
            PlanEntry("fp16.loss_scale_window", scale.interval, by),
        ]
    return said


def _zero_entries(config: DeepSpeed) -> list[PlanEntry]:
    names = {
        "stage": "stage",
        "partial_ranks": "zero_hpz_partition_size",
        "quantized_weights": "zero_quantized_weights",
        "quantized_gradients": "zero_quantized_gradients",
        "gather_16bit_weights": "stage3_gather_16bit_weights_on_model_save",
        "reduce_bucket": "reduce_bucket_size",
        "allgather_bucket": "allgather_bucket_size",
        "prefetch_bucket": "stage3_prefetch_bucket_size",
        "persistence_threshold": "stage3_param_persistence_threshold",
        "overlap": "overlap_comm",
    }
    said = [
        PlanEntry(f"{ZERO}.{entry}", getattr(config, field), field)
        for field, entry in names.items()
    ]
    leaves = list(config.leaf_modules) or None
    return [*said, PlanEntry(f"{ZERO}.leaf_module.classes", leaves, "leaf_modules")]


def _offload_entries(config: DeepSpeed, zero: Mapping[str, Any]) -> list[PlanEntry]:
    said: list[PlanEntry] = []
    for field, name in _OFFLOADED.items():
        chosen = getattr(config, field)
        path = f"{ZERO}.{name}"
        said.append(PlanEntry(f"{path}.device", chosen, field))
        used = chosen or device(zero, name)
        said.append(
            PlanEntry(
                f"{path}.nvme_path", config.nvme_path if used == "nvme" else None, "nvme_path"
            )
        )
        pinned = None if used in ("none", AUTO) else config.pin_memory
        said.append(PlanEntry(f"{path}.pin_memory", pinned, "pin_memory"))
    return said


def power_of_two(scale: float) -> int:
    """The exponent of a loss scale.

    Raises:
        PlanError: it is not an integer.
    """
    power = math.log2(scale)
    if not power.is_integer() or power < 0:
        raise PlanError(
            f"LossScale(initial={scale}): DeepSpeed needs a power of two. "
            f"Use {2.0 ** max(0, round(power))}."
        )
    return int(power)
