"""The counterpart of each key of an Accelerate config in a launch file.

The keys are those of accelerate 1.15: ClusterConfig and SageMakerConfig in
accelerate/commands/config/config_args.py, and the arguments of accelerate/commands/launch.py that
their sections set.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fxtrain._record import shown

Facts = Mapping[str, Any]
Sets = Mapping[str, Any]  # values by path in the launch file
Outcome = Sets | str | tuple[Sets, str]  # what a key sets, or a note on it, or both
_Function = Callable[[Any, Facts], Outcome]  # of the value and of all keys
# A note; a path and what converts the value for it; or a function.
Rule = str | tuple[str, Callable[[Any], Any]] | _Function
_S = "plan.strategy"
_O = "launch.options"
_RECIPE = "plan.precision.recipe"
FP8 = (
    "used with mixed_precision: fp8 and the backend that has this setting only; see fx.Float8 and "
    "fx.TE. DeepSpeed computes in bf16 instead"
)
MSAMP = (
    "MS-AMP is no longer maintained; torchao's float8 (fx.Float8) is used instead, which keeps "
    "weights and optimizer states in their own dtypes. For 8-bit optimizer states, pass "
    "torchao.optim.AdamWFp8 or AdamW8bit as the optimizer"
)
IPEX = (
    "IPEX is archived and fails with current torch. Use torch itself: its CPU and XPU backends, "
    "plan.precision = 'bf16' and plan.compile"
)


def whole(value: Any) -> int:
    """An integer, which YAML may contain as a string."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"expected an integer, found {shown(value)}")
    return int(value)


def number(value: Any) -> float:
    """A number, which YAML may contain as a string (1e-3)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected a number, found {shown(value)}")
    return float(value)


def truth(value: Any) -> bool:
    """A boolean, in any form that accelerate writes."""
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if isinstance(value, list | dict) or str(value).lower() not in known:
        raise ValueError(f"expected yes or no, found {shown(value)}")
    return known[str(value).lower()]


def text(value: Any) -> str:
    """A string, which YAML may contain as a number."""
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError(f"expected a string, found {shown(value)}")
    return str(value)


def words(value: Any) -> list[str]:
    """A list of strings, or one string with commas."""
    entries = value if isinstance(value, list) else text(value).split(",")
    return [text(entry).strip() for entry in entries if str(entry).strip()]


def when(sets: Sets | str, otherwise: str = "") -> _Function:
    """A rule for a boolean: what it sets, or a note, if true; a note if false."""
    return lambda value, _: sets if truth(value) else otherwise


def among(known: Mapping[str, Outcome], unknown: str) -> _Function:
    """A rule for one of several words, case-insensitive."""
    return lambda value, _: known.get(text(value).upper(), unknown)


def sized(axis: str, also: Sets | None = None) -> Rule:
    """A rule for the size of a mesh axis, with what uses the axis in a plan."""
    return lambda value, _: (
        {f"plan.mesh.{axis}": whole(value), **(also or {})} if whole(value) > 1 else {}
    )


def outcome_of(rule: Rule, value: Any, facts: Facts) -> tuple[Sets, str]:
    """What a key sets, and the note on it; empty if there is nothing to say.

    Raises:
        ValueError, TypeError, OverflowError: the value is none of this key.
    """
    if isinstance(rule, str):
        return {}, rule
    if isinstance(rule, tuple):
        path, convert = rule
        return {path: convert(value)}, ""
    outcome = rule(value, facts)
    if isinstance(outcome, tuple):
        return outcome
    return ({}, outcome) if isinstance(outcome, str) else (outcome, "")


def _ranks(value: Any, facts: Facts) -> Outcome:
    total, nodes = whole(value), max(1, whole(facts.get("num_machines") or 1))
    if total < 1:
        return "the number of ranks is not set; set launch.ranks or pass --ranks"
    uneven = f"{total} ranks do not divide evenly over {nodes} nodes; launch.ranks is per node"
    return {"launch.ranks": -(-total // nodes)}, uneven if total % nodes else ""


def _rendezvous(value: Any, facts: Facts) -> Outcome:
    if whole(facts.get("num_machines") or 1) < 2:
        return {}
    known = {"launch.rendezvous": value}
    return known if value in ("static", "c10d") else "launch.rendezvous is static or c10d"


def _recompute(value: Any, facts: Facts) -> Outcome:
    blocks = facts.get("fsdp.transformer_layer_cls_to_wrap")
    if not truth(value):
        return {}
    return {"plan.recompute": words(blocks)} if blocks else _NAME_BLOCKS


def degree(key: str, facts: Facts) -> int:
    """Ranks of one of Megatron-LM's axes."""
    return max(1, whole(facts.get(f"megatron_lm.{key}") or 1))


# Arguments of SageMaker's estimator, and the option for each.
_ESTIMATOR: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "use_spot_instances": ("spot", truth),
    "max_run": ("max_run_s", whole),
    "output_path": ("output_path", text),
    "source_dir": ("source_dir", text),
    "base_job_name": ("base_job_name", text),
    "image_uri": ("image_uri", text),
}


def _estimator_arguments(value: Any, _: Facts) -> Outcome:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a table, found {shown(value)}")
    sets = {
        f"{_O}.{option}": convert(value[name])
        for name, (option, convert) in _ESTIMATOR.items()
        if value.get(name) is not None
    }
    others = ", ".join(str(name) for name in value if name not in _ESTIMATOR)
    return sets, f"not passed on: {others}" if others else ""


_BACKENDS = {"TE": "te", "AO": "float8", "TORCHAO": "float8", "MSAMP": "float8"}


def _recipe(facts: Facts) -> str | None:
    """The kind of recipe that the backend of the fp8 section is."""
    return _BACKENDS.get(str(facts.get("fp8.backend", "AO")).upper())


def _uses_fp8(facts: Facts) -> bool:
    """Whether the plan computes in fp8: DeepSpeed's engine does not."""
    chosen = str(facts.get("mixed_precision", "")).upper() == "FP8"
    return chosen and facts["distributed_type"] != "DEEPSPEED"


def _mixed_precision(value: Any, facts: Facts) -> Outcome:
    name = text(value).upper()
    if name == "FP8" and _uses_fp8(facts):
        return {"plan.precision.compute": "fp8"}
    if name == "FP8":
        return {"plan.precision": "bf16"}, FP8
    known = {"NO": "fp32", "FP16": "fp16", "BF16": "bf16"}
    if name not in known:
        return "unknown precision; plan.precision is one of fp32, bf16, fp16, fp8"
    return {"plan.precision": known[name]}


def _fp8_backend(value: Any, facts: Facts) -> Outcome:
    note, recipe = MSAMP if text(value).upper() == "MSAMP" else "", _recipe(facts)
    if recipe is None:
        return "unknown backend; fx.Float8 and fx.TE stand for AO and TE"
    return ({f"{_RECIPE}.kind": recipe}, note) if _uses_fp8(facts) else note or FP8


def _fp8_field(recipe: str, name: str, read: Callable[[Any], Any]) -> Rule:
    """A rule for a key of the fp8 section that one kind of recipe has."""

    def rule(value: Any, facts: Facts) -> Outcome:
        if name == "format" and _lower(value) == "e5m2":
            return "Transformer Engine does not train in E5M2 alone; hybrid is used instead"
        if not _uses_fp8(facts) or _recipe(facts) != recipe:
            return FP8
        if name == "gather" and facts["distributed_type"] != "FSDP":
            return "only FSDP gathers weights"
        return {f"{_RECIPE}.kind": recipe, f"{_RECIPE}.{name}": read(value)}

    return rule


def _lower(value: Any) -> str:
    return text(value).lower()


def _offload(field: str) -> Rule:
    places = {name: {f"{_S}.{field}": name.lower()} for name in ("CPU", "NVME")}
    return among({"NONE": {}, **places}, unknown=f"plan.strategy.{field} is cpu or nvme")


_NAME_BLOCKS = "name the classes of the blocks in plan.recompute"
_SEQUENCES = {"plan.context": {}}
_DEEPSPEED_FILE = "with launch.launcher deepspeed, set launch.options: hostfile, include, exclude"
_HYBRID = "set plan.strategy.shard to the ranks of a node"
_MODES = {
    "full": (("FULL_SHARD", "1", "TRUE"), ("HYBRID_SHARD", "4")),
    "grads_and_optimizer": (("SHARD_GRAD_OP", "2", "FALSE"), ("HYBRID_SHARD_ZERO2", "5")),
    "none": (("NO_SHARD", "3"), ()),
}
_FSDP_MODE = among(
    {
        word: ({f"{_S}.mode": mode}, note)
        for mode, (plain, hybrid) in _MODES.items()
        for known, note in ((plain, ""), (hybrid, _HYBRID))
        for word in known
    },
    unknown="plan.strategy.mode is full, grads_and_optimizer or none",
)
_PREFETCH = among(
    {"BACKWARD_PRE": {}}, unknown="torch's FSDP2 prefetches; see plan.strategy.backward_prefetch"
)

# By key: the section's name, a dot, and the key without its prefix.
RULES: Mapping[str, Rule] = {
    "num_processes": _ranks,
    "num_machines": ("launch.nodes", whole),
    "machine_rank": ("launch.node_rank", whole),
    "main_process_ip": ("launch.main_address", text),
    "main_process_port": ("launch.main_port", whole),
    "rdzv_backend": _rendezvous,
    "same_network": "nodes connect to launch.main_address in any network",
    "gpu_ids": lambda value, _: (
        {} if str(value).upper() == "ALL" else {"launch.gpus": words(value)}
    ),
    "fp16": when({"plan.precision": "fp16"}),
    "use_cpu": when({"launch.cpu": True}),
    "debug": when("fx.detect always checks collectives"),
    "enable_cpu_affinity": when({"launch.bind": "node"}),
    "ipex.ipex": when(IPEX),
    "ipex.use_xpu": when(IPEX),
    "main_training_function": lambda value, _: (
        "" if value == "main" else "the script runs unchanged"
    ),
    "num_cpu_threads_per_process": ("launch.threads", whole),
    "downcast_bf16": when({"launch.env": ["XLA_DOWNCAST_BF16=1"]}),
    "tpu_use_cluster": when({"launch.launcher": "tpu-pod"}),
    "tpu_name": (f"{_O}.name", text),
    "tpu_zone": (f"{_O}.zone", text),
    "tpu_use_sudo": when({f"{_O}.sudo": True}),
    "commands": (f"{_O}.setup", words),
    "command_file": "put the commands of that file into launch.options.setup",
    "tpu_vm": "choose hosts of the pod with launch.options.workers",
    "tpu_env": ("launch.env", words),
    "fsdp.version": lambda value, _: "fxtrain shards with FSDP2" if whole(value) == 1 else "",
    "fsdp.sharding_strategy": _FSDP_MODE,
    "fsdp.reshard_after_forward": lambda value, facts: _FSDP_MODE(str(value), facts),
    "fsdp.offload_params": when({f"{_S}.offload": True}),
    "fsdp.cpu_offload_pin_memory": (f"{_S}.pin", truth),
    "fsdp.auto_wrap_policy": among(
        {"TRANSFORMER_BASED_WRAP": {}, "SIZE_BASED_WRAP": {}},
        unknown="without block classes, fxtrain uses those that the model names, or its lists",
    ),
    "fsdp.transformer_layer_cls_to_wrap": (f"{_S}.wrap", words),
    "fsdp.min_num_params": lambda value, _: (
        {f"{_S}.min_params": int(number(value))} if number(value) >= 1 else {}
    ),
    "fsdp.ignored_modules": "list patterns of parameter names in plan.strategy.ignore",
    "fsdp.backward_prefetch": _PREFETCH,
    "fsdp.backward_prefetch_policy": _PREFETCH,  # its name until accelerate 0.20
    "fsdp.forward_prefetch": when({f"{_S}.forward_prefetch": 1}),
    "fsdp.state_dict_type": "fxtrain's checkpoints are sharded and load at any world size; "
    "fx.export writes full models",
    "fsdp.use_orig_params": when({}, "torch's FSDP2 always does this"),
    "fsdp.sync_module_states": when({}, "fx.wrap broadcasts rank 0's values"),
    "fsdp.cpu_ram_efficient_loading": when("load on rank 0 only: fx.wrap broadcasts its values"),
    "fsdp.activation_checkpointing": _recompute,
    "fsdp.activation_checkpointing_offload": when("activations stay on the device"),
    "deepspeed.deepspeed_config_file": (f"{_S}.config", text),
    "deepspeed.zero_stage": (f"{_S}.stage", whole),
    "deepspeed.offload_optimizer_device": _offload("offload_optimizer"),
    "deepspeed.offload_param_device": _offload("offload_parameters"),
    "deepspeed.offload_optimizer_nvme_path": (f"{_S}.nvme_path", text),
    "deepspeed.offload_param_nvme_path": (f"{_S}.nvme_path", text),
    "deepspeed.gradient_accumulation_steps": ("plan.accumulate", whole),
    "deepspeed.gradient_clipping": ("plan.clip_norm", number),
    "deepspeed.zero3_save_16bit_model": when({f"{_S}.gather_16bit_weights": True}),
    "deepspeed.zero3_init_flag": when("create the model inside `with fx.zero_init(ctx, plan):`"),
    "deepspeed.deepspeed_moe_layer_cls_names": (f"{_S}.leaf_modules", words),
    "deepspeed.deepspeed_multinode_launcher": among(
        {"STANDARD": {}, "SLURM": {"launch.launcher": "slurm"}},
        unknown="choose launch.launcher deepspeed and launch.options.runner, or start the same "
        "fxtrain launch on each node",
    ),
    "deepspeed.deepspeed_hostfile": _DEEPSPEED_FILE,
    "deepspeed.deepspeed_exclusion_filter": _DEEPSPEED_FILE,
    "deepspeed.deepspeed_inclusion_filter": _DEEPSPEED_FILE,
    "dynamo.backend": lambda value, _: (
        {} if text(value).upper() == "NO" else {"plan.compile.backend": text(value).lower()}
    ),
    "dynamo.mode": lambda value, _: (
        {} if value == "default" else {"plan.compile.mode": text(value)}
    ),
    "dynamo.use_fullgraph": when({"plan.compile.fullgraph": True}),
    "dynamo.use_dynamic": when({"plan.compile.dynamic": True}),
    "dynamo.use_regional_compilation": when(
        "name the classes of the blocks in plan.compile.blocks"
    ),
    "mpirun.mpirun_hostfile": lambda value, _: (
        {"launch.launcher": "mpi", f"{_O}.hostfile": text(value)}
    ),
    "mpirun.mpirun_ccl": lambda value, _: (
        {f"{_O}.ccl_workers": whole(value)} if whole(value) > 1 else {}
    ),
    "parallelism.dp_replicate_size": sized("replicate"),
    "parallelism.dp_shard_size": sized("shard"),
    "parallelism.tp_size": sized("tensor", {f"{_S}.tensor": {}}),
    "parallelism.cp_size": sized("context", _SEQUENCES),
    "parallelism.sp_size": sized("context", _SEQUENCES),
    "parallelism.cp_comm_strategy": among(
        {"ALLTOALL": "torch chooses how ring attention communicates"},
        unknown="",
    ),
    "megatron_lm.tp_degree": sized("tensor"),
    "megatron_lm.pp_degree": sized("pipeline"),
    "megatron_lm.context_parallel_size": sized("context", _SEQUENCES),
    # Under pipeline parallelism, the strategy sets them.
    "megatron_lm.num_micro_batches": lambda value, facts: (
        {"plan.accumulate": whole(value)} if degree("pp_degree", facts) == 1 else {}
    ),
    "megatron_lm.gradient_clipping": lambda value, _: (
        {"plan.clip_norm": number(value)} if number(value) > 0 else {}
    ),
    "megatron_lm.recompute_activations": when(_NAME_BLOCKS),
    "megatron_lm.sequence_parallelism": lambda value, facts: (
        "needs tensor parallelism" if truth(value) and degree("tp_degree", facts) == 1 else ""
    ),
    "megatron_lm.use_distributed_optimizer": when({}),
    "ec2_instance_type": (f"{_O}.instance_type", text),
    "iam_role_name": (f"{_O}.role", text),
    "image_uri": (f"{_O}.image_uri", text),
    "base_job_name": (f"{_O}.base_job_name", text),
    "pytorch_version": (f"{_O}.framework_version", text),
    "py_version": (f"{_O}.py_version", text),
    "transformers_version": "name an image with it in launch.options.image_uri",
    "profile": "set AWS_PROFILE before fxtrain launch",
    "region": "set AWS_DEFAULT_REGION before fxtrain launch",
    "sagemaker_inputs_file": "list its channels as NAME=s3://... in launch.options.inputs",
    "sagemaker_metrics_file": "not supported; parse the output of the script",
    "additional_args": _estimator_arguments,
    "mixed_precision": _mixed_precision,
    "fp8.backend": _fp8_backend,
    "fp8.format": _fp8_field("te", "format", _lower),
    "fp8.margin": _fp8_field("te", "margin", whole),
    "fp8.amax_history_length": _fp8_field("te", "history", whole),
    "fp8.amax_history_len": _fp8_field("te", "history", whole),
    "fp8.amax_compute_algorithm": _fp8_field("te", "amax", _lower),
    "fp8.amax_compute_algo": _fp8_field("te", "amax", _lower),
    "fp8.use_autocast_during_eval": _fp8_field("te", "evaluate", truth),
    "fp8.use_mxfp8_block_scaling": _fp8_field(
        "te", "scaling", lambda value: "mxfp8" if truth(value) else "delayed"
    ),
    "fp8.enable_fsdp_float8_all_gather": _fp8_field(
        "float8", "gather", lambda value: "fp8" if truth(value) else "plan"
    ),
    "fp8.pad_inner_dim": _fp8_field("float8", "pad", truth),
    "fp8.interval": "Transformer Engine no longer has this setting",
    "fp8.override_linear_precision": "fx.TE computes all three products of a layer in float8; "
    "skip=... leaves layers out",
    "fp8.opt_level": MSAMP,
}
