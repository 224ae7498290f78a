"""`fxtrain config convert`: sections of FSDP, DeepSpeed and others."""

import pytest

from fxtrain.interop.accelerate_config import convert_accelerate
from tests.cli._accelerate_configs import DEEPSPEED, ONE

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
