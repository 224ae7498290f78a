"""ZeRO by DeepSpeed: an engine that owns backward, reduction, clipping and update."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain import _tree
from fxtrain.backends.core import step_functions
from fxtrain.backends.core.initial_values import send_buffers
from fxtrain.backends.core.module_changes import unknown_classes
from fxtrain.backends.deepspeed import setup
from fxtrain.backends.deepspeed.config import ZERO, config_problems, partial_config
from fxtrain.backends.deepspeed.config_file import (
    WINDOW_ENTRIES,
    fill_from_config,
    is_enabled,
    read_config,
)
from fxtrain.backends.deepspeed.engine_state import engine_state, engine_weights, load_engine_state
from fxtrain.errors import StepError
from fxtrain.ops.logs import log
from fxtrain.ops.plan_agreement import LoggedPlans, plan_changes
from fxtrain.ops.same_errors import fail_together
from fxtrain.state import (
    DeepSpeed,
    DistContext,
    Mesh,
    MicroBatch,
    Plan,
    Strategy,
    UpdateResult,
    UpdateSpec,
    Wrapped,
    unsupported,
)


def _prepare(action: str, ctx: DistContext, plan: Plan) -> Plan:
    """The plan with its config's content, and the values that it leaves to the config.

    Logs once what the config adds. One exchange of packets for a config in a file, which may be
    missing on some nodes; none for its text.
    """
    if plan.strategy.config is None:
        return plan
    from_file = not plan.strategy.config.startswith("{")
    data: dict[str, Any] = {}
    with fail_together(ctx if from_file else None):
        data = read_config(plan.strategy)
    read = attrs.evolve(plan, strategy=attrs.evolve(plan.strategy, config=data))
    filled = fill_from_config(read, data, ctx.axis("data").world_size)
    known = ctx.comm.slot(LoggedPlans)
    only_checked = ctx.comm.simulated and ctx.comm.control is None  # before a launch
    if filled != read and filled not in known and not only_checked:
        known.add(filled)
        log(ctx, "fxtrain.plan").info(
            "fx.%s takes from the DeepSpeed config what the plan leaves at its default: %s.",
            *(action, plan_changes(read, filled)),
        )
    return filled


def _without_batch(plan: Plan) -> Plan:
    """A plan whose config leaves the rows of a micro-batch and of an update open."""
    data = read_config(plan.strategy)
    left = {name: "auto" for name in WINDOW_ENTRIES if name in data}
    config = {**data, **left} or None
    return attrs.evolve(plan, strategy=attrs.evolve(plan.strategy, config=config, micro_batch=None))


def _raises_parameters(plan: Plan) -> bool:
    """Only with torch's autocast; otherwise the engine keeps parameters in fp32 by itself."""
    autocasts = is_enabled(read_config(plan.strategy), "torch_autocast")
    return autocasts and plan.precision.compute != "fp32"


def _shards(plan: Plan, mesh: Mesh) -> tuple[int, int]:
    data = mesh.replicate * mesh.shard * mesh.context
    stage = partial_config(plan, data)[ZERO]["stage"]
    return data if stage == 3 else 1, data if stage else 1


def _check(ctx: DistContext, plan: Plan, module: nn.Module) -> tuple[str, ...]:
    if problems := _config_problems(ctx, plan):
        return problems
    setup.import_deepspeed()
    problems = [*setup.device_problems(ctx, plan)]
    if plan.clip_value is not None:
        problems.append(
            f"DeepSpeed cannot clip single entries: Plan(clip_value={plan.clip_value}). "
            f"Use clip_norm."
        )
    if plan.accumulate > 1 and not plan.flush:
        problems.append(
            "Plan(flush=False) keeps a window open at the end of the data, and DeepSpeed keeps its "
            "gradients in its engine, where no checkpoint can read them. Use flush=True."
        )
    scale = plan.precision.scale
    if plan.precision.compute == "fp16" and (scale.growth, scale.backoff) != (2.0, 0.5):
        problems.append(
            f"DeepSpeed's loss scale only doubles and halves: LossScale(growth={scale.growth}, "
            f"backoff={scale.backoff}). Use 2.0 and 0.5."
        )
    config = plan.strategy
    leaves = [name.split(".")[-1] for name in config.leaf_modules]  # DeepSpeed only logs these
    problems += unknown_classes(module, leaves, field="DeepSpeed(leaf_modules=...)")
    for axis, field in (("tensor", "tensor_parallel"), ("context", "sequence_parallel")):
        size = getattr(config, field) or 1
        if ctx.mesh.sizes[axis] != size:
            problems.append(
                f"DeepSpeed({field}={size}) needs an axis of that size, but the mesh of this "
                f"context has {axis}={ctx.mesh.sizes[axis]}. Use fx.Mesh({axis}={size})."
            )
    if ctx.mesh.tensor > 1 and ctx.mesh.context > 1:
        problems.append(
            "DeepSpeed(tensor_parallel=..., sequence_parallel=...): DeepSpeed supports one of them "
            "at a time. Remove one."
        )
    if ctx.mesh.pipeline > 1:
        problems.append(
            "DeepSpeed's pipelines need its own modules. Use Mesh(pipeline=1), or PP()."
        )
    return tuple(problems)


def _config_problems(ctx: DistContext, plan: Plan) -> tuple[str, ...]:
    """Problems of the engine's config that depend neither on the model nor on its optimizer."""
    ranks = ctx.axis("data").world_size
    return config_problems(partial_config(plan, ranks), ranks)


def _forward(model: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the engine or, without gradients, the module, whose hooks gather parameters."""
    run = model.module
    if torch.is_grad_enabled():
        run = model.engine
    # The module enters autocast itself; DeepSpeed refuses a region around its engine.
    with torch.autocast(model.ctx.device.type, enabled=False):
        out = run(*args, **kwargs)
    if model.plan.accumulate > 1:
        step_functions.refuse_backward_of_others(out, model)
    wide = model.plan.precision.output == "fp32"
    return _tree.map_leaves(step_functions.to_float, out) if wide else out


def _sync(model: Wrapped, micro_batch: MicroBatch) -> AbstractContextManager[None]:
    """Mark the end of a window for an engine that counts itself; others get it in `apply`."""
    if model.optimizers and _counts_itself(model.engine):
        model.engine.set_gradient_accumulation_boundary(micro_batch.reduces)
    return nullcontext()


def _backward(loss: Tensor, model: Wrapped) -> None:
    """The engine's backward, of a loss that is already divided."""
    if not model.optimizers:
        raise StepError(
            "DeepSpeed has no backward without an optimizer. Wrap the model with one: "
            "fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.AdamW(params)).",
            code="FX504",
        )
    if (parts := model.ctx.mesh.context) > 1:
        loss = loss / parts  # DeepSpeed sums over the ranks of a sequence
    model.engine.backward(loss, scale_wrt_gas=False)


def _begin(model: Wrapped) -> None:
    """Drop what another model's backward left, in `.grad` and where ZeRO accumulates gradients."""
    parameter: Any
    for parameter in model.module.parameters():
        parameter.grad = None
        if getattr(parameter, "grad_accum", None) is not None:
            parameter.grad_accum = None
    if model.engine is model.module:  # without an optimizer, there is no engine
        return
    optimizer = model.engine.optimizer
    sums = [
        *getattr(optimizer, "all_grad_tensors", {}).values(),
        *getattr(optimizer, "averaged_gradients", {}).values(),
    ]
    on_cpu = getattr(optimizer, "_offload_accumulated_param_ids", ())
    on_masters = getattr(optimizer, "fp32_groups_has_gradients", ())
    if (
        on_cpu
        or any([gradient is not None for gradient in sums])
        or any([any(flags) for flags in on_masters])
    ):
        _drop(model.engine)


def _finite(model: Wrapped) -> Tensor:
    return model.window.bad_grads == 0


def _apply(model: Wrapped, update: UpdateSpec) -> UpdateResult:
    """Scale, clip, update and zero, each by the engine's own functions."""
    if update.clip_value is not None:
        _clip_value()
    if not update.zero:
        _keep_gradients()
    _check_trained(model)
    send_buffers(model)
    engine = model.engine
    model.window.bad_grads.zero_()
    if update.skip:
        _drop(engine)
        return UpdateResult(applied=False)
    if _counts_itself(engine):
        engine.set_gradient_accumulation_boundary(True)
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = update.clip_norm or 0.0
    else:
        engine._config.gradient_clipping = update.clip_norm or 0.0
    with _scaled(engine, update.scale):
        engine.step()
    norm = engine.get_global_grad_norm() if update.clip_norm is not None else None
    if norm is not None:
        norm = torch.as_tensor(norm, dtype=torch.float32, device=model.ctx.device)
    return UpdateResult(applied=engine.was_step_applied(), grad_norm=norm)


def _check_trained(model: Wrapped) -> None:
    trained = model.strategy_state.trained
    named = model.module.named_parameters()
    changed = trained is not None and [n for n, p in named if p.requires_grad is (p not in trained)]
    if changed:
        raise StepError(
            f"requires_grad of {', '.join(changed[:5])} changed after fx.wrap. From stage 1 on, "
            f"DeepSpeed updates the parameters that required a gradient in fx.wrap, and no others. "
            f"Unwrap the model and wrap it again, or use DeepSpeed(stage=0), DDP() or FSDP().",
            code="FX505",
        )


def _counts_itself(engine: Any) -> bool:
    """Whether the engine manages accumulation, by its config or for lack of the option."""
    manages = getattr(engine, "managed_gradient_accumulation", None)
    return True if manages is None else manages()


@contextmanager
def _scaled(engine: Any, factor: float | Tensor | None) -> Iterator[None]:
    """Multiply the gradients of one update by a factor."""
    optimizer = engine.optimizer
    if factor is None:
        yield
    elif hasattr(optimizer, "external_loss_scale") and hasattr(optimizer, "loss_scaler"):
        # ZeRO divides gradients, wherever they are, by the loss scale, and removes it from the
        # norm: a scale that is 1/factor larger multiplies them.
        before = (optimizer.custom_loss_scaler, optimizer.external_loss_scale)
        scale = float(factor)
        wanted = optimizer.loss_scale / scale if scale else float("inf")
        optimizer.custom_loss_scaler, optimizer.external_loss_scale = True, wanted
        try:
            yield
        finally:
            optimizer.custom_loss_scaler, optimizer.external_loss_scale = before
    else:
        flat = getattr(optimizer, "fp32_groups_gradients_flat", None)
        grads = flat or [p.grad for p in engine.module.parameters() if p.grad is not None]
        for grad in grads:
            grad.mul_(factor)
        yield


def _drop(engine: Any) -> None:
    """Drop the gradients of a window, as the engine does on an overflow."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "clear_hp_grads"):
        optimizer.clear_hp_grads()
        optimizer.clear_lp_grads()
    elif not engine.zero_optimization():
        engine.zero_grad()
    else:
        with _seeing_overflow(optimizer):
            engine.step()


@contextmanager
def _seeing_overflow(optimizer: Any) -> Iterator[None]:
    """Make a ZeRO optimizer report an overflow, whatever the gradients are."""

    def overflow(*_: Any, **__: Any) -> bool:
        optimizer.overflow = True
        return True

    # Stages 1 and 2 call the first one if configured so, stage 3 the second one.
    names = ("check_overflow", "_overflow_check_and_loss_scale_update")
    checks = getattr(optimizer, "check_grad_overflow", None)
    for name in names:
        setattr(optimizer, name, overflow)
    optimizer.check_grad_overflow = True
    try:
        yield
    finally:
        for name in names:
            delattr(optimizer, name)
        optimizer.check_grad_overflow = checks


def _unwrap(model: Wrapped) -> nn.Module:
    """The module with full parameters in their original dtypes.

    Raises:
        PlanError: AutoTP has replaced layers.
    """
    weights = model.strategy.weights(model).values()
    if model.engine is not model.module:
        parameters = {
            weight.key: weight for weight in weights if isinstance(weight.like, nn.Parameter)
        }
        values = [
            (weight.like, weight.gather().to(model.ctx.device)) for weight in parameters.values()
        ]
        model.engine.destroy()
        for parameter, value in values:
            parameter.data = value
            parameter.grad = None
    model.undo()
    return model.module


_clip_norm = unsupported(
    "clip_norm by itself; give it to Plan(clip_norm=...), or to "
    "ops.apply(model, UpdateSpec(clip_norm=...))",
    by="DeepSpeed",
)
_clip_value = unsupported("clip_value", by="DeepSpeed")
_keep_gradients = unsupported(
    "ops.apply(zero=False), since its engine zeroes the gradients that it keeps", by="DeepSpeed"
)
_scale_grads = unsupported(
    "scale_grads by itself; give it to ops.apply(model, UpdateSpec(scale=...))", by="DeepSpeed"
)

DEEPSPEED_STRATEGY = Strategy(
    name="DeepSpeed",
    config=DeepSpeed,
    check=_check,
    prepare=_prepare,
    without_batch=_without_batch,
    raises_parameters=_raises_parameters,
    shards=_shards,
    wrap=setup.wrap_engine,
    forward=_forward,
    sync=_sync,
    backward=_backward,
    begin=_begin,
    run=step_functions.run,
    clip_norm=_clip_norm,
    clip_value=_clip_value,
    scale_grads=_scale_grads,
    finite=_finite,
    apply=_apply,
    state=engine_state,
    load_state=load_engine_state,
    weights=engine_weights,
    unwrap=_unwrap,
    fused=(("clip_norm", _clip_norm), ("clip_value", _clip_value), ("scale_grads", _scale_grads)),
)
