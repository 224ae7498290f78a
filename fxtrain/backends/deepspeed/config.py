"""A DeepSpeed config from a plan, a file and what is known of model, loader and ranks.

Pure functions of values; DeepSpeed itself is not needed. `"auto"` has the meaning that users of
such files know from other libraries.
"""

import copy
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from torch import nn

from fxtrain.errors import PlanError
from fxtrain.state import DeepSpeed, FromConfig, LossScale, Plan
from fxtrain.state.deepspeed import WINDOW_ENTRIES, autocast_dtype, fill_from_config, read_config

AUTO = "auto"
ZERO = "zero_optimization"
_PREFETCH = f"{ZERO}.stage3_prefetch_bucket_size"
_THRESHOLD = f"{ZERO}.stage3_param_persistence_threshold"
_BUCKET = f"{ZERO}.reduce_bucket_size"
_MICRO, _, _TOTAL = WINDOW_ENTRIES
# Prefixes of entries in which "auto" is one of DeepSpeed's own values.
_DEEPSPEED_AUTO = ("data_types.keep_in_fp32_modules", f"{ZERO}.zenflow.", "expert_parallel.")
_OFFLOADED = {"offload_optimizer": "offload_optimizer", "offload_parameters": "offload_param"}


@attrs.frozen
class PlanEntry:
    """The plan's value for one entry; None leaves it open. Messages show `told` in its place."""

    path: str
    value: Any
    by: str
    write: bool = True
    told: Any = None


@attrs.frozen(kw_only=True)
class Inputs:
    """What a config depends on in addition to the plan.

    Attributes:
        ranks: Ranks over which data is split.
        rows: Rows of a micro-batch on one rank, if known.
        hidden: The model's hidden size, if known.
        values: Values for `"auto"` in the optimizer and scheduler sections.
        partial: Whether the model does not exist yet: entries that depend on it are omitted.
    """

    ranks: int = 1
    rows: int | None = None
    hidden: int | None = None
    values: FromConfig = attrs.field(factory=FromConfig)
    partial: bool = False


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
    facts = Inputs(
        ranks=ranks,
        rows=rows,
        hidden=hidden_size(model),
        values=FromConfig() if values is None else values,
    )
    config = resolve(plan, read_config(plan.strategy), facts)
    if problems := config_problems(config, ranks):
        raise PlanError("\n".join(problems))
    return config


def hidden_size(module: Any) -> int | None:
    """The hidden size of a model, from its `config` as Hugging Face models keep it."""
    config = getattr(module, "config", None)
    for part in (config, _member(config, "text_config")):
        size = _member(part, "hidden_size")
        if type(size) is int:
            return size
        sizes = _member(part, "hidden_sizes")
        if isinstance(sizes, list | tuple) and sizes:
            return max(sizes)
    return None


def resolve(plan: Plan, base: Mapping[str, Any], facts: Inputs) -> dict[str, Any]:
    """The config for DeepSpeed.

    Args:
        plan: A plan whose strategy is `DeepSpeed`.
        base: The file's content.
        facts: Of model, loader and ranks.

    Returns:
        New plain data; `base` is not changed.

    Raises:
        PlanError: the plan and the file differ, or an `"auto"` has no value; one line each.
    """
    config: dict[str, Any] = json.loads(json.dumps(dict(base)))
    plan = fill_from_config(plan, base, facts.ranks)
    if "bfloat16" in config:  # the former name
        config.setdefault("bf16", config.pop("bfloat16"))
    conflicts: list[str] = []
    for entry in all_plan_entries(plan, config):
        conflicts += _merge_entry(config, entry)
    conflicts += _merge_sizes(config, plan, facts)
    conflicts += _autocast_conflicts(config, plan)
    if conflicts:
        raise PlanError(
            "\n".join(
                [
                    "The plan and its DeepSpeed config differ:",
                    *(f"  {line}" for line in conflicts),
                    'Set the same value in both, or write "auto" in the config.',
                ]
            )
        )
    _fill_widths(config, facts)
    _fill_values(config, facts.values)
    _check_autos(config)
    return _with_defaults(config, plan)


def _merge_entry(config: dict[str, Any], entry: PlanEntry) -> list[str]:
    """Write the plan's value unless the file has one; return the line of a conflict."""
    written = get(config, entry.path)
    if entry.value is None:
        if written == AUTO and entry.path not in (_BUCKET, _PREFETCH, _THRESHOLD):
            drop(config, entry.path)
        return []
    if written is None or written == AUTO:
        if entry.write or written == AUTO:
            put(config, entry.path, entry.value)
        return []
    if _same(written, entry.value):
        return []
    value = entry.value if entry.told is None else entry.told
    return [f"{entry.path}: {entry.by} has {value!r}, the config has {written!r}"]


def _merge_sizes(config: dict[str, Any], plan: Plan, facts: Inputs) -> list[str]:
    """Micro-batch and global batch, each from the other; conflicts."""
    rows, total = (_count(config, path) for path in (_MICRO, _TOTAL))
    said = {
        who: number
        for who, number in (
            ("the loader", facts.rows),
            ("micro_batch", plan.strategy.micro_batch),
            ("the config", rows),
        )
        if number is not None
    }
    if len(set(said.values())) > 1:
        return [f"{_MICRO}: {', '.join(f'{who} has {number}' for who, number in said.items())}"]
    parts = plan.accumulate * facts.ranks
    known = next(iter(said.values()), max(1, (total or 1) // parts))
    if total is not None and total != known * parts:
        return [
            f"{_TOTAL}: {known} rows x accumulate={plan.accumulate} x {facts.ranks} data ranks "
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


def _autocast_conflicts(config: Mapping[str, Any], plan: Plan) -> list[str]:
    if not autocasts(config):
        return []
    dtype = autocast_dtype(config)
    if dtype == plan.precision.compute:
        return []
    return [
        f"torch_autocast.dtype: Plan.precision has {plan.precision.compute!r}, "
        f"the config has {dtype!r}"
    ]


def _fill_widths(config: dict[str, Any], facts: Inputs) -> None:
    """Bucket sizes from the hidden size, as users of `"auto"` expect."""
    widths = {_BUCKET: 1.0, _PREFETCH: 0.9, _THRESHOLD: 0.0}
    open_entries = [path for path in widths if get(config, path) == AUTO]
    if not open_entries:
        return
    hidden = facts.hidden
    if facts.partial:
        for path in open_entries:
            drop(config, path)
        return
    if hidden is None:
        raise PlanError(
            f'The DeepSpeed config leaves {", ".join(open_entries)} at "auto", which depends on '
            f"the hidden size, and the model has no config.hidden_size (nor hidden_sizes, nor "
            f"text_config). Set reduce_bucket_size, stage3_prefetch_bucket_size and "
            f"stage3_param_persistence_threshold to numbers."
        )
    for path in open_entries:
        square = int(widths[path] * hidden * hidden)
        put(config, path, 10 * hidden if path == _THRESHOLD else square)


def _fill_values(config: dict[str, Any], values: FromConfig) -> None:
    known = {name: value for name, value in attrs.asdict(values).items() if value is not None}
    if values.betas is not None:
        known["betas"] = list(values.betas)
    if values.lr is not None:
        known.setdefault("warmup_max_lr", values.lr)
    for part in ("optimizer", "scheduler"):
        for name, value in section(section(config, part), "params").items():
            if value == AUTO and name in known:
                put(config, f"{part}.params.{name}", known[name])


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


def _with_defaults(config: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Set entries that neither side gave and whose DeepSpeed default differs."""
    stage = get(config, f"{ZERO}.stage")
    if stage is None:
        put(config, f"{ZERO}.stage", 2)
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
    half = section(config, "fp16")
    if half.get("enabled"):
        scale = plan.precision.scale
        usual = {
            "loss_scale": 0,
            "initial_scale_power": power_of_two(scale.initial),
            "loss_scale_window": scale.interval,
            "hysteresis": 1,
        }
        config["fp16"] = {**usual, **half}
    return config


def _counts_itself(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed 0.19.8 requires counting micro-batches itself."""
    zero = section(config, ZERO)
    return bool(
        section(config, "compile").get("deepcompile")
        or zero.get("zenflow")
        or (zero.get("stage") in (0, 1) and zero.get("overlap_comm"))
    )


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    return value == wanted


def _member(part: Any, name: str) -> Any:
    return part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)


def config_problems(config: Mapping[str, Any], ranks: int) -> tuple[str, ...]:
    """Problems of a resolved config: incompatible entries."""
    zero = section(config, ZERO)
    stage = zero.get("stage", 0)
    optimizer, parameters = device(zero, "offload_optimizer"), device(zero, "offload_param")
    copies = zero.get("zero_hpz_partition_size")
    copies = copies if isinstance(copies, int) else 1  # DeepSpeed refuses other types
    checks = {
        f"offload_optimizer={optimizer!r} needs stage 1, 2 or 3, but this is stage {stage}, "
        f"which does not shard optimizer states.": optimizer != "none" and stage == 0,
        f"offload_optimizer='nvme' needs stage 3, but this is stage {stage}. Use "
        f"offload_optimizer='cpu', or stage=3.": optimizer == "nvme" and stage in (1, 2),
        f"offload_parameters={parameters!r} needs stage 3, but this is stage {stage}, which "
        f"does not shard parameters. Use stage=3.": parameters != "none" and stage != 3,
        "Offloading to nvme needs nvme_path, a folder on a local drive.": _needs_nvme_path(zero),
        f"partial_ranks={copies} needs stage 3, but this is stage {stage}.": copies > 1
        and stage != 3,
        f"partial_ranks={copies} must divide the {ranks} data ranks.": copies > 1
        and ranks % copies != 0,
        "gradient_allreduce_op='sum' in the file sums gradients, but a step needs their "
        "mean over the ranks. Remove it.": config.get("gradient_allreduce_op") == "sum",
    }
    checks |= _by_stage(config, zero, stage)
    leaves = section(zero, "leaf_module").get("classes")
    checks[f"leaf_modules needs stage 3, but this is stage {stage}."] = bool(leaves) and stage != 3
    return tuple(f"DeepSpeed: {problem}" for problem, applies in checks.items() if applies)


def _by_stage(config: Mapping[str, Any], zero: Mapping[str, Any], stage: Any) -> dict[str, bool]:
    sequences = config.get("sequence_parallel_size") or 1
    problems = {
        f"sequence_parallel={sequences} needs stage 0, 1 or 2: at stage 3 DeepSpeed scales "
        f"gradients by the ranks of a sequence in only one of its two "
        f"reductions.": sequences != 1 and stage == 3
    }
    for field in ("quantized_weights", "quantized_gradients"):
        problem = f"{field}=True needs stage 3, but this is stage {stage}."
        problems[problem] = zero.get(f"zero_{field}") is True and stage != 3
    return problems


def _needs_nvme_path(zero: Mapping[str, Any]) -> bool:
    return any(
        device(zero, name) == "nvme" and not section(zero, name).get("nvme_path")
        for name in ("offload_optimizer", "offload_param")
    )


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
    entries = [
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
        entries += [
            PlanEntry("fp16.loss_scale", 0, by),
            PlanEntry("fp16.initial_scale_power", power_of_two(scale.initial), by),
            PlanEntry("fp16.loss_scale_window", scale.interval, by),
        ]
    return entries


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
    entries = [
        PlanEntry(f"{ZERO}.{entry}", getattr(config, field), field)
        for field, entry in names.items()
    ]
    leaves = list(config.leaf_modules) or None
    return [*entries, PlanEntry(f"{ZERO}.leaf_module.classes", leaves, "leaf_modules")]


def _offload_entries(config: DeepSpeed, zero: Mapping[str, Any]) -> list[PlanEntry]:
    entries: list[PlanEntry] = []
    for field, name in _OFFLOADED.items():
        chosen = getattr(config, field)
        path = f"{ZERO}.{name}"
        entries.append(PlanEntry(f"{path}.device", chosen, field))
        used = chosen or device(zero, name)
        entries.append(
            PlanEntry(
                f"{path}.nvme_path", config.nvme_path if used == "nvme" else None, "nvme_path"
            )
        )
        pinned = None if used in ("none", AUTO) else config.pin_memory
        entries.append(PlanEntry(f"{path}.pin_memory", pinned, "pin_memory"))
    return entries


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


def autocasts(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed runs torch's autocast over full-precision weights."""
    return section(config, "torch_autocast").get("enabled") is True


def get(config: Mapping[str, Any], path: str) -> Any:
    """The value at a path; None where there is none."""
    *tables, name = path.split(".")
    for table in tables:
        config = section(config, table)
    return config.get(name)


def put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a path in place, with the tables on the way."""
    *tables, name = path.split(".")
    for table in tables:
        entries = config.setdefault(table, {})
        if entries is None:
            entries = config[table] = {}
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
