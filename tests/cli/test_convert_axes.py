"""`fxtrain config convert`: axes of a mesh, Megatron-LM, and what TPUs do not support."""

import pytest

from tests.cli._accelerate_configs import ONE, Case, check_conversion

CASES = [
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_config_becomes_a_launch_file(case):
    check_conversion(case)
