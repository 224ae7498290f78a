"""Configs of Accelerate."""

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
