"""Configs of Accelerate's own writer: converting, checking, starting and wrapping agree."""

import contextlib
import io

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.backends import built_in
from fxtrain.backends.deepspeed import setup
from fxtrain.backends.wrapping import problems_of
from fxtrain.backends.xla import xla_runtime
from fxtrain.cli import main
from fxtrain.diagnosis.setups import planned_context, stand_in, without_names
from fxtrain.launchers.config import resolve
from fxtrain.launchers.machine import default_ranks
from fxtrain.testing import fake_world

config_args = pytest.importorskip("accelerate.commands.config.config_args")

SIZES = st.sampled_from([1, 2, 4])
YES = st.booleans()


def _some(**fields):
    """A section with any of these keys."""
    return st.fixed_dictionaries({}, optional=fields)


FSDP = _some(
    fsdp_version=st.sampled_from([1, 2]),
    fsdp_reshard_after_forward=st.sampled_from([True, False, "FULL_SHARD", "SHARD_GRAD_OP"]),
    fsdp_offload_params=YES,
    fsdp_auto_wrap_policy=st.sampled_from(["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]),
    fsdp_transformer_layer_cls_to_wrap=st.just("Block,Head"),
    fsdp_min_num_params=st.sampled_from([0, 1000]),
    fsdp_backward_prefetch=st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]),
    fsdp_backward_prefetch_policy=st.just("BACKWARD_PRE"),
    fsdp_state_dict_type=st.just("SHARDED_STATE_DICT"),
    fsdp_forward_prefetch=YES,
    fsdp_use_orig_params=YES,
    fsdp_cpu_ram_efficient_loading=YES,
    fsdp_sync_module_states=YES,
    fsdp_activation_checkpointing=YES,
    fsdp_activation_checkpointing_offload=YES,
    fsdp_sharding_strategy=st.sampled_from(["NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]),
    fsdp_cpu_offload_pin_memory=YES,
    fsdp_ignored_modules=st.just("head"),
)
DEEPSPEED = _some(
    zero_stage=st.sampled_from([0, 1, 2, 3]),
    offload_optimizer_device=st.sampled_from(["none", "cpu", "nvme"]),
    offload_param_device=st.sampled_from(["none", "cpu", "nvme"]),
    offload_optimizer_nvme_path=st.just("/nvme"),
    gradient_accumulation_steps=st.integers(1, 4),
    gradient_clipping=st.sampled_from([0.5, 1.0]),
    zero3_save_16bit_model=YES,
    zero3_init_flag=YES,
    deepspeed_multinode_launcher=st.sampled_from(["pdsh", "standard", "openmpi"]),
    deepspeed_moe_layer_cls_names=st.just("Experts"),
    deepspeed_config_file=st.just("ds.json"),
    deepspeed_hostfile=st.just("hosts"),
    deepspeed_inclusion_filter=st.just("a:0,1"),
)
AXES = _some(
    parallelism_config_dp_replicate_size=SIZES,
    parallelism_config_dp_shard_size=SIZES,
    parallelism_config_tp_size=SIZES,
    parallelism_config_cp_size=SIZES,
    parallelism_config_sp_size=SIZES,
    parallelism_config_cp_comm_strategy=st.sampled_from(["allgather", "alltoall"]),
)
MEGATRON = _some(
    megatron_lm_tp_degree=SIZES,
    megatron_lm_pp_degree=SIZES,
    megatron_lm_sequence_parallelism=YES,
    megatron_lm_num_micro_batches=st.integers(1, 4),
    megatron_lm_recompute_activations=YES,
    megatron_lm_use_distributed_optimizer=YES,
    megatron_lm_gradient_clipping=st.just(1.0),
    megatron_lm_context_parallel_size=SIZES,
)
DYNAMO = _some(
    dynamo_backend=st.sampled_from(["NO", "INDUCTOR", "EAGER"]),
    dynamo_mode=st.sampled_from(["default", "reduce-overhead"]),
    dynamo_use_fullgraph=YES,
    dynamo_use_dynamic=YES,
    dynamo_use_regional_compilation=YES,
)
FP8 = _some(
    backend=st.sampled_from(["TE", "AO", "MSAMP"]),
    margin=st.integers(0, 2),
    fp8_format=st.sampled_from(["HYBRID", "E4M3"]),
    enable_fsdp_float8_all_gather=YES,
    pad_inner_dim=YES,
)
MPIRUN = _some(mpirun_hostfile=st.just("hosts"), mpirun_ccl=st.sampled_from(["1", "4"]))
KINDS = [
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "DEEPSPEED", "FSDP", "XLA",
    "MEGATRON_LM",
]  # fmt: skip
CLUSTERS = st.fixed_dictionaries(
    {
        "compute_environment": st.just("LOCAL_MACHINE"),
        "distributed_type": st.sampled_from(KINDS),
        "mixed_precision": st.sampled_from(["no", "fp16", "bf16", "fp8"]),
        "use_cpu": YES,
        "debug": YES,
    },
    optional={
        "num_processes": st.sampled_from([1, 2, 4, 8, 16]),
        "num_machines": st.sampled_from([1, 1, 2]),
        "main_process_ip": st.just("127.0.0.1"),
        "main_process_port": st.just(29512),
        "rdzv_backend": st.sampled_from(["static", "c10d"]),
        "gpu_ids": st.sampled_from(["all", "0,1"]),
        "machine_rank": st.sampled_from([0, 1]),
        "same_network": YES,
        "main_training_function": st.sampled_from(["main", "train"]),
        "enable_cpu_affinity": YES,
        "downcast_bf16": st.sampled_from(["no", "yes"]),
        "fsdp_config": FSDP,
        "deepspeed_config": DEEPSPEED,
        "parallelism_config": AXES,
        "megatron_lm_config": MEGATRON,
        "dynamo_config": DYNAMO,
        "fp8_config": FP8,
        "mpirun_config": MPIRUN,
        "tpu_use_cluster": YES,
        "tpu_name": st.just("pod"),
        "tpu_zone": st.just("us-central2-b"),
        "tpu_use_sudo": YES,
        "tpu_env": st.just(["XLA_USE_F16=1"]),
        "tpu_vm": st.just(["pod-0"]),
        "commands": st.just(["echo ready"]),
        "command_file": st.just("commands.sh"),
    },
)
JOBS = st.fixed_dictionaries(
    {
        "compute_environment": st.just("AMAZON_SAGEMAKER"),
        "distributed_type": st.sampled_from(["NO", "DATA_PARALLEL"]),
        "mixed_precision": st.sampled_from(["no", "fp16", "bf16"]),
        "use_cpu": st.just(False),
        "debug": YES,
        "ec2_instance_type": st.just("ml.p4d.24xlarge"),
        "iam_role_name": st.just("role"),
    },
    optional={
        "num_machines": st.sampled_from([1, 2]),
        "image_uri": st.just("image"),
        "base_job_name": st.just("job"),
        "profile": st.just("default"),
        "pytorch_version": st.just("2.9"),
        "py_version": st.just("py312"),
        "sagemaker_inputs_file": st.just("inputs.txt"),
        "enable_cpu_affinity": YES,
        "additional_args": st.sampled_from([{"use_spot_instances": True, "max_run": 60}, {"a": 1}]),
        "dynamo_config": DYNAMO,
    },
)


@pytest.fixture(autouse=True)
def _packages():
    """Checks look whether an engine is installed before they look at a plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "import_deepspeed", lambda *_, **__: None)
        patch.setattr(setup, "device_problems", lambda *_: ())
        patch.setattr(xla_runtime, "import_xla", lambda *_, **__: None)
        yield


def _is_accepted(spec, plan):
    """What `fx.wrap` says on fake ranks of that launch, over torch's own process groups."""
    try:
        planned = planned_context(spec, plan)
        with fake_world(
            planned.world_size, mesh=plan.mesh if planned.devices == 1 else None
        ) as ctx:
            placed = attrs.evolve(ctx, device=planned.device, devices=planned.devices)
            if planned.devices > 1:
                placed = attrs.evolve(placed, mesh=planned.mesh)
            entry = built_in(type(plan.strategy))
            model = stand_in(planned.mesh)
            if isinstance(plan.strategy, fx.DeepSpeed):
                fx.interop.deepspeed_config(plan, ranks=placed.axis("data").world_size)
            return problems_of(entry, placed, without_names(plan), model) == ()
    except fx.FxError:
        return False


def _run(*words):
    """The exit code of a command, and what it writes."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        return main(list(words)), out.getvalue()


@settings(max_examples=15)
@given(data=CLUSTERS | JOBS)
def test_convert_check_dry_and_wrap_agree(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    kind = "ClusterConfig" if "iam_role_name" not in data else "SageMakerConfig"
    old, new, script = (str(folder / name) for name in ("old.yaml", "fxtrain.toml", "train.py"))
    getattr(config_args, kind)(**data).to_yaml_file(old)
    (folder / "train.py").touch()
    converted, told = _run("config", "convert", old, new)
    if converted:
        assert "PlanError" in told
        return
    checked, problems = _run("config", "check", new)
    started, _ = _run("launch", "--config", new, "--dry", script)
    found = resolve(file=new)
    spec = found.launch
    if "ranks" not in found.values["launch"]:
        spec = attrs.evolve(spec, ranks=default_ranks(spec))
    accepted = _is_accepted(spec, found.plan)
    assert (checked == 0) == (started == 0 and accepted), problems
    # What convert could not mend, it has said.
    assert all(line in told for line in problems.splitlines()[1:] if checked)
