"""`fxtrain config convert`: Accelerate configs of every kind, and a note for all that is left."""

import json

import attrs
import pytest
import yaml

import fxtrain as fx
from fxtrain._other_names import hint
from fxtrain.cli import Exit, main
from fxtrain.interop.accelerate_config import _SECTIONS, RULES, convert_accelerate
from fxtrain.launchers.config import read_launch_file
from fxtrain.state.parsing import parse_json, parse_text

ONE = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": "no",
    "enable_cpu_affinity": False, "gpu_ids": "all", "machine_rank": 0,
    "main_training_function": "main", "mixed_precision": "no", "num_machines": 1,
    "num_processes": 1, "rdzv_backend": "static", "tpu_env": [], "tpu_use_cluster": False,
    "tpu_use_sudo": False, "use_cpu": False,
}  # fmt: skip
DEEPSPEED = {
    **ONE, "distributed_type": "DEEPSPEED", "num_processes": 8,
    "deepspeed_config": {
        "zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "none",
        "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "zero3_init_flag": True,
        "zero3_save_16bit_model": True, "deepspeed_multinode_launcher": "pdsh",
        "deepspeed_hostfile": "/hosts", "deepspeed_moe_layer_cls_names": "Experts",
    },
}  # fmt: skip


@attrs.frozen(kw_only=True)
class Case:
    """An Accelerate config as its questionnaire writes it, and what it is here."""

    name: str
    old: dict
    launch: dict = attrs.field(factory=dict)
    plan: dict = attrs.field(factory=dict)
    noted: tuple = ()


BASE = {"nodes": 1, "node_rank": 0, "ranks": 1}


def check_conversion(case):
    """The values of the launch file and the keys of the notes are those of the case."""
    values, notes = convert_accelerate(case.old)
    usual = {name: value for name, value in BASE.items() if name not in case.launch}
    launch = {k: v for k, v in values["launch"].items() if usual.get(k) != v}
    assert launch == case.launch
    assert values["plan"] == case.plan
    assert {key for key, _, _ in notes} == set(case.noted)
    assert all(text for _, _, text in notes)


CASES = [
    Case(name="one process", old={**ONE, "distributed_type": "NO"}, plan={"precision": "fp32"}),
    Case(
        name="GPUs on two nodes",
        old={
            **ONE, "distributed_type": "MULTI_GPU", "num_processes": 16, "num_machines": 2,
            "machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 29501,
            "rdzv_backend": "c10d", "same_network": True, "mixed_precision": "bf16",
            "gpu_ids": "0,1, 2,3,4,5,6,7", "enable_cpu_affinity": True,
        },
        launch={
            "ranks": 8, "nodes": 2, "node_rank": 1, "main_address": "10.0.0.1",
            "main_port": 29501, "rendezvous": "c10d", "gpus": list("01234567"), "bind": "node",
        },
        plan={"precision": "bf16"},
        noted=("same_network",),
    ),
    Case(
        name="CPUs through MPI",
        old={
            **ONE, "distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 4,
            "num_machines": 2, "main_process_ip": "n0",
            "mpirun_config": {"mpirun_hostfile": "/home/me/hosts", "mpirun_ccl": "2"},
        },
        launch={
            "ranks": 2, "nodes": 2, "cpu": True, "launcher": "mpi", "main_address": "n0",
            "options": {"hostfile": "/home/me/hosts", "ccl_workers": 2},
        },
        plan={"precision": "fp32"},
        noted=("launch.node_rank", "launch.rendezvous"),
    ),
    Case(
        name="TPU pod",
        old={
            **ONE, "distributed_type": "XLA", "downcast_bf16": "yes", "tpu_use_cluster": True,
            "tpu_name": "pod", "tpu_zone": "us-c", "tpu_use_sudo": True, "num_processes": 8,
            "commands": ["pip install x"], "tpu_vm": ["vm1"], "tpu_env": ["A=1"],
            "main_training_function": "train",
        },
        launch={
            "launcher": "tpu-pod", "env": ["XLA_DOWNCAST_BF16=1", "A=1"],
            "options": {"name": "pod", "zone": "us-c", "sudo": True, "setup": ["pip install x"]},
        },
        plan={"precision": "fp32", "strategy": {"kind": "xla"}},
        noted=("tpu_vm", "main_training_function", "launch.node_rank", "launch.ranks"),
    ),
    Case(
        name="TPU",
        old={"distributed_type": "TPU", "num_processes": 4},
        launch={"launcher": "tpu"},
        plan={"strategy": {"kind": "xla"}},
        noted=("launch.ranks",),
    ),
    Case(
        name="compiled",
        old={
            **ONE, "distributed_type": "NO", "mixed_precision": "fp8",
            "dynamo_config": {
                "dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune",
                "dynamo_use_fullgraph": True, "dynamo_use_dynamic": False,
                "dynamo_use_regional_compilation": True,
            },
            "fp8_config": {
                "backend": "TE", "margin": 0, "amax_history_length": 1024, "pad_inner_dim": True,
            },
        },
        plan={
            "precision": {
                "compute": "fp8", "recipe": {"kind": "te", "margin": 0, "history": 1024},
            },
            "compile": {"backend": "inductor", "mode": "max-autotune", "fullgraph": True},
        },
        noted=("dynamo.use_regional_compilation", "fp8.pad_inner_dim"),
    ),
    Case(
        name="block scaling of Transformer Engine",
        old={
            **ONE, "distributed_type": "NO", "mixed_precision": "fp8",
            "fp8_config": {
                "backend": "TE", "use_mxfp8_block_scaling": True, "fp8_format": "E5M2",
                "interval": 1, "override_linear_precision": False,
            },
        },
        plan={"precision": {"compute": "fp8", "recipe": {"kind": "te", "scaling": "mxfp8"}}},
        noted=("fp8.format", "fp8.interval"),
    ),
    Case(
        name="libraries without maintenance",
        old={
            **ONE, "distributed_type": "NO", "mixed_precision": "fp8",
            "fp8_config": {"backend": "MSAMP", "opt_level": "O2"},
            "ipex_config": {"ipex": True, "use_xpu": False},
        },
        plan={"precision": {"compute": "fp8", "recipe": {"kind": "float8"}}},
        noted=("fp8.backend", "fp8.opt_level", "ipex.ipex"),
    ),
    Case(
        name="float8 of torchao",
        old={
            **ONE, "distributed_type": "FSDP", "mixed_precision": "fp8",
            "fp8_config": {
                "backend": "AO", "enable_fsdp_float8_all_gather": True, "fp8_margin": 1,
            },
        },
        plan={
            "precision": {"compute": "fp8", "recipe": {"kind": "float8", "gather": "fp8"}},
            "strategy": {"kind": "fsdp"},
        },
        noted=("fp8.margin",),
    ),
    Case(
        name="float8 under DeepSpeed",
        old={
            **ONE, "distributed_type": "DEEPSPEED", "mixed_precision": "fp8",
            "deepspeed_config": {"zero_stage": 2}, "fp8_config": {"backend": "TE"},
        },
        plan={"precision": "bf16", "strategy": {"kind": "deepspeed", "stage": 2}},
        noted=("mixed_precision", "fp8.backend"),
    ),
    Case(
        name="SageMaker",
        old={
            "compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "DATA_PARALLEL",
            "ec2_instance_type": "ml.p4d.24xlarge", "iam_role_name": "role", "region": "us-east-1",
            "num_machines": 2, "pytorch_version": "1.10.2", "transformers_version": "4.17",
            "py_version": "py38", "base_job_name": "job", "mixed_precision": "no",
            "sagemaker_inputs_file": "in.tsv", "profile": "me",
            "additional_args": {"a": 1, "use_spot_instances": True, "max_run": 3600},
        },
        launch={
            "launcher": "sagemaker", "nodes": 2,
            "options": {
                "instance_type": "ml.p4d.24xlarge", "role": "role", "base_job_name": "job",
                "framework_version": "1.10.2", "py_version": "py38", "spot": True,
                "max_run_s": 3600,
            },
        },
        plan={"precision": "fp32"},
        noted=("region", "transformers_version", "sagemaker_inputs_file", "profile",
               "estimator.a"),
    ),
    Case(
        name="an old one",
        old={"distributed_type": "MULTI_GPU", "fp16": True, "dynamo_backend": "AOT_EAGER",
             "num_processes": -1, "no_such_key": 1},
        plan={"precision": "fp16", "compile": {"backend": "aot_eager"}},
        noted=("num_processes", "no_such_key"),
    ),
]  # fmt: skip
CASES += [
    Case(
        name="TPU with settings of GPUs",
        old={
            "distributed_type": "XLA",
            "gpu_ids": "0",
            "mixed_precision": "fp16",
            "enable_cpu_affinity": True,
            "dynamo_config": {"dynamo_backend": "INDUCTOR"},
            "parallelism_config": {
                "parallelism_config_dp_shard_size": 4,
                "parallelism_config_tp_size": 2,
            },
        },
        launch={"launcher": "tpu"},
        plan={"precision": "bf16", "mesh": {"shard": 4}, "strategy": {"kind": "xla"}},
        noted=(
            "launch.gpus",
            "launch.bind",
            "plan.compile",
            "mixed_precision",
            "plan.mesh.tensor",
            "plan.strategy",
        ),
    ),
    Case(
        name="axes without FSDP",
        old={
            "distributed_type": "MULTI_GPU",
            "num_processes": 8,
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_tp_size": 2,
                "parallelism_config_cp_size": 2,
            },
        },
        launch={"ranks": 8},
        plan={
            "mesh": {"replicate": 2, "tensor": 2, "context": 2},
            "context": {},
            "strategy": {"kind": "fsdp", "mode": "none", "tensor": {}},
        },
    ),
    Case(
        name="axes of DeepSpeed",
        old={
            "distributed_type": "DEEPSPEED",
            "num_processes": 8,
            "parallelism_config": {"parallelism_config_sp_size": 2},
        },
        launch={"ranks": 8},
        plan={
            "mesh": {"context": 2},
            "strategy": {"kind": "deepspeed", "sequence_parallel": 2},
        },
    ),
    Case(
        name="a prefetch policy of earlier versions",
        old={
            "distributed_type": "FSDP",
            "num_processes": 2,
            "fsdp_config": {"fsdp_backward_prefetch_policy": "NO_PREFETCH"},
        },
        launch={"ranks": 2},
        plan={"strategy": {"kind": "fsdp"}},
        noted=("fsdp.backward_prefetch_policy",),
    ),
    Case(
        name="Megatron",
        old={
            **ONE,
            "distributed_type": "MEGATRON_LM",
            "num_processes": 8,
            "megatron_lm_config": {
                "megatron_lm_tp_degree": 2,
                "megatron_lm_pp_degree": 2,
                "megatron_lm_num_micro_batches": 4,
                "megatron_lm_gradient_clipping": 1.0,
                "megatron_lm_sequence_parallelism": True,
                "megatron_lm_eod_mask_loss": True,
                "megatron_lm_recompute_activations": True,
                "megatron_lm_use_distributed_optimizer": True,
            },
        },
        launch={"ranks": 8},
        plan={
            "precision": "fp32",
            "clip_norm": 1.0,
            "mesh": {"tensor": 2, "pipeline": 2},
            "strategy": {
                "kind": "pp",
                "microbatches": 4,
                "stages": {
                    "kind": "fsdp",
                    "mode": "grads_and_optimizer",
                    "tensor": {"sequence": True},
                },
            },
        },
        noted=("megatron_lm.eod_mask_loss", "megatron_lm.recompute_activations"),
    ),
    Case(
        name="Megatron on one axis",
        old={
            **ONE,
            "distributed_type": "MEGATRON_LM",
            "num_processes": 8,
            "megatron_lm_config": {
                "megatron_lm_tp_degree": 2,
                "megatron_lm_num_micro_batches": 4,
            },
        },
        launch={"ranks": 8},
        plan={
            "precision": "fp32",
            "accumulate": 4,
            "mesh": {"tensor": 2},
            "strategy": {"kind": "fsdp", "mode": "none", "tensor": {}},
        },
    ),
    Case(
        name="Megatron's stages alone",
        old={
            **ONE,
            "distributed_type": "MEGATRON_LM",
            "num_processes": 8,
            "megatron_lm_config": {
                "megatron_lm_pp_degree": 4,
                "megatron_lm_sequence_parallelism": True,
            },
        },
        launch={"ranks": 8},
        plan={"precision": "fp32", "mesh": {"pipeline": 4}, "strategy": {"kind": "pp"}},
        noted=("megatron_lm.sequence_parallelism",),
    ),
]


# As a person writes it: YAML reads a plain `no` as false.
UNQUOTED = {
    "distributed_type: NO": {},
    "distributed_type: NO\nmixed_precision: no": {"precision": "fp32"},
    "distributed_type: no\ndynamo_config: {dynamo_backend: NO, dynamo_mode: default}": {},
    "distributed_type: NO\ndynamo_backend: NO\nuse_cpu: no\ndowncast_bf16: no": {},
    "distributed_type: NO\ngpu_ids: ALL\nenable_cpu_affinity: off": {},
}


@pytest.mark.parametrize("text", UNQUOTED)
def test_a_no_without_quotes_is_the_word(text):
    values, notes = convert_accelerate(parse_text(text, "yaml"))
    assert (values["plan"], notes) == (UNQUOTED[text], [])


def test_a_backward_prefetch_that_fsdp_2_does_not_have_says_what_it_does():
    old = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_backward_prefetch": "BACKWARD_POST"}}
    (text,) = _notes(old).values()
    assert "as BACKWARD_PRE does" in text


def test_the_wait_for_spot_instances_is_kept():
    extra = {"use_spot_instances": True, "max_run": 60, "max_wait": 90}
    old = {"compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "NO"}
    values, notes = convert_accelerate({**old, "additional_args": extra})
    options = {"spot": True, "max_run_s": 60, "max_wait_s": 90}
    assert (values["launch"]["options"], notes) == (options, [])


def test_values_that_json_does_not_have_are_text_there(tmp_path, capsys):
    """YAML has dates, times, sets, bytes, infinities and keys that are not text."""
    (tmp_path / "old.yaml").write_text(
        "distributed_type: NO\na: 2024-01-01\nb: 2024-01-01 10:00:00\nc: !!set {x}\n"
        "d: !!binary aGk=\ne: .inf\nf: {2024-01-01: 1}\ng: [1, x]\n2024-02-02: 1\n"
    )
    assert main(["config", "convert", str(tmp_path / "old.yaml"), "--json"]) == Exit.WELL
    notes = parse_json(capsys.readouterr().out)["notes"]
    told = {note["key"]: note["value"] for note in notes}
    assert told["a"] == "datetime.date(2024, 1, 1)" and told["g"] == [1, "x"]
    assert list(told) == [*"abcdefg", "2024-02-02"]
    assert all(isinstance(told[name], str) for name in "abcdef")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_config_becomes_a_launch_file(case):
    check_conversion(case)


@pytest.mark.parametrize(
    ("old", "says"),
    [
        (None, "not an Accelerate config"),
        ([], "not an Accelerate config"),
        ({}, "distributed_type is missing"),
        ({"distributed_type": "FSPD"}, "did you mean 'FSDP'"),
        ({"distributed_type": "NO", "num_processes": "two"}, "num_processes: "),
        (
            {"distributed_type": "NO", "use_cpu": "maybe"},
            "yes or no, found 'maybe'",
        ),
        ({"distributed_type": "NO", "num_machines": 0}, "nodes"),
        ({"distributed_type": "NO", "main_process_ip": "a b"}, "main_address"),
        ({"distributed_type": "NO", "gpu_ids": {"a": 1}}, "expected a string"),
    ],
)
def test_what_makes_no_sense_is_an_error(old, says):
    with pytest.raises(fx.PlanError, match=says):
        convert_accelerate(old)


def test_every_key_of_accelerate_is_known():
    args = pytest.importorskip(
        "accelerate.commands.config.config_args", reason="accelerate is not installed"
    )
    known = {*RULES, *_SECTIONS, "distributed_type", "profile"}
    for config in (args.ClusterConfig, args.SageMakerConfig):
        assert [
            key for key in config.__dataclass_fields__ if key not in known and not hint(key)
        ] == []


def test_the_command_writes_a_file_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(CASES[1].old))
    assert main(["config", "convert", "old.yaml"]) == Exit.WELL
    told = capsys.readouterr()
    assert "same_network" in told.err
    assert "# same_network" in (tmp_path / "fxtrain.toml").read_text()
    assert read_launch_file("fxtrain.toml").launch.nodes == 2
    assert main(["config", "convert", "old.yaml"]) == Exit.WRONG
    assert main(["config", "convert", "old.yaml", "new.yaml"]) == Exit.WELL
    assert read_launch_file("new.yaml").launch.ranks == 8
    capsys.readouterr()
    assert main(["config", "convert", "old.yaml", "--json"]) == Exit.WELL
    told = json.loads(capsys.readouterr().out)
    assert told["launch"]["ranks"] == 8 and told["notes"][0]["key"] == "same_network"


def test_a_brief_file_has_the_converted_values_and_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(CASES[1].old))
    for name in ("new.toml", "new.yaml"):
        assert main(["config", "convert", "old.yaml", name, "--brief"]) == Exit.WELL
        assert "same_network" in capsys.readouterr().err  # still told
        values = convert_accelerate(CASES[1].old)[0]
        assert "#" not in (tmp_path / name).read_text()
        assert read_launch_file(name).values == values


def _notes(old):
    return {key: text for key, _, text in convert_accelerate(old)[1]}


def test_a_stage_3_config_names_the_block_in_which_a_model_is_made():
    assert "fx.zero_init(ctx, plan)" in _notes(DEEPSPEED)["deepspeed.zero3_init_flag"]


def test_without_a_source_it_is_the_one_that_accelerate_wrote(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert main(["config", "convert"]) == Exit.WRONG
    assert "hf/accelerate/default_config.yaml" in capsys.readouterr().err
    (tmp_path / "hf" / "accelerate").mkdir(parents=True)
    (tmp_path / "hf" / "accelerate" / "default_config.yaml").write_text(json.dumps(DEEPSPEED))
    assert main(["config", "convert"]) == Exit.WELL
    assert read_launch_file("fxtrain.toml").plan.accumulate == 2


def test_without_any_source_the_error_asks_for_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert main(["config", "convert"]) == 2
    assert "Name the file to convert" in " ".join(capsys.readouterr().err.split())


def test_notes_say_what_becomes_of_a_setting():
    section = {"backend": "MSAMP", "override_linear_precision": [True], "opt_level": "O1"}
    old = {**ONE, "distributed_type": "NO", "mixed_precision": "fp8", "fp8_config": section}
    notes = _notes(old)
    assert "torchao's float8 is used instead" in notes["fp8.backend"]
    assert "ignores it" in notes["fp8.override_linear_precision"]
    assert "MS-AMP is no longer maintained" in notes["fp8.opt_level"]
    unknown = {**old, "fp8_config": {"backend": "FOO"}, "no_such_key": 1}
    notes = _notes(unknown)
    assert "plan.precision.recipe" in notes["fp8.backend"]
    assert notes["no_such_key"] == "it has no counterpart"


FSDP = {
    **ONE, "distributed_type": "FSDP", "num_processes": 8,
    "fsdp_config": {
        "fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "Block,Head", "fsdp_activation_checkpointing": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": True,
    },
    "parallelism_config": {
        "parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4,
        "parallelism_config_tp_size": 1, "parallelism_config_cp_comm_strategy": "allgather",
    },
}  # fmt: skip


def test_fsdp():
    values, notes = convert_accelerate(FSDP)
    assert values["plan"] == {
        "precision": "fp32",
        "recompute": ["Block", "Head"],
        "strategy": {
            "kind": "fsdp", "mode": "full", "offload": True, "wrap": ["Block", "Head"],
        },
        "mesh": {"replicate": 2, "shard": 4},
    }  # fmt: skip
    assert {key for key, _, _ in notes} == {
        "fsdp.state_dict_type", "fsdp.cpu_ram_efficient_loading",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [("FULL_SHARD", "full"), ("SHARD_GRAD_OP", "grads_and_optimizer"), ("NO_SHARD", "none"),
     (1, "full"), ("HYBRID_SHARD_ZERO2", "grads_and_optimizer")],
)  # fmt: skip
def test_first_versions_of_fsdp(strategy, mode):
    section = {"fsdp_version": 1, "fsdp_sharding_strategy": strategy, "fsdp_min_num_params": 1e6}
    values, notes = convert_accelerate({"distributed_type": "FSDP", "fsdp_config": section})
    assert values["plan"]["strategy"] == {
        "kind": "fsdp", "mode": mode, "min_params": 1_000_000,
    }  # fmt: skip
    assert "fsdp.version" in {key for key, _, _ in notes}


def test_deepspeed():
    values, notes = convert_accelerate(DEEPSPEED)
    assert values["plan"] == {
        "precision": "fp32", "accumulate": 2, "clip_norm": 1.0,
        "strategy": {
            "kind": "deepspeed", "stage": 3, "offload_optimizer": "cpu",
            "gather_16bit_weights": True, "leaf_modules": ["Experts"],
        },
    }  # fmt: skip
    assert {key for key, _, _ in notes} == {
        "deepspeed.zero3_init_flag", "deepspeed.deepspeed_multinode_launcher",
        "deepspeed.deepspeed_hostfile",
    }  # fmt: skip


def test_sections_of_another_type_do_not_count():
    old = {**ONE, "distributed_type": "MULTI_GPU", "fsdp_config": FSDP["fsdp_config"]}
    values, notes = convert_accelerate(old)
    assert "strategy" not in values["plan"] and "recompute" not in values["plan"]
    assert {text for _, _, text in notes} == {"not used under MULTI_GPU"}


def test_ranks_that_do_not_divide_are_noted():
    values, notes = convert_accelerate(
        {"distributed_type": "MULTI_GPU", "num_processes": 5, "num_machines": 2}
    )
    assert values["launch"]["ranks"] == 3
    assert [key for key, _, _ in notes] == ["num_processes"]
