"""Configs of Accelerate, and what they become."""

import attrs

from fxtrain.interop.accelerate_config import convert_accelerate

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
