"""A replica on every rank, by torch's DistributedDataParallel."""

import copy
import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from fxtrain import _extensions
from fxtrain.backends.core import step_functions
from fxtrain.backends.core.gradient_buckets import Reduced, StableBucketsDDP
from fxtrain.backends.core.model_state import load_state, state_of
from fxtrain.backends.core.module_changes import (
    model_values,
    send_values,
    unused_axes,
    xla_problems,
)
from fxtrain.backends.core.optimizer_state import own_tensor_of_ranks
from fxtrain.backends.core.optimizers import local_optimizer
from fxtrain.backends.core.replica_digests import verify_replicas
from fxtrain.backends.single import SINGLE, wrap_without_engine
from fxtrain.errors import StepError
from fxtrain.state import (
    DDP,
    CommHook,
    DistContext,
    Key,
    Mesh,
    MicroBatch,
    ModelState,
    Plan,
    StateReader,
    Strategy,
    UpdateResult,
    UpdateSpec,
    Wrapped,
)

_KEY = "power_sgd"
_COUNTS = (
    "iter",
    "total_numel_before_compression",
    "total_numel_after_compression",
    "next_stats_report",
)
_NAMED = 5  # how many names a message lists


def _check(ctx: DistContext, plan: Plan, module: nn.Module) -> tuple[str, ...]:
    problems = [*xla_problems(ctx, "DDP")]
    if plan.context is not None or ctx.mesh.context > 1:
        problems += _extensions.sequence_problems(ctx, plan, module)
    problems += unused_axes(ctx, "DDP", ("tensor", "pipeline"))
    problems += _hook_problems(ctx, plan.strategy, module)
    if plan.strategy.static_graph and plan.accumulate > 1 and not plan.sync_each:
        problems.append(
            f"DDP(static_graph=True) with accumulate={plan.accumulate} skips reductions, "
            f"and to torch that is a different graph. Set sync_each=True, or "
            f"static_graph=False."
        )
    if plan.local is not None and ctx.world_size > 1 and plan.strategy.shard_optimizer:
        problems.append(
            f"Plan(local={type(plan.local).__name__}(...)) gives each replica its own optimizer, "
            f"but DDP(shard_optimizer=True) shares one. Remove one of them."
        )
    return tuple(problems)


def _hook_problems(ctx: DistContext, config: DDP, module: nn.Module) -> list[str]:
    hook, problems = config.hook, list[str]()
    if hook.name == "none" and hook.wrapper != "none":
        problems.append(
            f"CommHook(wrapper={hook.wrapper!r}) wraps another hook, but name is 'none'. "
            f"Use CommHook(name={hook.wrapper!r}), or name a hook to wrap."
        )
    if "bf16" in (hook.name, hook.wrapper) and ctx.device.type not in ("cuda", "xpu"):
        problems.append(
            f"CommHook with bf16: torch compresses to bf16 over NCCL and XCCL only, and this "
            f"context is on {ctx.device.type}. Use fp16."
        )
    if hook.name in ("power_sgd", "batched_power_sgd") and ctx.device.type == "cpu":
        size = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        if size > config.bucket_mib * 2**20:
            problems.append(
                f"CommHook(name={hook.name!r}): with gloo, torch's hook starts its reductions in "
                f"threads, and with more than one bucket ranks may run them in different orders "
                f"and deadlock. These gradients have {size / 2**20:.0f} MiB: set "
                f"DDP(bucket_mib=...) above that, or use fp16."
            )
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    scalars = [name for name, p in trained if not (p.ndim and p.numel())]
    if hook.name == "power_sgd" and scalars:
        problems.append(
            f"CommHook(name='power_sgd'): torch's hook views each gradient as a matrix, which "
            f"{', '.join(scalars[:_NAMED])} cannot be: parameters without a dimension or values. "
            f"Give them shape (1,), or use fp16."
        )
    if hook.name == "batched_power_sgd":
        problems.append(
            "CommHook(name='batched_power_sgd'): torch's hook fails on every gradient, because it "
            "passes a matrix to an orthogonalization that takes a batch of them. Use 'power_sgd'."
        )
    return problems


def _wrap(
    strategy: Strategy,
    module: nn.Module,
    ctx: DistContext,
    plan: Plan,
    optimizer: Any,
    scheduler: Any,
) -> Wrapped:
    # The ranks of the context axis, too, hold one replica each.
    data = ctx.axis("loss")
    if data.world_size == 1:
        return wrap_without_engine(strategy, module, ctx, plan, optimizer, scheduler)
    change = _shards_states(data) if plan.strategy.shard_optimizer else None
    replicas = data.comm.group if plan.local is None else None
    plain = wrap_without_engine(
        strategy, module, ctx, plan, optimizer, scheduler, change=change, replicas=replicas
    )
    if plan.local is not None or not any(p.requires_grad for p in module.parameters()):
        send_values(model_values(module), data)
        return _extensions.independent_replicas(plain)
    return attrs.evolve(plain, engine=_replicate(module, ctx, data, plan.strategy))


def _shards_states(
    data: DistContext,
) -> Callable[[torch.optim.Optimizer], torch.optim.Optimizer]:
    """What puts torch's ZeroRedundancyOptimizer (ZeRO-1) in place of an optimizer."""
    # Importing torch's part is slow and warns, and other plans do not need it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    class ShardedOptimizer(ZeroRedundancyOptimizer):
        """Updates this rank's parameters with the user's optimizer, and receives the others.

        torch takes the class of an optimizer and constructs it over a rank's parameters; it takes
        a function as well. Here the function keeps the user's own optimizer, reduced to this
        rank's parameters, so any optimizer with any arguments works. The parameter groups that
        schedulers and checkpoints see contain all parameters.
        """

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            groups = [copy.copy(group) for group in optimizer.param_groups]
            kinds = {p.dtype for group in groups for p in group["params"]}
            super().__init__(
                groups,
                lambda own: _keep_groups(optimizer, own),  # type: ignore[arg-type]
                process_group=data.comm.group,
                # One message per rank; torch's buckets take a single dtype.
                parameters_as_bucket_view=len(kinds) == 1,
            )
            self.defaults = optimizer.defaults  # some schedulers read it
            self._optimizer_step_pre_hooks.update(optimizer._optimizer_step_pre_hooks)
            self._optimizer_step_post_hooks.update(optimizer._optimizer_step_post_hooks)

        def _verify_same_dense_param_type(self) -> None:
            """Accept mixed dtypes: torch needs one only for its buckets, which are not used."""

        @property
        def part_of_rank(self) -> torch.optim.Optimizer:
            """The optimizer over this rank's parameters."""
            return self.optim

    return ShardedOptimizer


def _keep_groups(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Reduce an optimizer to these groups of its parameters."""
    optimizer.param_groups = groups
    parameters = {parameter for group in groups for parameter in group["params"]}
    for parameter in [each for each in optimizer.state if each not in parameters]:
        del optimizer.state[parameter]  # some start with a state of zeros
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # by torch: hooks should see one step, that of all ranks
        optimizer.step = MethodType(step.__wrapped__, optimizer)
    return optimizer


def _replicate(
    module: nn.Module, ctx: DistContext, data: DistContext, config: DDP
) -> StableBucketsDDP:
    send_values(model_values(module), data)
    # torch 2.13 renamed the option and warns about the older name.
    newer = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    options = {
        "device_ids": None if ctx.device.type in ("cpu", "mps") else [ctx.device],
        "process_group": data.comm.group,
        "bucket_cap_mb": config.bucket_mib,
        "gradient_as_bucket_view": config.bucket_view,
        "static_graph": config.static_graph,
        "find_unused_parameters": config.unused_parameters,
        # Values are sent above and after each reduction, also those of quantized weights, whose
        # classes torch cannot send.
        "init_sync": False,
        "forward_sync_buffers" if newer else "broadcast_buffers": False,
    }
    hook = config.hook
    return StableBucketsDDP(
        module,
        data,
        options,
        sends_buffers=config.sync_buffers,
        make_hook=None if hook.name == "none" else partial(_make_hook, data, hook),
        # The state of PowerSGD belongs to the layout of the buckets, and is restored before.
        orders=hook.name not in ("power_sgd", "batched_power_sgd"),
    )


def _make_hook(data: DistContext, config: CommHook) -> tuple[Any, Callable[..., Any]]:
    state: Any = data.comm.group
    if config.name in ("power_sgd", "batched_power_sgd"):
        options = attrs.asdict(config.power_sgd)
        state = powerSGD_hook.PowerSGDState(
            data.comm.group,
            matrix_approximation_rank=options.pop("rank"),
            start_powerSGD_iter=options.pop("start_iter"),
            random_seed=options.pop("seed"),
            **options,
        )
    hook: Any = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "power_sgd": powerSGD_hook.powerSGD_hook,
    }[config.name]
    if config.wrapper == "fp16":
        hook = default_hooks.fp16_compress_wrapper(hook)
    elif config.wrapper == "bf16":
        hook = default_hooks.bf16_compress_wrapper(hook)
    return state, hook


def _sync(model: Wrapped, micro_batch: MicroBatch) -> AbstractContextManager[None]:
    if model.engine is model.module:
        return step_functions.NOTHING
    if not micro_batch.reduces and model.plan.strategy.static_graph:
        raise StepError(
            "ops.sync(enabled=False): DDP(static_graph=True) needs the same graph in every "
            "backward, and one without a reduction is another. Use static_graph=False.",
            code="FX505",
        )
    return Reduced(model.engine) if micro_batch.reduces else model.engine.no_sync()


def _backward(loss: Tensor, model: Wrapped) -> None:
    if model.engine is not model.module:
        model.engine.before_backward(loss)
    try:
        step_functions.backward(loss, model)
    except RuntimeError as error:
        if "mark a variable ready only once" not in str(error):
            raise
        raise StepError(
            "DDP expects one gradient of each parameter in a backward, and this one computed "
            "several of a parameter, as reentrant recomputation (torch.utils.checkpoint with "
            "use_reentrant=True) of a module does that forward runs several times. Use "
            "use_reentrant=False, or Plan(recompute=...), or fx.DDP(static_graph=True)."
        ) from error


def _apply(model: Wrapped, update: UpdateSpec) -> UpdateResult:
    if model.engine is not model.module:  # of a loop without `ops.sync`
        model.engine.finish_reduction()
    every = model.plan.verify_replicas
    verifies = every and not (update.skip or (model.window.updates + 1) % every)
    if verifies and _shares_optimizer(model):
        # The update overwrites parameters with those of the rank that computes them.
        verify_replicas(model, before_update=True)
    return step_functions.apply(model, update)


def _shards(plan: Plan, mesh: Mesh) -> tuple[int, int]:
    data = mesh.replicate * mesh.shard * mesh.context
    return 1, data if plan.strategy.shard_optimizer else 1


def _verify(model: Wrapped) -> None:
    if not _shares_optimizer(model):  # otherwise `_apply` has compared them
        verify_replicas(model)


def _shares_optimizer(model: Wrapped) -> bool:
    return any([local_optimizer(optimizer) is not optimizer for optimizer in model.optimizers])


def _unwrap(model: Wrapped) -> nn.Module:
    module = SINGLE.unwrap(model)
    if _shares_optimizer(model):
        # Out of the buckets in which they were sent.
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
    return module


def power_sgd_state(model: Wrapped) -> ModelState:
    """`state_of`, and the state of the hook if the model has one.

    Errors are each rank's own; everything else of the hook is equal on all ranks.
    """
    state, hook = state_of(model), _hook(model)
    if hook is None:
        return state
    _, key, place, has_gauss, cached = hook.rng.get_state(legacy=True)
    values = {
        "counts": {name: getattr(hook, name) for name in _COUNTS},
        "random": [torch.tensor(key.tolist(), device="cpu"), place, has_gauss, cached],
        "p": dict(hook.p_memory_dict),
        "q": dict(hook.q_memory_dict),
        "buckets": model.engine.bucket_sizes(),
    }
    errors = {Key.of(_KEY, "error", bucket): error for bucket, error in hook.error_dict.items()}
    return attrs.evolve(state, own={**state.own, **errors}, values={**state.values, _KEY: values})


def load_power_sgd(model: Wrapped, saved: StateReader) -> None:
    """`load_state`, and the hook's state, which is reset if buckets have another layout.

    At another world size, each rank gets the mean of the errors, which is what they contribute
    to the mean gradient.
    """
    load_state(model, saved)
    hook, values = _hook(model), saved.values.get(_KEY)
    if hook is None or values is None or values["buckets"] != model.engine.bucket_sizes():
        return
    for name in _COUNTS:
        setattr(hook, name, values["counts"][name])
    key, place, has_gauss, cached = values["random"]
    hook.rng.set_state(("MT19937", key.numpy().astype("uint32"), place, has_gauss, cached))
    device = model.ctx.device
    hook.p_memory_dict = {bucket: tensor.to(device) for bucket, tensor in values["p"].items()}
    hook.q_memory_dict = {bucket: tensor.to(device) for bucket, tensor in values["q"].items()}
    errors = {bucket: _error(saved, bucket) for bucket in range(len(values["buckets"]))}
    hook.error_dict = {b: tensor.to(device) for b, tensor in errors.items() if tensor is not None}


def _hook(model: Wrapped) -> Any:
    state = getattr(model.engine, "hook_state", None)
    return state if isinstance(state, PowerSGDState) else None


def _error(saved: StateReader, bucket: int) -> Tensor | None:
    key = Key.of(_KEY, "error", bucket)
    if saved.ranks == saved.loading_ranks:
        return saved.own(key, saved.rank)
    tensors = own_tensor_of_ranks(saved, key)
    return torch.stack(tensors).mean(0) if tensors else None


DDP_STRATEGY: Strategy = attrs.evolve(
    SINGLE,
    name="DDP",
    config=DDP,
    check=_check,
    wrap=_wrap,
    one_rank=False,
    shards=_shards,
    overlapped=lambda _: ("backward",),  # the next bucket while one is reduced
    sync=_sync,
    backward=_backward,
    apply=_apply,
    unwrap=_unwrap,
    state=power_sgd_state,
    load_state=load_power_sgd,
    cuts_sequences=True,
    average=_extensions.average_replicas,
    verify=_verify,
)
