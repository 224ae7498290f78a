"""`fxtrain config convert`: Accelerate configs of every kind, and a note for all that is left."""

import json

import pytest
import yaml

import fxtrain as fx
from fxtrain._other_names import hint
from fxtrain.cli import Exit, main
from fxtrain.interop.accelerate_config import _SECTIONS, RULES, convert_accelerate
from fxtrain.launchers.config import read_launch_file
from tests.cli._accelerate_configs import ONE, Case, check_conversion

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
