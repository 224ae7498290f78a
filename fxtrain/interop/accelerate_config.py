"""Convert an Accelerate config to a launch file, with a note for each key without counterpart.

The keys are those of accelerate 1.15: ClusterConfig and SageMakerConfig in
accelerate/commands/config/config_args.py, and the arguments of accelerate/commands/launch.py that
their sections set.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from fxtrain._other_names import hint
from fxtrain._record import shown
from fxtrain.errors import PlanError
from fxtrain.launchers import LAUNCHERS
from fxtrain.launchers.config import launch_config
from fxtrain.state.parsing import near, put, value_of

Facts = Mapping[str, Any]  # all keys: the section's name, a dot, and the key without its prefix
Sets = Mapping[str, Any]  # values by path in the launch file
# Of a value and all keys: what it sets, perhaps with a note; None without a counterpart.
Rule = Callable[[Any, Facts], Sets | tuple[Sets, str] | None]
Note = tuple[str, object, str]  # a key of the config, its value, and what to do instead

# Sections, with their short names and the prefixes of their keys.
_SECTIONS = {
    "fsdp_config": ("fsdp", "fsdp_"),
    "deepspeed_config": ("deepspeed", ""),
    "megatron_lm_config": ("megatron_lm", "megatron_lm_"),
    "fp8_config": ("fp8", "fp8_"),
    "dynamo_config": ("dynamo", "dynamo_"),
    "ipex_config": ("ipex", ""),
    "mpirun_config": ("mpirun", "mpirun_"),
    "parallelism_config": ("parallelism", "parallelism_config_"),
    "additional_args": ("estimator", ""),  # of SageMaker
}
# Sections that apply only to one distributed_type.
_ONLY = {"fsdp": "FSDP", "deepspeed": "DEEPSPEED", "megatron_lm": "MEGATRON_LM"}
_TYPES = (
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA",
    "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "TPU", "MEGATRON_LM",
    "DATA_PARALLEL", "MODEL_PARALLEL",
)  # fmt: skip
# Values that change nothing.
_USUAL = {
    "main_training_function": "main", "gpu_ids": "all", "fsdp.use_orig_params": True,
    "fsdp.sync_module_states": True, "fsdp.version": 2, "fsdp.backward_prefetch": "BACKWARD_PRE",
    "fsdp.backward_prefetch_policy": "BACKWARD_PRE", "parallelism.cp_comm_strategy": "allgather",
}  # fmt: skip
# Keys of which NO is a word, which YAML reads as false where it has no quotes.
_WORDS_WITH_NO = ("distributed_type", "mixed_precision", "dynamo.backend")
_PREFETCH = (
    "FSDP2 always gathers the next block while it computes the gradients of one, as BACKWARD_PRE "
    "does; plan.strategy.backward_prefetch gathers more blocks ahead"
)


def convert_accelerate(
    data: object,
) -> tuple[Mapping[str, Mapping[str, object]], list[Note]]:
    """Convert an Accelerate config, of the current or an earlier version, to a launch file.

    Args:
        data: The parsed YAML or JSON.

    Returns:
        The converted values, as plain data in the tables `launch` and `plan`; and for each key
        without a counterpart, or with a different meaning: its name in the config with its
        section, its value, and what to do instead.

    Raises:
        PlanError: the data is not an Accelerate config, or a value is invalid.

    Example:
        >>> from fxtrain.interop.accelerate_config import convert_accelerate
        >>> old = {"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "bf16"}
        >>> convert_accelerate(old)
        ({'launch': {'ranks': 8}, 'plan': {'precision': 'bf16'}}, [])
    """
    if not isinstance(data, Mapping) or "distributed_type" not in data:
        raise PlanError("This is not an Accelerate config: the key distributed_type is missing.")
    facts = dict(_flat(data))
    facts |= {key: "no" for key in _WORDS_WITH_NO if facts.get(key) is False}
    kind = facts["distributed_type"] = str(facts["distributed_type"]).upper()
    if kind not in _TYPES:
        raise PlanError(f"distributed_type: unknown {kind!r}{near(kind, _TYPES)}")
    notes: list[Note] = []
    values: dict[str, Any] = {"launch": {}, "plan": {}}
    problems: list[str] = []
    for key, value in facts.items():
        try:
            sets, text = _outcome(key, value, facts)
        except (ValueError, TypeError, OverflowError) as error:
            problems.append(f"{key}: {error}")
            continue
        for path, result in sets.items():
            values = _added(values, path, result)
        if text:
            notes.append((key, value, text))
    if problems:
        raise PlanError("\n".join(problems))
    _complete(values["launch"], values["plan"], facts, notes)
    launch_config(values)
    return values, notes


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


def _outcome(key: str, value: Any, facts: Facts) -> tuple[Sets, str]:
    """What a key sets, and the note on it; empty if there is nothing to say."""
    section, _, name = key.rpartition(".")
    kind, rule = facts["distributed_type"], RULES.get(key)
    unset = (None, "", [], {}) if rule else (None, "", [], {}, False, "no")
    unused = section == "dynamo" and str(facts.get("dynamo.backend", "NO")).upper() == "NO"
    if key == "distributed_type" or value in unset or unused or _USUAL.get(key) == value:
        return {}, ""
    if _ONLY.get(section, kind) != kind:
        return {}, f"not used under {kind}"
    found = None if rule is None else rule(value, facts)
    if found is None:
        prefix = f"{section}_" if section in ("fsdp", "dynamo", "megatron_lm", "fp8") else ""
        text = hint(f"{prefix}{name}", at="file") or hint(name, at="file")
        return {}, text.strip().rstrip(".") or "it has no counterpart"
    return found if isinstance(found, tuple) else (found, "")


def _added(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Set a value; lists from several keys are concatenated."""
    section, _, name = path.partition(".")
    before = values[section].get(name)
    if isinstance(before, list) and isinstance(value, list):
        value = [*before, *value]
    return put(values, path, value)


def _complete(
    launch: dict[str, Any], plan: dict[str, Any], facts: Facts, notes: list[Note]
) -> None:
    """Complete the strategy, and leave out what the kind of launch does not have, in place."""
    kind = facts["distributed_type"]
    if kind == "MULTI_CPU":
        launch["cpu"] = True
    if launch.get("cpu") and "gpus" in launch:
        notes.append(("gpu_ids", launch.pop("gpus"), "the run computes on the CPU"))
    if kind == "MODEL_PARALLEL":
        text = "describe tensor and pipeline parallelism with plan.mesh and a strategy that uses it"
        notes.append(("distributed_type", kind, text))
    if kind in ("XLA", "TPU"):
        _on_tpu(launch, plan, notes)
    elif kind == "MEGATRON_LM":
        plan["strategy"] = _megatron(facts)
    else:
        _sharded(plan, kind, notes)
    launcher = LAUNCHERS[launch.get("launcher", "native")]
    known = attrs.fields_dict(launcher.options) if launcher.options else {}
    _keep(launch.get("options", {}), known, "launch.options", notes, launcher.name)
    if not launch.get("options", True):
        del launch["options"]
    set_by_some = ("node_rank", "main_address", "main_port", "rendezvous", "bind")
    fields = {name for name in launch if name not in set_by_some or name in launcher.uses}
    _keep(launch, fields, "launch", notes, launcher.name)


def _keep(table: dict[str, Any], names: Any, path: str, notes: list[Note], user: str) -> None:
    """Drop the entries of a table whose names are not in `names`, in place, with a note on each."""
    for name in [name for name in table if name not in names]:
        if (value := table.pop(name)) != 1:
            text = f"{user} has no such setting, or sets it itself"
            notes.append((f"{path}.{name}", value, text))


def _sharded(plan: dict[str, Any], kind: str, notes: list[Note]) -> None:
    """Complete the strategy of a plan in place."""
    strategy, mesh = dict(plan.pop("strategy", {})), plan.get("mesh", {})
    if kind == "DEEPSPEED":
        if strategy.pop("tensor", None) is not None:
            strategy["tensor_parallel"] = mesh["tensor"]
        if plan.pop("context", None) is not None:
            strategy["sequence_parallel"] = mesh["context"]
    if kind in ("FSDP", "DEEPSPEED"):
        plan["strategy"] = {"kind": kind.lower(), **strategy}
    elif "tensor" in strategy or mesh.get("shard"):
        mode = {} if mesh.get("shard") else {"mode": "none"}
        plan["strategy"] = {"kind": "fsdp", **mode, **strategy}
    else:
        _keep(strategy, (), "plan.strategy", notes, "a strategy that does not shard")


def _megatron(facts: Facts) -> dict[str, Any]:
    """The strategy that corresponds to Megatron-LM's axes and its distributed optimizer."""
    tensor, pipeline = _degree("tp_degree", facts), _degree("pp_degree", facts)
    sharded = _number(facts.get("megatron_lm.use_distributed_optimizer") or False)
    stage: dict[str, Any] = {"kind": "fsdp", "mode": "grads_and_optimizer" if sharded else "none"}
    if tensor > 1:
        along = _number(facts.get("megatron_lm.sequence_parallelism") or False)
        stage["tensor"] = {"sequence": True} if along else {}
    if pipeline == 1:
        return stage if sharded or tensor > 1 else {"kind": "ddp"}
    parts = facts.get("megatron_lm.num_micro_batches")
    staged = {"kind": "pp", **({"microbatches": _number(parts)} if parts else {})}
    return {**staged, "stages": stage} if sharded or tensor > 1 else staged


def _on_tpu(launch: dict[str, Any], plan: dict[str, Any], notes: list[Note]) -> None:
    """Change a launch and a plan in place to what TPUs support.

    One process on each host drives all of its chips, which split data and parameters only.
    """
    launch.setdefault("launcher", "tpu")
    _keep(launch, set(launch) - _NOT_ON_TPUS, "launch", notes, "a TPU")
    _keep(plan, set(plan) - _NOT_ON_TPUS, "plan", notes, "a TPU")
    if "mesh" in plan:
        plan["mesh"] = dict(plan["mesh"])
        _keep(plan["mesh"], ("replicate", "shard"), "plan.mesh", notes, "a TPU")
    if plan.get("precision", "fp32") not in ("fp32", "bf16"):
        notes.append(("mixed_precision", plan["precision"], "TPUs compute in bf16"))
        plan["precision"] = "bf16"
    plan["strategy"] = {"kind": "xla"}


_NOT_ON_TPUS = {"ranks", "nodes", "cpu", "gpus", "bind", "strategy", "compile", "context"}


def _number(value: Any) -> Any:
    """A number or a boolean, which YAML may contain as a string."""
    word = value.lower() if isinstance(value, str) else value
    if isinstance(word, str):
        word = {"yes": True, "no": False}.get(word, value_of(word))
    if not isinstance(word, bool | int | float):
        raise ValueError(f"expected a number, yes or no, found {shown(value)}")
    return word


def _text(value: Any) -> str:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError(f"expected a string, found {shown(value)}")
    return str(value)


def _lower(value: Any) -> str:
    return _text(value).lower()


def _words(value: Any) -> list[str]:
    """A list of strings, or one string with commas."""
    entries = value if isinstance(value, list) else _text(value).split(",")
    return [_text(entry).strip() for entry in entries if str(entry).strip()]


def _to(path: str, read: Callable[[Any], Any]) -> Rule:
    return lambda value, _: {path: read(value)}


def _if(path: str, result: Any = True) -> Rule:  # noqa: FBT002 - the value of a field
    """A rule for a boolean, which sets nothing if false."""
    return lambda value, _: {path: result} if _number(value) else {}


def _degree(key: str, facts: Facts) -> int:
    """Ranks of one of Megatron-LM's axes."""
    return max(1, _number(facts.get(f"megatron_lm.{key}") or 1))


def _ranks(value: Any, facts: Facts) -> Sets | tuple[Sets, str] | None:
    total, nodes = _number(value), max(1, _number(facts.get("num_machines") or 1))
    if total < 1:
        return None
    uneven = f"{total} ranks do not divide evenly over {nodes} nodes; launch.ranks is per node"
    return {"launch.ranks": -(-total // nodes)}, uneven if total % nodes else ""


def _rendezvous(value: Any, facts: Facts) -> Sets | None:
    if _number(facts.get("num_machines") or 1) < 2:
        return {}
    return {"launch.rendezvous": value} if value in ("static", "c10d") else None


_HYBRID = "set plan.strategy.shard to the ranks of a node"
_FSDP_MODES: Mapping[str, tuple[Sets, str]] = {
    word: ({"plan.strategy.mode": mode}, note)
    for mode, words, note in (
        ("full", "full_shard 1 true", ""),
        ("full", "hybrid_shard 4", _HYBRID),
        ("grads_and_optimizer", "shard_grad_op 2 false", ""),
        ("grads_and_optimizer", "hybrid_shard_zero2 5", _HYBRID),
        ("none", "no_shard 3", ""),
    )
    for word in words.split()
}


def _choice(known: Mapping[str, Sets | tuple[Sets, str]]) -> Rule:
    """A rule for a value that is one of some words, in any case."""
    return lambda value, _: known.get(str(value).lower())


def _over(path: str, least: float, also: Sets | None = None) -> Rule:
    """A rule for a number, which sets nothing unless it is larger; and what it implies."""
    return lambda value, _: (
        {path: number, **(also or {})} if (number := _number(value)) > least else {}
    )


def _recompute(value: Any, facts: Facts) -> Sets | None:
    blocks = facts.get("fsdp.transformer_layer_cls_to_wrap")
    if not _number(value):
        return {}
    return {"plan.recompute": _words(blocks)} if blocks else None


def _offload(field: str) -> Rule:
    return _choice({"none": {}, **{to: {f"plan.strategy.{field}": to} for to in ("cpu", "nvme")}})


_RECIPES = {"te": "te", "ao": "float8", "torchao": "float8", "msamp": "float8"}


def _recipe(facts: Facts) -> str | None:
    """The kind of recipe of a plan that computes in fp8, which DeepSpeed's engine does not."""
    chosen = str(facts.get("mixed_precision", "")).upper() == "FP8"
    if not chosen or facts["distributed_type"] == "DEEPSPEED":
        return None
    return _RECIPES.get(str(facts.get("fp8.backend", "AO")).lower())


def _mixed_precision(value: Any, facts: Facts) -> Sets | tuple[Sets, str] | None:
    name = _lower(value)
    if name == "fp8" and facts["distributed_type"] == "DEEPSPEED":
        return {"plan.precision": "bf16"}, "DeepSpeed computes in bf16 instead"
    known = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": {"compute": "fp8"}}
    return {"plan.precision": known[name]} if name in known else None


def _fp8_backend(value: Any, facts: Facts) -> Sets | tuple[Sets, str] | None:
    recipe = _recipe(facts)
    if recipe is None:
        return None
    note = "MS-AMP is no longer maintained; torchao's float8 is used instead"
    return {"plan.precision.recipe.kind": recipe}, note if _lower(value) == "msamp" else ""


def _fp8(recipe: str, name: str, read: Callable[[Any], Any]) -> Rule:
    """A rule for a key of the fp8 section that one kind of recipe has."""
    path = "plan.precision.recipe"

    def rule(value: Any, facts: Facts) -> Sets | None:
        only_fsdp = name == "gather" and facts["distributed_type"] != "FSDP"
        no_recipe = name == "format" and _lower(value) == "e5m2"  # trains in it alone
        if _recipe(facts) != recipe or only_fsdp or no_recipe:
            return None
        return {f"{path}.kind": recipe, f"{path}.{name}": read(value)}

    return rule


def _ipex(value: Any, _: Facts) -> tuple[Sets, str]:
    text = "IPEX is archived; use plan.precision and plan.compile with torch's own CPU and XPU"
    return {}, text if _number(value) else ""


_O, _S = "launch.options", "plan.strategy"

_RULES: Mapping[str, Rule] = {  # by names
    "compute_environment": _choice(
        {"local_machine": {}, "amazon_sagemaker": {"launch.launcher": "sagemaker"}}
    ),
    "num_processes": _ranks,
    "num_machines": _to("launch.nodes", _number),
    "machine_rank": _to("launch.node_rank", _number),
    "main_process_ip": _to("launch.main_address", _text),
    "main_process_port": _to("launch.main_port", _number),
    "rdzv_backend": _rendezvous,
    "gpu_ids": lambda value, _: (
        {} if str(value).upper() == "ALL" else {"launch.gpus": _words(value)}
    ),
    "fp16": _if("plan.precision", "fp16"),
    "use_cpu": _if("launch.cpu"),
    "enable_cpu_affinity": _if("launch.bind", "node"),
    "num_cpu_threads_per_process": _to("launch.threads", _number),
    "downcast_bf16": _if("launch.env", ["XLA_DOWNCAST_BF16=1"]),
    "tpu_use_cluster": _if("launch.launcher", "tpu-pod"),
    "tpu_name": _to(f"{_O}.name", _text),
    "tpu_zone": _to(f"{_O}.zone", _text),
    "tpu_use_sudo": _if(f"{_O}.sudo"),
    "tpu_env": _to("launch.env", _words),
    "commands": _to(f"{_O}.setup", _words),
    "fsdp.sharding_strategy fsdp.reshard_after_forward": _choice(_FSDP_MODES),
    "fsdp.offload_params": _if(f"{_S}.offload"),
    "fsdp.cpu_offload_pin_memory": _to(f"{_S}.pin", _number),
    "fsdp.auto_wrap_policy": lambda value, _: None if str(value).upper() == "NO_WRAP" else {},
    "fsdp.transformer_layer_cls_to_wrap": _to(f"{_S}.wrap", _words),
    "fsdp.min_num_params": lambda value, _: (
        {f"{_S}.min_params": int(_number(value))} if _number(value) >= 1 else {}
    ),
    "fsdp.backward_prefetch fsdp.backward_prefetch_policy": lambda value, _: ({}, _PREFETCH),
    "fsdp.forward_prefetch": _if(f"{_S}.forward_prefetch", 1),
    "fsdp.activation_checkpointing": _recompute,
    "deepspeed.deepspeed_config_file": _to(f"{_S}.config", _text),
    "deepspeed.zero_stage": _to(f"{_S}.stage", _number),
    "deepspeed.offload_optimizer_device": _offload("offload_optimizer"),
    "deepspeed.offload_param_device": _offload("offload_parameters"),
    "deepspeed.offload_optimizer_nvme_path deepspeed.offload_param_nvme_path": _to(
        f"{_S}.nvme_path", _text
    ),
    "deepspeed.gradient_accumulation_steps": _to("plan.accumulate", _number),
    "deepspeed.gradient_clipping": _to("plan.clip_norm", _number),
    "deepspeed.zero3_save_16bit_model": _if(f"{_S}.gather_16bit_weights"),
    "deepspeed.deepspeed_moe_layer_cls_names": _to(f"{_S}.leaf_modules", _words),
    "deepspeed.deepspeed_multinode_launcher": _choice(
        {"standard": {}, "slurm": {"launch.launcher": "slurm"}}
    ),
    "dynamo.backend": _to("plan.compile.backend", _lower),
    "dynamo.mode": lambda value, _: (
        {} if value == "default" else {"plan.compile.mode": _text(value)}
    ),
    "dynamo.use_fullgraph": _if("plan.compile.fullgraph"),
    "dynamo.use_dynamic": _if("plan.compile.dynamic"),
    "ipex.ipex ipex.use_xpu": _ipex,
    "mpirun.hostfile": lambda value, _: {"launch.launcher": "mpi", f"{_O}.hostfile": _text(value)},
    "mpirun.ccl": _over(f"{_O}.ccl_workers", 1),
    "parallelism.dp_replicate_size": _over("plan.mesh.replicate", 1),
    "parallelism.dp_shard_size": _over("plan.mesh.shard", 1),
    "parallelism.tp_size": _over("plan.mesh.tensor", 1, {f"{_S}.tensor": {}}),
    "megatron_lm.tp_degree": _over("plan.mesh.tensor", 1),
    "megatron_lm.pp_degree": _over("plan.mesh.pipeline", 1),
    "parallelism.cp_size parallelism.sp_size megatron_lm.context_parallel_size": _over(
        "plan.mesh.context", 1, {"plan.context": {}}
    ),
    # Under pipeline parallelism, the strategy sets them.
    "megatron_lm.num_micro_batches": lambda value, facts: (
        {"plan.accumulate": _number(value)} if _degree("pp_degree", facts) == 1 else {}
    ),
    "megatron_lm.gradient_clipping": _over("plan.clip_norm", 0),
    "megatron_lm.sequence_parallelism": lambda value, facts: (
        None if _number(value) and _degree("tp_degree", facts) == 1 else {}
    ),
    "megatron_lm.use_distributed_optimizer": lambda value, _: {},
    "ec2_instance_type": _to(f"{_O}.instance_type", _text),
    "iam_role_name": _to(f"{_O}.role", _text),
    "image_uri estimator.image_uri": _to(f"{_O}.image_uri", _text),
    "base_job_name estimator.base_job_name": _to(f"{_O}.base_job_name", _text),
    "estimator.output_path": _to(f"{_O}.output_path", _text),
    "estimator.source_dir": _to(f"{_O}.source_dir", _text),
    "estimator.use_spot_instances": _to(f"{_O}.spot", _number),
    "estimator.max_run": _to(f"{_O}.max_run_s", _number),
    "estimator.max_wait": _to(f"{_O}.max_wait_s", _number),
    "pytorch_version": _to(f"{_O}.framework_version", _text),
    "py_version": _to(f"{_O}.py_version", _text),
    "mixed_precision": _mixed_precision,
    "fp8.backend": _fp8_backend,
    "fp8.format": _fp8("te", "format", _lower),
    "fp8.margin": _fp8("te", "margin", _number),
    "fp8.amax_history_length fp8.amax_history_len": _fp8("te", "history", _number),
    "fp8.amax_compute_algorithm fp8.amax_compute_algo": _fp8("te", "amax", _lower),
    "fp8.use_autocast_during_eval": _fp8("te", "evaluate", _number),
    "fp8.use_mxfp8_block_scaling": _fp8(
        "te", "scaling", lambda value: "mxfp8" if _number(value) else "delayed"
    ),
    "fp8.enable_fsdp_float8_all_gather": _fp8(
        "float8", "gather", lambda value: "fp8" if _number(value) else "plan"
    ),
    "fp8.pad_inner_dim": _fp8("float8", "pad", _number),
}
RULES: Mapping[str, Rule] = {name: rule for names, rule in _RULES.items() for name in names.split()}
