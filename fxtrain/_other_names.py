"""Names of other libraries and launchers, and what each is called here.

They are those of accelerate's `Accelerator`, its plugins and `accelerate launch`, torchrun, torch's
`DistributedDataParallel` and FSDP, Lightning's `Trainer`, and `TrainingArguments` of transformers.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

__all__ = [
    "OTHER_ARGUMENTS", "OTHER_CALLS", "OTHER_NAMES", "OTHER_VALUES", "OtherName", "call_hint",
    "field_hint", "hint", "value_hint",
]  # fmt: skip


class OtherName(NamedTuple):
    """The hint for a name from another library.

    Attributes:
        use: What to write in a script, or on the command line for what a launch decides.
        path: The field in a launch file; empty if no file has it.
    """

    use: str
    path: str = ""


_OPTIMIZER = "fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))"
_SCHEDULER = "fx.wrap(net, ctx, plan, optimizer=..., scheduler=...)"
_LOADER = "fx.shard(DataLoader(dataset, batch_size=32, num_workers=2), ctx, plan)"

# What to use, the field in a launch file, and the names that other libraries have for it.
_PLAN = (
    ('fx.Plan(precision="bf16")', "plan.precision",
     "mixed_precision bf16 fp16 amp use_amp torch_dtype mp_policy mixed_precision_policy"),
    ("fx.Plan(precision=fx.Precision(compute='fp16', scale=fx.LossScale(initial=1024.0)))",
     "plan.precision.scale.initial", "init_scale initial_scale_power"),
    ("fx.Plan(precision=fx.Precision(compute='fp16', scale=fx.LossScale(interval=500)))",
     "plan.precision.scale.interval", "growth_interval loss_scale_window"),
    ("fx.Plan(accumulate=4)", "plan.accumulate",
     "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps accumulation_steps "
     "gradient_accumulation_plugin gradient_accumulation"),
    ("fx.Plan(clip_norm=1.0)", "plan.clip_norm",
     "max_grad_norm gradient_clip_val gradient_clipping clip_grad_norm clip_grad grad_clip "
     "max_norm"),
    ("fx.Plan(clip_value=1.0)", "plan.clip_value",
     "clip_grad_value gradient_clip_algorithm clip_gradients"),
    ('fx.Plan(nonfinite="raise")', "plan.nonfinite", "terminate_on_nan logging_nan_inf_filter"),
    ('fx.Plan(schedule="ranks")', "plan.schedule",
     "step_scheduler_with_optimizer adjust_scheduler"),
    ("fx.Plan(flush=False)", "plan.flush", "sync_with_dataloader"),
    ("fx.Plan(sync_each=True)", "plan.sync_each", "sync_each_batch"),
    ('fx.Plan(batch="global")', "plan.batch", "split_batches global_batch_size train_batch_size"),
    ('fx.Plan(even="drop")', "plan.even",
     "even_batches drop_last dataloader_drop_last join_uneven_inputs"),
    ('fx.Plan(data=fx.Data(source="dispatch"))', "plan.data.source",
     "dispatch_batches use_distributed_sampler replace_sampler_ddp"),
    ("fx.Plan(data=fx.Data(to_device=False))", "plan.data.to_device", "device_placement"),
    ("fx.Plan(data=fx.Data(ahead=4))", "plan.data.ahead", "prefetch_batches"),
    ("fx.Plan(seed=7)", "plan.seed", "random_seed data_seed use_seedable_sampler manual_seed"),
    ('fx.Plan(recompute="Block")', "plan.recompute",
     "gradient_checkpointing activation_checkpointing checkpoint_activations "
     "fsdp_activation_checkpointing gradient_checkpointing_kwargs recompute_activations"),
    ("fx.Plan(compile=True)", "plan.compile",
     "torch_compile dynamo_plugin use_compile compile_model"),
    ('fx.Plan(compile=fx.Compile(backend="inductor"))', "plan.compile.backend",
     "dynamo_backend torch_compile_backend"),
    ('fx.Plan(compile=fx.Compile(mode="max-autotune"))', "plan.compile.mode",
     "dynamo_mode torch_compile_mode"),
    ("fx.Plan(local=fx.LocalSGD(every=8))", "plan.local", "local_sgd_steps local_sgd"),
)  # fmt: skip
_STRATEGIES = (
    ('fx.Plan(strategy="fsdp")', "plan.strategy",
     "use_fsdp fsdp fsdp_plugin fsdp_config distributed_type distributed_backend ddp_backend"),
    ('fx.Plan(strategy="deepspeed")', "plan.strategy",
     "use_deepspeed deepspeed deepspeed_plugin deepspeed_plugins"),
    ("fx.Plan(strategy=fx.DDP(unused_parameters=True))", "plan.strategy.unused_parameters",
     "find_unused_parameters ddp_find_unused_parameters kwargs_handlers"),
    ("fx.Plan(strategy=fx.DDP(bucket_mib=50))", "plan.strategy.bucket_mib",
     "bucket_cap_mb ddp_bucket_cap_mb"),
    ("fx.Plan(strategy=fx.DDP(bucket_view=False))", "plan.strategy.bucket_view",
     "gradient_as_bucket_view"),
    ("fx.Plan(strategy=fx.DDP(sync_buffers=False))", "plan.strategy.sync_buffers",
     "broadcast_buffers ddp_broadcast_buffers forward_sync_buffers"),
    ("fx.Plan(strategy=fx.DDP(hook=fx.CommHook(name='bf16')))", "plan.strategy.hook",
     "comm_hook ddp_comm_hook"),
    ("fx.Plan(strategy=fx.DDP(shard_optimizer=True))", "plan.strategy.shard_optimizer",
     "zero_redundancy_optimizer use_distributed_optimizer"),
    ('fx.Plan(strategy=fx.FSDP(mode="grads_and_optimizer"))', "plan.strategy.mode",
     "sharding_strategy fsdp_sharding_strategy reshard_after_forward "
     "fsdp_reshard_after_forward"),
    ("fx.Plan(strategy=fx.FSDP(wrap=('Block',)))", "plan.strategy.wrap",
     "auto_wrap_policy fsdp_auto_wrap_policy transformer_layer_cls_to_wrap "
     "fsdp_transformer_layer_cls_to_wrap"),
    ("fx.Plan(strategy=fx.FSDP(min_params=100_000))", "plan.strategy.min_params",
     "min_num_params fsdp_min_num_params"),
    ("fx.Plan(strategy=fx.FSDP(offload=True))", "plan.strategy.offload",
     "cpu_offload offload_params fsdp_offload_params offload_policy"),
    ("fx.Plan(strategy=fx.DeepSpeed(stage=2))", "plan.strategy.stage", "zero_stage"),
    ('fx.Plan(strategy=fx.DeepSpeed(config="ds_config.json"))', "plan.strategy.config",
     "deepspeed_config deepspeed_config_file hf_ds_config ds_config"),
    ('fx.Plan(strategy=fx.DeepSpeed(offload_optimizer="cpu"))', "plan.strategy.offload_optimizer",
     "offload_optimizer_device"),
    ('fx.Plan(strategy=fx.DeepSpeed(stage=3, offload_parameters="cpu"))',
     "plan.strategy.offload_parameters", "offload_param_device"),
    ("fx.Plan(strategy=fx.PP(microbatches=4))", "plan.strategy.microbatches",
     "n_microbatches num_microbatches num_micro_batches chunks"),
)  # fmt: skip
_LAUNCH = (
    ("fxtrain launch --ranks 2 train.py", "launch.ranks",
     "num_processes nproc_per_node np nprocs n_procs num_gpus gpus_per_node devices world_size "
     "multi_gpu standalone"),
    ("fxtrain launch --nodes 2 train.py", "launch.nodes", "num_machines nnodes num_nodes"),
    ("fxtrain launch --node-rank 1 train.py", "launch.node_rank", "machine_rank"),
    ("fxtrain launch --main-address node-0 train.py", "launch.main_address",
     "main_process_ip master_addr rdzv_endpoint"),
    ("fxtrain launch --main-port 29500 train.py", "launch.main_port",
     "main_process_port master_port"),
    ("fxtrain launch --rendezvous c10d train.py", "launch.rendezvous", "rdzv_backend"),
    ("fxtrain launch --rendezvous-option keep_alive_interval=5 train.py",
     "launch.rendezvous_options", "rdzv_conf"),
    ("fxtrain launch --run-id mine train.py", "launch.run_id", "rdzv_id"),
    ("fxtrain launch --connect-timeout 60 train.py", "launch.connect_timeout_s", "rdzv_timeout"),
    ("fxtrain launch --restarts 3 train.py", "launch.restarts", "max_restarts"),
    ("fxtrain launch --monitor-interval 1 train.py", "launch.monitor_interval_s",
     "monitor_interval"),
    ("fxtrain launch --local-address node-1 train.py", "launch.local_address", "local_addr"),
    ("fxtrain launch --redirect both --log-dir logs train.py", "launch.redirect", "redirects"),
    ("fxtrain launch --show-ranks 0 train.py", "launch.show_ranks", "local_ranks_filter"),
    ("fxtrain launch --numa-binding node train.py", "launch.bind",
     "numa_binding enable_cpu_affinity"),
    ("fxtrain launch --gpus 0,1 train.py", "launch.gpus", "gpu_ids visible_devices gpu_id"),
    ("fxtrain launch --cpu train.py", "launch.cpu", "use_cpu no_cuda force_cpu"),
    ("fxtrain launch --threads 4 train.py", "launch.threads",
     "num_cpu_threads_per_process omp_num_threads"),
    ("fxtrain launch --no-python train", "launch.executable", "no_python"),
    ("fxtrain launch --launcher mpi train.py", "launch.launcher", "use_mpirun"),
    ("fxtrain launch --launcher slurm --option partition=gpu train.py", "",
     "partition account qos"),
    ("fxtrain launch --launcher tpu train.py", "launch.launcher", "tpu tpu_cluster"),
    ("fxtrain launch -m package.train", "launch.module", "module"),
    ("fxtrain launch --config fxtrain.toml train.py", "",
     "config_file default_config_file"),
)  # fmt: skip
_SCRIPT = (
    ('fx.detect(device="cpu")', "", "device accelerator place_model_on_device cpu backend"),
    ("fx.detect(timeout_s=600.0)", "", "ddp_timeout process_group_timeout"),
    ("fx.detect(mesh=fx.Mesh(replicate=2))", "", "dp_replicate_size"),
    ("fx.detect(mesh=fx.Mesh(shard=2))", "",
     "dp_shard_size parallelism_config device_mesh hsdp"),
    ("fx.detect(mesh=fx.Mesh(tensor=2))", "",
     "tp_size tp_degree tensor_parallel_size torch_tp_plugin"),
    ("fx.detect(mesh=fx.Mesh(context=2))", "",
     "cp_size sp_size context_parallel_size cp_degree"),
    ("fx.detect(mesh=fx.Mesh(pipeline=2))", "",
     "pp_size pp_degree pipeline_parallel_size megatron_lm_plugin"),
    ("loader.epochs(3)", "", "max_epochs num_train_epochs num_epochs epochs"),
    ("loader.total_updates(3)", "", "total_steps num_training_steps"),
    ("loader.updates(1000)", "", "max_steps"),
    ('fx.track("runs/a", ctx)', "",
     "log_with report_to logger logging_dir project_dir log_every_n_steps logging_steps"),
    ('fx.save("runs/a", ctx, model, position=batch.position)', "",
     "save_steps save_strategy enable_checkpointing output_dir default_root_dir"),
    ('fx.save("runs/a", ctx, model, keep_last=3)', "", "save_total_limit total_limit save_top_k"),
    ('fx.restore("runs/a", ctx, model)', "", "resume_from_checkpoint ckpt_path resume"),
    ('fx.log(ctx).info("text", everyone=True)', "", "main_process_only in_order"),
    ("fx.EarlyStopping(patience=3)", "", "early_stopping_patience early_stopping"),
    (_OPTIMIZER, "", "lr learning_rate weight_decay optim optimizer optimizers"),
    (_SCHEDULER, "", "lr_scheduler lr_scheduler_type scheduler warmup_steps warmup_ratio"),
    (_LOADER, "",
     "batch_size per_device_train_batch_size per_device_eval_batch_size num_workers "
     "dataloader_num_workers dataloader_pin_memory pin_memory shuffle"),
    ("torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)", "", "sync_batchnorm sync_bn"),
    ("torch.use_deterministic_algorithms(True)", "", "deterministic full_determinism"),
)  # fmt: skip

OTHER_NAMES: Mapping[str, OtherName] = MappingProxyType(
    {
        name: OtherName(use, path)
        for use, path, names in (*_PLAN, *_STRATEGIES, *_LAUNCH, *_SCRIPT)
        for name in names.split()
    }
)

# Functions and attributes of other libraries, looked for in fxtrain or on a context.
_CALLS = (
    ("fx.detect()", "Accelerator PartialState init_process_group Fabric Trainer"),
    ("fx.wrap(net, ctx, plan, optimizer=...) and fx.shard(loader, ctx, plan)",
     "prepare prepare_model setup setup_module prepare_data_loader setup_dataloaders"),
    ("fx.update(ctx, batch, model, loss)", "backward accumulate"),
    ("fx.step(ctx, batch, fns)", "train_step training_step"),
    ("fx.Plan(clip_norm=1.0)", "clip_grad_norm_ clip_gradients"),
    ("fx.launch(train, ranks=2)", "notebook_launcher spawn debug_launcher"),
    ("ctx.rank", "process_index global_rank get_rank"),
    ("ctx.local_rank", "local_process_index"),
    ("ctx.world_size", "num_processes get_world_size"),
    ("ctx.is_main", "is_main_process is_global_zero"),
    ("ctx.is_local_main", "is_local_main_process"),
    ("ctx.is_last", "is_last_process"),
    ("fx.ops.barrier(ctx)", "wait_for_everyone"),
    ("fx.ops.main_first(ctx)", "main_process_first local_main_process_first rank_zero_first"),
    ("fx.ops.on_main(function, ctx)", "on_main_process rank_zero_only"),
    ("fx.ops.print(text, ctx)", "print say rank_zero_info"),
    ("fx.ops.gather_for_metrics(tree, batch, ctx)", "gather_for_metrics gather_valid"),
    ("fx.ops.split(values, ctx)", "split_between_processes"),
    ("fx.ops.pad(tree, ctx)", "pad_across_processes"),
    ("fx.ops.seed(7, ctx)", "set_seed seed_everything"),
    ("fx.ops.sync(model, enabled=False)", "no_sync no_backward_sync"),
    ("fx.unwrap(model)", "unwrap_model"),
    ('fx.save("runs/a", ctx, model)', "save_state save_checkpoint"),
    ('fx.restore("runs/a", ctx, model)', "load load_state load_checkpoint resume"),
    ('fx.export(model, "out")', "save_model save_pretrained"),
    ('fx.load_model("llama", model)', "load_checkpoint_and_dispatch load_checkpoint_in_model"),
    ("loader.at(position)", "skip_first_batches"),
    ('fx.track("runs/a", ctx)', "init_trackers get_tracker"),
    ("fx.log(ctx)", "get_logger"),
    ("run.close()", "end_training"),
    ("loader.epochs(3)", "set_epoch sampler batch_sampler"),
    ("fx.ops.any_rank(flag, ctx)", "set_trigger check_trigger"),
    ("fx.ops.gather_objects(value, ctx)", "gather_object"),
    ("fx.ops.autocast(model)", "amp"),
    ("fx.weights(model)", "get_state_dict get_model_state_dict"),
    ("fx.find_batch_size(ctx, trial, 64, plan)", "find_executable_batch_size"),
    ("fx.release(model)", "free_memory release_memory"),
    ('fx.Plan(even="uneven")', "join_uneven_inputs Join"),
    ("report.applied", "sync_gradients"),
    ("report.skipped", "optimizer_step_was_skipped"),
    ("fx.DDP()", "DistributedDataParallel"),
    ("fx.FSDP()", "FullyShardedDataParallel fully_shard FSDP2"),
)  # fmt: skip
OTHER_CALLS: Mapping[str, str] = MappingProxyType(
    {name: use for use, names in _CALLS for name in names.split()}
)

# Arguments of functions, and what other libraries and torch.distributed call them.
_ARGUMENTS = (
    ("broadcast", "src=0", "from_process root group_src"),
    ("broadcast_object", "src=0", "from_process root group_src"),
    ("clip_norm", "max_norm=1.0", "max_grad_norm clip_norm gradient_clip_val"),
    ("clip_value", "max_value=1.0", "clip_value max_grad_value"),
    ("evaluate", "metrics={...}", "metric compute_metrics"),
    ("fit", "epochs=3", "max_epochs num_train_epochs num_epochs n_epochs"),
    (
        "fit",
        "evaluate=lambda: fx.evaluate(ctx, model, held_out, fn)",
        "eval_fn validate validation eval_loader val_loader val_dataloaders eval_dataset",
    ),
    ("fit", "evaluate_every=100", "eval_steps val_check_interval eval_every"),
    ("fit", "keep_last=3", "save_total_limit total_limit"),
    ("fit", "log_every=10", "logging_steps log_every_n_steps"),
    ("fit", 'metric="loss"', "monitor metric_for_best_model"),
    ("fit", "save_every=100", "save_steps every_n_train_steps"),
    ("fit", "to=(fx.TensorBoard(),)", "log_with report_to logger loggers trackers"),
    ("gather", 'ctx=ctx.axis("data")', "group process_group"),
    ("map", "batch=8", "batch_size"),
    ("Mesh", "context=2", "cp cp_size sequence sp"),
    ("Mesh", "pipeline=2", "pp pp_size stage stages"),
    ("Mesh", "replicate=2", "dp data ddp dp_size dp_replicate dp_replicate_size"),
    ("Mesh", "shard=2", "fsdp hsdp dp_shard dp_shard_size"),
    ("Mesh", "tensor=2", "tp tp_size model model_parallel"),
    ("pad", "value=0", "pad_index padding_value pad_value"),
    ("pad", "dim=0", "axis"),
    ("reduce", 'op="mean"', "reduction reduce_op"),
    ("reduce", 'ctx=ctx.axis("data")', "group process_group"),
    ("restore", "extra={...}", "custom_objects state extra_state"),
    ("restore", "random=False", "load_rng rng_state load_rng_state"),
    ("save", "background=True", "async_save is_async non_blocking"),
    ("save", "extra={...}", "custom_objects state extra_state"),
    ("save", "metric=0.5", "score monitor"),
    ("save", "position=batch.position", "step global_step epoch"),
    ("say", "everyone=True", "main_process_only all_processes"),
    ("scatter", "src=0", "from_process root group_src"),
    ("split", "pad=True", "apply_padding"),
    ("track", 'name="mine"', "run_name project_name experiment_name"),
    ("track", "settings={...}", "config hparams params"),
    ("track", "to=(fx.WandB(init={...}),)", "init_kwargs"),
    ("track", "to=(fx.TensorBoard(),)", "log_with report_to logger loggers trackers"),
)
OTHER_ARGUMENTS: Mapping[tuple[str, str], str] = MappingProxyType(
    {(call, name): use for call, use, names in _ARGUMENTS for name in names.split()}
)

# Values of the fields of a plan in other libraries, by field.
OTHER_VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "precision": {
            **dict.fromkeys(("no", "32", "32-true", "float32", "64-true"), '"fp32"'),
            **dict.fromkeys(("bf16-mixed", "bf16-true", "bfloat16", "bf16_mixed"), '"bf16"'),
            **dict.fromkeys(("16", "16-mixed", "16-true", "float16", "half"), '"fp16"'),
        },
        "batch": {"per_device": '"per_rank"', "split": '"global"', "total": '"global"'},
        "data": {"dispatch": 'fx.Data(source="dispatch")'},
        "even": {"drop_last": '"drop"', "even_batches": '"pad"', "join": '"uneven"'},
        "quantize": {
            **dict.fromkeys(("4bit", "nf4", "int4", "load_in_4bit"), "fx.Bnb4()"),
            **dict.fromkeys(("8bit", "int8", "load_in_8bit"), "fx.Bnb8()"),
            **{one: f'fx.Torchao(weights="{one}")' for one in ("int2", "float8")},
        },
        "compile": {
            **dict.fromkeys(("inductor", "default"), "True"),
            **dict.fromkeys(("eager", "aot_eager"), 'fx.Compile(backend="eager")'),
            "reduce-overhead": 'fx.Compile(mode="reduce-overhead")',
            "max-autotune": 'fx.Compile(mode="max-autotune")',
        },
        "strategy": {
            **dict.fromkeys(("dp", "ddp_spawn", "ddp_notebook", "multi_gpu", "auto"), '"ddp"'),
            "ddp_find_unused_parameters_true": "fx.DDP(unused_parameters=True)",
            **dict.fromkeys(("fsdp2", "full_shard", "hsdp"), '"fsdp"'),
            "zero1": "fx.DDP(shard_optimizer=True)",
            "zero2": 'fx.FSDP(mode="grads_and_optimizer")',
            "zero3": '"fsdp"',
            "deepspeed_stage_1": "fx.DeepSpeed(stage=1)",
            "deepspeed_stage_2": "fx.DeepSpeed(stage=2)",
            "deepspeed_stage_3": "fx.DeepSpeed(stage=3)",
            "deepspeed_stage_2_offload": 'fx.DeepSpeed(stage=2, offload_optimizer="cpu")',
            **dict.fromkeys(("single_device", "no", "none"), '"single"'),
            **dict.fromkeys(("tpu", "xla_fsdp", "single_xla"), '"xla"'),
        },
    }
)


def hint(name: object, *, at: Literal["script", "file", "command"] = "script") -> str:
    """A sentence on what a name of another library is called here; empty for other names.

    Args:
        name: As it was typed: with underscores or hyphens.
        at: Where it was typed.

    Example:
        >>> from fxtrain._other_names import hint
        >>> hint("max_grad_norm")
        ' Use fx.Plan(clip_norm=1.0).'
        >>> hint("max_grad_norm", at="file")
        ' Use plan.clip_norm.'
        >>> hint("--nproc-per-node", at="command")
        ' Use fxtrain launch --ranks 2 train.py.'
    """
    found = _other_name(name)
    if found is None:
        return ""
    if at == "file" and found.path:
        return f" Use {found.path}."
    is_launch = found.use.startswith("fxtrain ")
    if at == "command" and found.path and not is_launch:
        return f" Use {found.use} in the script, or {found.path} in a launch file."
    return f" Use {found.use}{'' if at == 'script' or is_launch else ' in the script'}."


def field_hint(owner: str, name: str, known: Collection[str]) -> str:
    """As `hint`, of an argument of a record or a function: its own field, if it has one.

    Example:
        >>> from fxtrain._other_names import field_hint
        >>> field_hint("DDP", "find_unused_parameters", ["bucket_mib", "unused_parameters"])
        ' Use DDP(unused_parameters=...).'
        >>> field_hint("DDP", "max_grad_norm", ["bucket_mib", "unused_parameters"])
        ' Use fx.Plan(clip_norm=1.0).'
        >>> field_hint("reduce", "reduction", ["tree", "ctx", "op"])
        ' Use reduce(op="mean").'
    """
    if use := OTHER_ARGUMENTS.get((owner, name)):
        return f" Use {owner}({use})."
    found = _other_name(name)
    field = found.path.rpartition(".")[2] if found else ""
    return f" Use {owner}({field}=...)." if field in known and owner != "Plan" else hint(name)


def call_hint(name: str) -> str:
    """As `hint`, of an attribute of `fxtrain` or of a context.

    Example:
        >>> from fxtrain._other_names import call_hint
        >>> call_hint("wait_for_everyone")
        ' Use fx.ops.barrier(ctx).'
    """
    return f" Use {OTHER_CALLS[name]}." if name in OTHER_CALLS else ""


def value_hint(field: str, value: object) -> str:
    """A sentence on what the value of a field in another library is here; else empty.

    Example:
        >>> from fxtrain._other_names import value_hint
        >>> value_hint("precision", "bf16-mixed")
        ' Use precision="bf16".'
    """
    known = OTHER_VALUES.get(field, {})
    plain = isinstance(value, str) or type(value).__name__ == "dtype" or value in (16, 32)
    word = str(value).lower().removeprefix("torch.") if plain else ""
    return f" Use {field}={known[word]}." if word in known else ""


def _other_name(name: object) -> OtherName | None:
    word = name.lstrip("-").replace("-", "_").lower() if isinstance(name, str) else ""
    return OTHER_NAMES.get(word)
