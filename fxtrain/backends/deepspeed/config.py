"""A DeepSpeed config from a plan, a file and what is known of model, loader and ranks.

Pure functions of values; DeepSpeed itself is not needed. `"auto"` has the meaning that users of
such files know from other libraries.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
from torch import nn

from fxtrain.backends.deepspeed.config_file import (
    WINDOW_ENTRIES,
    autocast_dtype,
    fill_from_config,
    is_enabled,
    read_config,
)
from fxtrain.errors import PlanError
from fxtrain.state import DeepSpeed, FromConfig, LossScale, Plan

AUTO = "auto"
ZERO = "zero_optimization"
_PREFETCH = f"{ZERO}.stage3_prefetch_bucket_size"
_THRESHOLD = f"{ZERO}.stage3_param_persistence_threshold"
_BUCKET = f"{ZERO}.reduce_bucket_size"
_MICRO, _, _TOTAL = WINDOW_ENTRIES
# Prefixes of entries in which "auto" is one of DeepSpeed's own values.
_DEEPSPEED_AUTO = ("data_types.keep_in_fp32_modules", f"{ZERO}.zenflow.", "expert_parallel.")
_OFFLOADED = {"offload_optimizer": "offload_optimizer", "offload_parameters": "offload_param"}
# Fields of `DeepSpeed` by the entries of the ZeRO section that they set.
_ZERO_FIELDS = {
    "stage": "stage",
    "zero_hpz_partition_size": "partial_ranks",
    "zero_quantized_weights": "quantized_weights",
    "zero_quantized_gradients": "quantized_gradients",
    "stage3_gather_16bit_weights_on_model_save": "gather_16bit_weights",
    "reduce_bucket_size": "reduce_bucket",
    "allgather_bucket_size": "allgather_bucket",
    "stage3_prefetch_bucket_size": "prefetch_bucket",
    "stage3_param_persistence_threshold": "persistence_threshold",
    "overlap_comm": "overlap",
}
# What "auto" makes of the hidden size.
_WIDTHS: dict[str, Callable[[int], int]] = {
    _BUCKET: lambda hidden: hidden * hidden,
    _PREFETCH: lambda hidden: int(0.9 * hidden * hidden),
    _THRESHOLD: lambda hidden: 10 * hidden,
}


def deepspeed_config(
    plan: Plan,
    model: nn.Module | None = None,
    loader: Iterable[object] | None = None,
    *,
    ranks: int = 1,
    values: FromConfig | None = None,
) -> dict[str, Any]:
    """The config that DeepSpeed gets under a plan, as plain data to print or compare.

    The config of a wrapped model is `model.strategy_state.values`.

    Args:
        plan: A plan whose strategy is `DeepSpeed`.
        model: Gives the hidden size that `"auto"` bucket sizes follow.
        loader: A DataLoader, for the batch sizes.
        ranks: Ranks over which data is split.
        values: `fx.from_config(lr=..., ...)`, for `"auto"` in optimizer and scheduler.

    Raises:
        PlanError: the plan and its config differ, an `"auto"` has no value, or entries are
            incompatible.

    Example:
        >>> import fxtrain as fx
        >>> plan = fx.Plan(strategy=fx.DeepSpeed(stage=1), accumulate=4, clip_norm=1.0)
        >>> config = fx.interop.deepspeed_config(plan, ranks=2)
        >>> config["gradient_accumulation_steps"], config["gradient_clipping"]
        (4, 1.0)
    """
    if not isinstance(plan.strategy, DeepSpeed):
        raise PlanError(
            f"deepspeed_config: the plan's strategy is {type(plan.strategy).__name__}. "
            f"Use fx.Plan(strategy=fx.DeepSpeed(...))."
        )
    rows = getattr(loader, "batch_size", None)
    if rows is not None and plan.batch == "global":
        rows //= ranks
    config = resolve_deepspeed(
        plan,
        read_config(plan.strategy),
        ranks=ranks,
        rows=rows,
        hidden=hidden_size(model),
        values=FromConfig() if values is None else values,
    )
    if problems := config_problems(config, ranks):
        raise PlanError("\n".join(problems))
    return config


def partial_config(plan: Plan, ranks: int) -> dict[str, Any]:
    """The config without what depends on the model and its optimizer; errors as of `resolve`."""
    base = read_config(plan.strategy)
    base = {name: base[name] for name in base if name not in ("optimizer", "scheduler")}
    return resolve_deepspeed(plan, base, ranks=ranks, partial=True)


def _scale_entries(scale: LossScale) -> dict[str, int]:
    return {
        "loss_scale": 0,
        "initial_scale_power": power_of_two(scale.initial),
        "loss_scale_window": scale.interval,
    }


def hidden_size(module: Any) -> int | None:
    """The hidden size of a model, from its `config` as Hugging Face models keep it."""
    config = getattr(module, "config", None)
    for part in (config, _member(config, "text_config")):
        size, sizes = _member(part, "hidden_size"), _member(part, "hidden_sizes")
        if type(size) is int:
            return size
        if isinstance(sizes, list | tuple) and sizes:
            return max(sizes)
    return None


def _member(part: Any, name: str) -> Any:
    return part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)


def resolve_deepspeed(
    plan: Plan,
    base: Mapping[str, Any],
    *,
    ranks: int = 1,
    rows: int | None = None,
    hidden: int | None = None,
    values: FromConfig | None = None,
    partial: bool = False,
) -> dict[str, Any]:
    """The config for DeepSpeed.

    Args:
        plan: A plan whose strategy is `DeepSpeed`.
        base: The file's content.
        ranks: Ranks over which data is split.
        rows: Rows of a micro-batch on one rank, if known.
        hidden: The model's hidden size, if known.
        values: Values for `"auto"` in the optimizer and scheduler sections.
        partial: Whether the model does not exist yet: entries that depend on it are omitted.

    Returns:
        New plain data; `base` is not changed.

    Raises:
        PlanError: the plan and the file differ, or an `"auto"` has no value; one line each.
    """
    config: dict[str, Any] = copy.deepcopy(dict(base))
    plan = fill_from_config(plan, base, ranks)
    if "bfloat16" in config:  # the former name
        config.setdefault("bf16", config.pop("bfloat16"))
    conflicts = _merge_plan(config, plan, base)
    conflicts += _merge_sizes(config, plan, ranks, rows)
    if (
        is_enabled(config, "torch_autocast")
        and (dtype := autocast_dtype(config)) != plan.precision.compute
    ):
        conflicts.append(
            f"torch_autocast.dtype: Plan.precision has {plan.precision.compute!r}, "
            f"the config has {dtype!r}"
        )
    if conflicts:
        lines = "\n".join(f"  {line}" for line in conflicts)
        raise PlanError(
            f"The plan and its DeepSpeed config differ:\n{lines}\n"
            f'Set the same value in both, or write "auto" in the config.'
        )
    _fill_widths(config, hidden, partial=partial)
    _fill_values(config, values or FromConfig())
    _check_autos(config)
    return _with_defaults(config, plan, base)


def _merge(
    config: dict[str, Any],
    conflicts: list[str],
    path: str,
    value: Any,
    reason: str,
    *,
    write: bool = True,
) -> None:
    """Write a plan's value, unless it is None or the file has one; note a conflict.

    Args:
        write: Whether to write it also where the file does not have the entry.
    """
    written = get(config, path)
    if value is None:
        if written == AUTO and path not in _WIDTHS:
            drop(config, path)
    elif written == AUTO or (written is None and write):
        set_in(config, path, value)
    elif written is not None and (
        written != value or (type(written) is bool) is not (type(value) is bool)
    ):
        conflicts.append(f"{path}: {reason}, the config has {written!r}")


def _merge_plan(config: dict[str, Any], plan: Plan, file: Mapping[str, Any]) -> list[str]:
    """Write every entry that a plan sets, except the batch sizes; conflicts."""
    strategy, precision = plan.strategy, plan.precision
    conflicts: list[str] = []
    merge = functools.partial(_merge, config, conflicts)

    def merge_field(path: str, field: str, *, used: bool = True) -> None:
        value = getattr(strategy, field) if used else None
        merge(path, value, f"{field} has {value!r}")

    merge("gradient_accumulation_steps", plan.accumulate, f"Plan.accumulate has {plan.accumulate}")
    norm, clips = plan.clip_norm or 0.0, plan.clip_norm is not None
    merge("gradient_clipping", norm, f"Plan.clip_norm has {norm}", write=clips)
    compute = "fp32" if is_enabled(file, "torch_autocast") else precision.compute
    for name in ("bf16", "fp16"):
        used = compute == name
        reason = f"Plan.precision has {precision.compute!r}"
        merge(f"{name}.enabled", used, reason, write=used)
    if compute == "fp16" and precision.scale != LossScale():
        for name, value in _scale_entries(precision.scale).items():
            merge(f"fp16.{name}", value, f"Plan.precision.scale has {value}")
    for name, field in _ZERO_FIELDS.items():
        merge_field(f"{ZERO}.{name}", field)
    leaves = list(strategy.leaf_modules) or None
    merge(f"{ZERO}.leaf_module.classes", leaves, f"leaf_modules has {leaves}")
    for field, name in _OFFLOADED.items():
        merge_field(f"{ZERO}.{name}.device", field)
        where = getattr(strategy, field) or device(section(file, ZERO), name)
        merge_field(f"{ZERO}.{name}.nvme_path", "nvme_path", used=where == "nvme")
        merge_field(f"{ZERO}.{name}.pin_memory", "pin_memory", used=where in ("cpu", "nvme"))
    merge_field("tensor_parallel.autotp_size", "tensor_parallel")
    merge_field("sequence_parallel_size", "sequence_parallel")
    return conflicts


def _merge_sizes(config: dict[str, Any], plan: Plan, ranks: int, rows: int | None) -> list[str]:
    """Micro-batch and global batch, each from the other; conflicts."""
    written, total = (_count(config, path) for path in (_MICRO, _TOTAL))
    named = {
        "the loader": rows,
        "micro_batch": plan.strategy.micro_batch,
        "the config": written,
    }
    said = {who: number for who, number in named.items() if number is not None}
    if len(set(said.values())) > 1:
        return [f"{_MICRO}: {', '.join(f'{who} has {number}' for who, number in said.items())}"]
    parts = plan.accumulate * ranks
    known = next(iter(said.values()), max(1, (total or 1) // parts))
    if total is not None and total != known * parts:
        return [
            f"{_TOTAL}: {known} rows x accumulate={plan.accumulate} x {ranks} data ranks "
            f"make {known * parts}, the config has {total}"
        ]
    config.update({_MICRO: known, _TOTAL: known * parts})
    return []


def _count(config: Mapping[str, Any], path: str) -> int | None:
    value = get(config, path)
    if value is None or value == AUTO:
        return None
    if type(value) is not int or value < 1:
        raise PlanError(
            f'The DeepSpeed config has {path}={value!r}. Write a whole number of rows, or "auto".'
        )
    return value


def _fill_widths(config: dict[str, Any], hidden: int | None, *, partial: bool) -> None:
    """Bucket sizes from the hidden size, as users of `"auto"` expect."""
    left = [path for path in _WIDTHS if get(config, path) == AUTO]
    if left and hidden is None and not partial:
        raise PlanError(
            f'The DeepSpeed config leaves {", ".join(left)} at "auto", which depends on '
            f"the hidden size, and the model has no config.hidden_size (nor hidden_sizes, nor "
            f"text_config). Set reduce_bucket_size, stage3_prefetch_bucket_size and "
            f"stage3_param_persistence_threshold to numbers."
        )
    for path in left:
        if hidden is None or partial:
            drop(config, path)
        else:
            set_in(config, path, _WIDTHS[path](hidden))


def _fill_values(config: dict[str, Any], values: FromConfig) -> None:
    known = {name: value for name, value in attrs.asdict(values).items() if value is not None}
    if values.betas is not None:
        known["betas"] = list(values.betas)
    if values.lr is not None:
        known.setdefault("warmup_max_lr", values.lr)
    for part in ("optimizer", "scheduler"):
        for name, value in section(section(config, part), "params").items():
            if value == AUTO and name in known:
                set_in(config, f"{part}.params.{name}", known[name])


def _check_autos(config: Mapping[str, Any]) -> None:
    left = [path for path in autos(config) if not path.startswith(_DEEPSPEED_AUTO)]
    if not left:
        return
    known = attrs.fields_dict(FromConfig)
    names = [name for path in left if (name := path.rsplit(".", 1)[-1]) in known]
    hint = f" For optimizer and scheduler: fx.from_config({names[0]}=...)." if names else ""
    raise PlanError(
        f'The DeepSpeed config leaves {", ".join(left)} at "auto", for which neither the plan nor '
        f"the model has a value. Set them.{hint}"
    )


def _with_defaults(config: dict[str, Any], plan: Plan, file: Mapping[str, Any]) -> dict[str, Any]:
    """Set entries that neither side gave and whose DeepSpeed default differs."""
    stage = get(config, f"{ZERO}.stage")
    if stage is None:
        set_in(config, f"{ZERO}.stage", 2)
    elif type(stage) is not int:
        raise PlanError(f"The DeepSpeed config has stage={stage!r}. Use 0, 1, 2 or 3.")
    zero = config[ZERO]
    config.setdefault("zero_allow_untested_optimizer", True)
    if not _counts_itself(config):
        # A step decides where a window ends, so backward only accumulates.
        config.setdefault("managed_gradient_accumulation", False)
    if device(zero, "offload_optimizer") != "none":
        # This library chooses which optimizer computes, by DeepSpeed(cpu_optimizer=...).
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    half, scale = section(config, "fp16"), plan.precision.scale
    if half.get("enabled") and (scale != LossScale() or not section(file, "fp16")):
        config["fp16"] = {**_scale_entries(scale), "hysteresis": 1, **half}
    return config


def _counts_itself(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed 0.19.8 requires counting micro-batches itself."""
    zero = section(config, ZERO)
    return bool(
        section(config, "compile").get("deepcompile")
        or zero.get("zenflow")
        or (zero.get("stage") in (0, 1) and zero.get("overlap_comm"))
    )


def config_problems(config: Mapping[str, Any], ranks: int) -> tuple[str, ...]:
    """Problems of a resolved config: incompatible entries."""
    zero = section(config, ZERO)
    stage = zero.get("stage", 0)
    optimizer, parameters = device(zero, "offload_optimizer"), device(zero, "offload_param")
    copies = zero.get("zero_hpz_partition_size") or 1
    sequences = config.get("sequence_parallel_size") or 1
    only_at_3 = {
        f"offload_parameters={parameters!r}": parameters != "none",
        "offload_optimizer='nvme'": optimizer == "nvme",
        f"partial_ranks={copies}": copies != 1,
        "quantized_weights=True": zero.get("zero_quantized_weights") is True,
        "quantized_gradients=True": zero.get("zero_quantized_gradients") is True,
        "leaf_modules": bool(section(zero, "leaf_module").get("classes")),
    }
    no_path = [
        name
        for name in _OFFLOADED.values()
        if device(zero, name) == "nvme" and not section(zero, name).get("nvme_path")
    ]
    wrong = {
        "offload_optimizer='cpu' needs stage 1, 2 or 3, since stage 0 does not shard states.": (
            optimizer == "cpu" and stage == 0
        ),
        "Offloading to nvme needs nvme_path, a folder on a local drive.": bool(no_path),
        f"partial_ranks={copies} must divide the {ranks} data ranks.": (
            isinstance(copies, int) and ranks % copies != 0
        ),
        # Wrong gradients, without a word from DeepSpeed.
        "gradient_allreduce_op='sum' in the file sums gradients, but a step needs their mean over "
        "the ranks. Remove it.": config.get("gradient_allreduce_op") == "sum",
        f"sequence_parallel={sequences} needs stage 0, 1 or 2: at stage 3 DeepSpeed scales "
        f"gradients by the ranks of a sequence in only one of its two reductions.": (
            sequences != 1 and stage == 3
        ),
    }
    problems = [f"{field} needs stage 3." for field, used in only_at_3.items() if used]
    problems = [] if stage == 3 else problems
    problems += [problem for problem, found in wrong.items() if found]
    return tuple(f"DeepSpeed: {problem}" for problem in problems)


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


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table inside a config; empty where it is absent or null."""
    entry = config.get(name)
    return entry if isinstance(entry, Mapping) else {}


def autos(data: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Paths of the entries left at "auto"."""
    paths: list[str] = []
    for key, value in data.items():
        if value == AUTO:
            paths.append(f"{prefix}{key}")
        elif isinstance(value, Mapping):
            paths += autos(value, f"{prefix}{key}.")
    return paths


def device(zero: Mapping[str, Any], name: str) -> str:
    """Where a ZeRO section offloads to: none, cpu or nvme."""
    return str(section(zero, name).get("device") or "none")


def get(config: Mapping[str, Any], path: str) -> Any:
    """The value at a path; None where there is none."""
    *tables, name = path.split(".")
    for table in tables:
        config = section(config, table)
    return config.get(name)


def set_in(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a path in place, with the tables on the way."""
    *tables, name = path.split(".")
    for table in tables:
        entries = config[table] = {} if config.get(table) is None else config[table]
        if not isinstance(entries, dict):
            raise PlanError(
                f"The DeepSpeed config has {table}={entries!r}, but {path} needs a table there."
            )
        config = entries
    config[name] = copy.deepcopy(value)


def drop(config: dict[str, Any], path: str) -> None:
    """Remove the value at a path in place."""
    *tables, name = path.split(".")
    for table in tables:
        config = config[table]
    del config[name]
