"""Convert an Accelerate config to a launch file, with a note for each key without counterpart."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from fxtrain.backends import strategies
from fxtrain.errors import PlanError
from fxtrain.interop.accelerate_rules import (
    FP8,
    RULES,
    Facts,
    Sets,
    degree,
    outcome_of,
    truth,
    whole,
)
from fxtrain.launchers import LAUNCHERS
from fxtrain.launchers.config import launch_config
from fxtrain.state.parsing import near, put

# Sections, with their short names and the prefixes of their keys.
_SECTIONS = {
    "fsdp_config": ("fsdp", "fsdp_"),
    "deepspeed_config": ("deepspeed", ""),
    "megatron_lm_config": ("megatron_lm", "megatron_lm_"),
    "fp8_config": ("fp8", "fp8_"),
    "dynamo_config": ("dynamo", "dynamo_"),
    "ipex_config": ("ipex", ""),
    "mpirun_config": ("mpirun", ""),
    "parallelism_config": ("parallelism", "parallelism_config_"),
}
# Sections that apply only to one distributed_type.
_ONLY = {"fsdp": "FSDP", "deepspeed": "DEEPSPEED", "megatron_lm": "MEGATRON_LM"}
_ALSO = {
    "fp8": FP8,
    "megatron_lm": "Megatron-LM is not used; its parallelism is that of plan.mesh",
    "parallelism": "plan.mesh describes parallelism",
    "dynamo": "torch.compile is configured by plan.compile",
}
_KINDS = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed"}
_TYPES = (
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA",
    "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "TPU", "MEGATRON_LM",
    "DATA_PARALLEL", "MODEL_PARALLEL",
)  # fmt: skip


@attrs.frozen(kw_only=True)
class Note:
    """A key of the Accelerate config that cannot be converted unchanged.

    Attributes:
        key: Its name in the config, with its section.
        value: Its value in the config.
        text: What to do instead.
    """

    key: str
    value: object
    text: str


@attrs.frozen(kw_only=True)
class Converted:
    """An Accelerate config, converted to a launch file.

    Attributes:
        values: The converted values, as plain data in the tables `launch` and `plan`.
        notes: One for each key without a counterpart, or with a different meaning.
    """

    values: Mapping[str, Mapping[str, object]]
    notes: tuple[Note, ...] = ()


def convert_accelerate(data: object) -> Converted:
    """Convert an Accelerate config, of the current or an earlier version, to a launch file.

    Args:
        data: The parsed YAML or JSON.

    Raises:
        PlanError: the data is not an Accelerate config, or a value is invalid.

    Example:
        >>> from fxtrain.interop.accelerate_config import convert_accelerate
        >>> old = {"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "bf16"}
        >>> convert_accelerate(old).values
        {'launch': {'ranks': 8}, 'plan': {'precision': 'bf16'}}
    """
    raw = translate(data)
    values, unfit = _fitting(raw)
    launch_config(values)
    return Converted(values=values, notes=(*raw.notes, *unfit))


def translate(data: Any) -> Converted:
    """Convert a config without checking which strategies and launchers are available.

    Raises:
        PlanError: as `convert_accelerate`.
    """
    facts, kind = _facts(data)
    notes: list[Note] = []
    problems: list[str] = []
    sagemaker = str(facts.pop("compute_environment", "")).upper() == "AMAZON_SAGEMAKER"
    sections = put({}, "launch.launcher", "sagemaker") if sagemaker else {}
    compiles = str(facts.get("dynamo.backend", "NO")).upper() != "NO"
    for key, value in facts.items():
        section = key.partition(".")[0] if "." in key else ""
        unset = value in (None, "", [], {}) or (section == "dynamo" and not compiles)
        if unset or key == "distributed_type":
            continue
        sets, note = _apply(section, key, facts, problems)
        for path, result in sets.items():
            sections = _added(sections, path, result)
        if note:
            notes.append(Note(key=key, value=value, text=note))
    if problems:
        raise PlanError("\n".join(problems))
    if kind == "MEGATRON_LM":
        sections = put(sections, "plan.strategy", _megatron(facts))
    sections, first = _typed(sections, kind)
    return Converted(values=sections, notes=(*first, *notes))


def _facts(data: Any) -> tuple[dict[str, Any], str]:
    if not isinstance(data, Mapping) or "distributed_type" not in data:
        raise PlanError("This is not an Accelerate config: the key distributed_type is missing.")
    facts = dict(_flat(data))
    kind = facts["distributed_type"] = str(facts["distributed_type"]).upper()
    if kind not in _TYPES:
        raise PlanError(f"distributed_type: unknown {kind!r}{near(kind, _TYPES)}")
    return facts, kind


def _apply(section: str, key: str, facts: Facts, problems: list[str]) -> tuple[Sets, str]:
    kind = facts["distributed_type"]
    if section in _ONLY and kind != _ONLY[section]:
        return {}, f"not used under {kind}"
    try:
        return outcome_of(RULES.get(key, _ALSO.get(section, "unknown key")), facts[key], facts)
    except (ValueError, TypeError, OverflowError) as error:
        problems.append(f"{key}: {error}")
        return {}, ""


def _flat(data: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys in a uniform format, with the section before a dot."""
    for key, value in data.items():
        if key == "dynamo_backend":  # how accelerate wrote it before it had a section
            yield "dynamo.backend", value
        elif key in _SECTIONS and isinstance(value, Mapping):
            name, prefix = _SECTIONS[key]
            for inner, setting in value.items():
                yield f"{name}.{str(inner).removeprefix(prefix)}", setting
        else:
            yield str(key), value


def _added(sections: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Set a value; lists from several keys are concatenated."""
    section, _, name = path.partition(".")
    before = sections.get(section, {}).get(name)
    if isinstance(before, list) and isinstance(value, list):
        value = [*before, *value]
    return put(sections, path, value)


def _megatron(facts: Facts) -> dict[str, Any]:
    """The strategy that corresponds to Megatron-LM's axes and its distributed optimizer."""
    tensor, pipeline = degree("tp_degree", facts), degree("pp_degree", facts)
    sharded = truth(facts.get("megatron_lm.use_distributed_optimizer") or False)
    stage: dict[str, Any] = {"kind": "fsdp", "mode": "grads_and_optimizer" if sharded else "none"}
    if tensor > 1:
        along = truth(facts.get("megatron_lm.sequence_parallelism") or False)
        stage["tensor"] = {"sequence": True} if along else {}
    if pipeline == 1:
        return stage if sharded or tensor > 1 else {"kind": "ddp"}
    parts = facts.get("megatron_lm.num_micro_batches")
    staged = {"kind": "pp", **({"microbatches": whole(parts)} if parts else {})}
    return {**staged, "stages": stage} if sharded or tensor > 1 else staged


def _typed(sections: dict[str, Any], kind: str) -> tuple[dict[str, Any], list[Note]]:
    """Apply the distributed_type itself."""
    notes: list[Note] = []
    plan, launch = dict(sections.get("plan", {})), dict(sections.get("launch", {}))
    if kind == "MULTI_CPU":
        launch["cpu"] = True
    if launch.get("cpu") and "gpus" in launch:
        text = "the run computes on the CPU"
        notes.append(Note(key="gpu_ids", value=launch.pop("gpus"), text=text))
    if kind == "MODEL_PARALLEL":
        text = "describe tensor and pipeline parallelism with plan.mesh and a strategy that uses it"
        notes.append(Note(key="distributed_type", value=kind, text=text))
    if kind in ("XLA", "TPU"):
        notes += _on_tpu(launch, plan)
    elif kind != "MEGATRON_LM":
        notes += _sharded(plan, kind)
    return {"launch": launch, "plan": plan}, notes


def _sharded(plan: dict[str, Any], kind: str) -> list[Note]:
    """Complete the strategy of a plan in place."""
    strategy, mesh = dict(plan.pop("strategy", {})), plan.get("mesh", {})
    if kind == "DEEPSPEED":
        if strategy.pop("tensor", None) is not None:
            strategy["tensor_parallel"] = mesh["tensor"]
        if plan.pop("context", None) is not None:
            strategy["sequence_parallel"] = mesh["context"]
    if kind in _KINDS:
        plan["strategy"] = {"kind": _KINDS[kind], **strategy}
    elif "tensor" in strategy or mesh.get("shard"):
        mode = {} if mesh.get("shard") else {"mode": "none"}
        plan["strategy"] = {"kind": "fsdp", **mode, **strategy}
    elif strategy:
        text = "applies to sharded parameters; set plan.strategy.kind = 'fsdp' to use it"
        return [
            Note(key=f"strategy.{key}", value=value, text=text) for key, value in strategy.items()
        ]
    return []


def _on_tpu(launch: dict[str, Any], plan: dict[str, Any]) -> list[Note]:
    """Change a launch and a plan in place to what TPUs support."""
    launch.setdefault("launcher", "tpu")
    dropped = [
        *((launch, f"launch.{name}", why) for name, why in _NOT_ON_TPUS["launch"].items()),
        *((plan, f"plan.{name}", why) for name, why in _NOT_ON_TPUS["plan"].items()),
    ]
    axes = dict(plan.get("mesh", {}))
    mesh = {name: axes.pop(name) for name in ("replicate", "shard") if name in axes}
    notes = [
        Note(key=path, value=value, text=why)
        for part, path, why in dropped
        if (value := part.pop(path.partition(".")[2], 1)) != 1
    ]
    notes += [
        Note(key=f"plan.mesh.{axis}", value=size, text="TPUs split data and parameters only")
        for axis, size in axes.items()
    ]
    if plan.get("precision", "fp32") not in ("fp32", "bf16"):
        text = "TPUs compute in bf16"
        notes.append(Note(key="mixed_precision", value=plan["precision"], text=text))
        plan["precision"] = "bf16"
    plan.pop("mesh", None)
    plan.update({"strategy": {"kind": "xla"}, **({"mesh": mesh} if mesh else {})})
    return notes


_ONE_PROCESS = "one process on each host drives all of its chips"
_NOT_ON_TPUS = {
    "launch": {
        "ranks": _ONE_PROCESS,
        "nodes": _ONE_PROCESS,
        "cpu": "does not apply to TPUs",
        "gpus": "does not apply to TPUs",
        "bind": "does not apply to TPUs",
    },
    "plan": {
        "strategy": "parameters are sharded over plan.mesh.shard",
        "compile": "torch_xla compiles what it traces",
        "context": "TPUs split data and parameters only",
    },
}


def _fitting(raw: Converted) -> tuple[dict[str, dict[str, Any]], list[Note]]:
    """The part that this version and the chosen launcher support, and notes on the rest."""
    notes: list[Note] = []
    plan: dict[str, Any] = dict(raw.values["plan"])
    launch: dict[str, Any] = dict(raw.values["launch"])
    if strategy := plan.pop("strategy", None):
        tags = {attrs.fields_dict(config)["kind"].default: config for config in strategies()}
        text = f"the strategy {strategy['kind']!r} of this version has no such field"
        if fit := _known(strategy, tags.get(strategy["kind"]), "plan.strategy", text, notes):
            plan["strategy"] = fit
    launcher = LAUNCHERS[launch.get("launcher", "native")]
    text = f"the launcher {launcher.name} has no such option"
    options = launch.pop("options", {})
    if fit := _known(options, launcher.options, "launch.options", text, notes):
        launch["options"] = fit
    for name in [name for name in _UNCOMMON if name in launch and name not in launcher.uses]:
        text = f"the launcher {launcher.name} sets this itself"
        notes.append(Note(key=f"launch.{name}", value=launch.pop(name), text=text))
    return {"launch": launch, "plan": plan}, notes


def _known(
    data: Mapping[str, Any], record: type | None, at: str, text: str, notes: list[Note]
) -> dict[str, Any]:
    fields = attrs.fields_dict(record) if record else {}
    notes += [
        Note(key=f"{at}.{name}", value=value, text=text)
        for name, value in data.items()
        if name not in fields
    ]
    return {name: value for name, value in data.items() if name in fields}


# Fields of a launch that some launchers set themselves.
_UNCOMMON = ("node_rank", "main_address", "main_port", "rendezvous", "bind")
