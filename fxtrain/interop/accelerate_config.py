"""From an Accelerate config to a launch file, with a note for whatever has no counterpart."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from fxtrain._errors import PlanError
from fxtrain.backends import strategies
from fxtrain.interop.accelerate_rules import Facts, KeyOutcome, megatron, rules
from fxtrain.launch import LAUNCHERS
from fxtrain.launch.config.launch_file import Section, problems_of
from fxtrain.launch.config.overlay import near, put

__all__ = ["Converted", "Note", "convert_accelerate", "translate"]

# Sections, and how their keys are written in them.
_SECTIONS = {
    "fsdp_config": ("fsdp", "fsdp_"),
    "deepspeed_config": ("deepspeed", ""),
    "megatron_lm_config": ("megatron_lm", "megatron_lm_"),
    "fp8_config": ("fp8", "fp8_"),
    "dynamo_config": ("dynamo", "dynamo_"),
    "mpirun_config": ("mpirun", ""),
    "parallelism_config": ("parallelism", "parallelism_config_"),
}
# What counts only under one distributed_type.
_ONLY = {"fsdp": "FSDP", "deepspeed": "DEEPSPEED", "megatron_lm": "MEGATRON_LM"}
_ALSO = {
    "fp8": "plans have no fp8; bf16 is used instead",
    "megatron_lm": "Megatron-LM is not used; its parallelism is that of fx.Mesh",
    "parallelism": "fx.Mesh describes parallelism",
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
    """A key of the Accelerate config that does not carry over as it is.

    Attributes:
        key: Its name there, with its section.
        value: Its value there.
        text: What to do instead.
    """

    key: str
    value: Any
    text: str


@attrs.frozen(kw_only=True)
class Converted:
    """What an Accelerate config says, in the words of a launch file.

    Attributes:
        section: Values that are in order.
        notes: One for each key without a counterpart, or with another meaning.
    """

    section: Section
    notes: tuple[Note, ...] = ()


def convert_accelerate(data: Any) -> Converted:
    """A launch file from the data of an Accelerate config, of this or an earlier version.

    Args:
        data: What its YAML or JSON holds.

    Raises:
        PlanError: it is no Accelerate config, or a value makes no sense.

    Example:
        >>> from fxtrain.interop.accelerate_config import convert_accelerate
        >>> old = {"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "bf16"}
        >>> convert_accelerate(old).section
        Section(launch={'ranks': 8}, plan={'precision': 'bf16'})
    """
    raw = translate(data)
    section, unfit = _fitting(raw)
    if told := problems_of(section):
        raise PlanError("\n".join(told))
    return Converted(section=section, notes=(*raw.notes, *unfit))


def translate(data: Any) -> Converted:
    """The launch file that all of fxtrain's parts would read, whether they are there or not.

    Raises:
        PlanError: as `convert_accelerate`.
    """
    facts, kind = _facts(data)
    table, notes, told = rules(), [], []
    sagemaker = str(facts.pop("compute_environment", "")).upper() == "AMAZON_SAGEMAKER"
    found = put({}, "launch.launcher", "sagemaker") if sagemaker else {}
    for key, value in facts.items():
        if value in (None, "", [], {}) or (key.startswith("dynamo.") and _is_plain(facts)):
            continue
        outcome = _apply(table, key, facts, kind, told)
        for path, said in outcome.sets.items():
            found = _added(found, path, said)
        if outcome.note:
            notes.append(Note(key=key, value=value, text=outcome.note))
    if told:
        raise PlanError("\n".join(told))
    if kind == "MEGATRON_LM":
        found = put(found, "plan.strategy", megatron(facts))
    found, said = _typed(found, kind)
    return Converted(section=Section(**found), notes=(*said, *notes))


def _facts(data: Any) -> tuple[dict[str, Any], str]:
    if not isinstance(data, Mapping) or "distributed_type" not in data:
        raise PlanError("It is no Accelerate config: the key distributed_type is missing.")
    facts = dict(_flat(data))
    kind = str(facts.pop("distributed_type")).upper()
    if kind not in _TYPES:
        raise PlanError(f"distributed_type: unknown {kind!r}{near(kind, _TYPES)}")
    return facts, kind


def _is_plain(facts: Facts) -> bool:
    """Nothing is compiled, whatever the other keys say."""
    return str(facts.get("dynamo.backend", "NO")).upper() == "NO"


def _apply(table: Facts, key: str, facts: Facts, kind: str, told: list[str]) -> KeyOutcome:
    section = key.partition(".")[0] if "." in key else ""
    if section in _ONLY and kind != _ONLY[section]:
        return KeyOutcome(note=f"not used under {kind}")
    if key not in table:
        return KeyOutcome(note=_ALSO.get(section, "no key of Accelerate that is known here"))
    try:
        return table[key](facts[key], facts)
    except (ValueError, TypeError, OverflowError) as error:
        told.append(f"{key}: {error}")
        return KeyOutcome()


def _flat(data: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Keys with their section before a dot, all written in one way."""
    for key, value in data.items():
        if key == "dynamo_backend":  # as accelerate wrote it before it had a section
            yield "dynamo.backend", value
        elif key in _SECTIONS and isinstance(value, Mapping):
            name, prefix = _SECTIONS[key]
            for inner, one in value.items():
                yield f"{name}.{str(inner).removeprefix(prefix)}", one
        else:
            yield str(key), value


def _added(found: dict[str, Any], path: str, said: Any) -> dict[str, Any]:
    """Lists of several keys add up."""
    section, _, name = path.partition(".")
    before = found.get(section, {}).get(name)
    if isinstance(before, list) and isinstance(said, list):
        said = [*before, *said]
    return put(found, path, said)


def _typed(found: dict[str, Any], kind: str) -> tuple[dict[str, Any], list[Note]]:
    """What the distributed_type itself says."""
    notes: list[Note] = []
    if kind in _KINDS:
        strategy = found.get("plan", {}).get("strategy", {})
        found = put(found, "plan.strategy", {"kind": _KINDS[kind], **strategy})
    elif kind != "MEGATRON_LM" and (strategy := found.get("plan", {}).get("strategy")):
        plan = {name: value for name, value in found["plan"].items() if name != "strategy"}
        found = {**found, "plan": plan}
        text = "it shards parameters; choose plan.strategy.kind = 'fsdp' for that"
        notes += [
            Note(key=f"strategy.{key}", value=one, text=text) for key, one in strategy.items()
        ]
    launch = found.get("launch", {})
    if kind == "MULTI_CPU":
        found = put(found, "launch.cpu", value=True)
    if kind in ("XLA", "TPU") and "launcher" not in launch:
        found = put(found, "launch.launcher", "tpu")
    if kind == "MODEL_PARALLEL":
        text = "describe tensor and pipeline parallelism by fx.Mesh and a strategy that uses it"
        notes.append(Note(key="distributed_type", value=kind, text=text))
    return found, notes


def _fitting(raw: Converted) -> tuple[Section, list[Note]]:
    """The part that this version and the chosen launcher can do, and notes on the rest."""
    notes: list[Note] = []
    plan, launch = dict(raw.section.plan), dict(raw.section.launch)
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
        text = f"the launcher {launcher.name} sees to that"
        notes.append(Note(key=f"launch.{name}", value=launch.pop(name), text=text))
    return Section(launch=launch, plan=plan), notes


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


# Fields of a launch that some launchers decide themselves.
_UNCOMMON = ("node_rank", "main_address", "main_port", "rendezvous", "bind")
