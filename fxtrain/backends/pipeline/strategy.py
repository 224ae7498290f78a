"""Stages of the model on the ranks of the pipeline axis, by torch.distributed.pipelining."""

from typing import Any

import attrs
from torch import Tensor, nn

from fxtrain.backends.core import step_functions
from fxtrain.backends.core.initial_values import apply_with_buffers
from fxtrain.backends.core.module_changes import unmatched_names
from fxtrain.backends.fsdp.strategy import sharding_problems, undone_together
from fxtrain.backends.pipeline.execute import forward, run
from fxtrain.backends.pipeline.generation import generate
from fxtrain.backends.pipeline.partition import SCHEDULES, pipeline_problems
from fxtrain.backends.pipeline.weights import clip_norm, load_state, pipeline_weights, state_of
from fxtrain.backends.single import SINGLE, make_handle, wrap_without_engine
from fxtrain.backends.tensor import region
from fxtrain.state import PP, DistContext, Plan, Strategy, Wrapped, unsupported


def _check(ctx: DistContext, plan: Plan, module: nn.Module) -> tuple[str, ...]:
    problems = list(unmatched_names(module, plan))
    if ctx.world_size == 1:
        return tuple(problems)
    problems += _axis_problems(ctx, plan.strategy)
    problems += _plan_problems(plan)
    if plan.strategy.stages is not None:
        problems += sharding_problems(ctx, plan.strategy.stages, module)
        if plan.strategy.stages.expert is not None:
            problems.append("PP(stages=fx.FSDP(expert=...)) is not supported. Omit expert.")
        problems += _stage_problems(ctx, plan.strategy, module)
    if ctx.mesh.pipeline > 1:
        problems += pipeline_problems(module, plan, ctx.mesh.pipeline)
    return tuple(problems)


def _axis_problems(ctx: DistContext, config: PP) -> list[str]:
    sizes = ctx.mesh.sizes
    problems: list[str] = []
    if sizes["context"] > 1:
        problems.append(
            f"The mesh has context={sizes['context']}, which PP does not use: these ranks would "
            f"all compute the same. Omit the axis from fx.Mesh(...), or use FSDP() for context "
            f"parallelism."
        )
    if sizes["tensor"] > 1 and config.stages is None:
        problems.append(
            f"The mesh has tensor={sizes['tensor']}, but the plan does not say what to split over "
            f"it. Use PP(stages=fx.FSDP(tensor=fx.TP(...))), or omit the axis from fx.Mesh(...)."
        )
    if sizes["shard"] > 1 and config.stages is None:
        problems.append(
            f"The mesh has shard={sizes['shard']}, but PP() replicates each stage on the data "
            f"axis. Use PP(stages=fx.FSDP()) to shard them, or "
            f"fx.Mesh(replicate={sizes['shard'] * sizes['replicate']}, "
            f"pipeline={sizes['pipeline']})."
        )
    if sizes["pipeline"] == 1:
        problems.append(
            "PP runs stages on the ranks of the mesh's pipeline axis, which has one rank. Use "
            "more: fx.detect(mesh=fx.Mesh(pipeline=2)), or fxtrain launch --mesh pipeline=2."
        )
    return problems


def _stage_problems(ctx: DistContext, config: PP, module: nn.Module) -> list[str]:
    """Settings of FSDP and TP that the stages of a pipeline do not support."""
    held = config.stages
    assert held is not None
    problems: list[str] = []
    apart = SCHEDULES[config.schedule].splits and ctx.axis("data").world_size > 1
    if apart and held.mode == "full":
        problems.append(
            f"PP(schedule={config.schedule!r}) runs the backward of weights separately, and torch "
            f"looks for the weights of a stage before it gathers those freed after forward. Use "
            f"stages=FSDP(mode='grads_and_optimizer', ...), or 'interleaved_1f1b'."
        )
    if held.tensor is not None and held.tensor.sequence:
        problems += [
            f"PP splits before {start}, inside {name}, but TP(sequence=True) splits sequences "
            f"from the beginning of a block to its end. Split between blocks."
            for start in config.split
            for name, _ in region(module)
            if start.startswith(f"{name}.")
        ]
    return problems


def _plan_problems(plan: Plan) -> list[str]:
    config: PP = plan.strategy
    problems: list[str] = []
    if plan.compile is not None and not plan.compile.blocks:
        problems.append(
            "PP aborts the forward of the whole model in the middle, which torch.compile cannot "
            "trace. Compile blocks: fx.Compile(blocks=('Block',))."
        )
    elif plan.compile is not None and SCHEDULES[config.schedule].splits:
        problems.append(
            f"PP(schedule={config.schedule!r}) runs the backward of inputs and weights separately, "
            f"which compiled blocks do not support. Use '1f1b', or remove compile."
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
    if ctx.world_size == 1:
        return wrap_without_engine(strategy, module, ctx, plan, optimizer, scheduler)
    # Importing torch's part takes half a second, and other plans do not need it.
    from fxtrain.backends.pipeline.assemble import split_into_stages

    engine, undo = split_into_stages(module, ctx, plan)
    data = ctx.axis("data")
    copies = data.comm.group if plan.strategy.stages is None and data.world_size > 1 else None
    with undone_together(undo, ctx):
        model = make_handle(
            strategy, module, ctx, plan, optimizer, scheduler, undo=undo, replicas=copies
        )
    return attrs.evolve(model, engine=engine)


def _backward(loss: Tensor, model: Wrapped) -> None:
    if model.engine is not model.module:
        unsupported("a separate backward; train with fx.step", by="PP")()
    step_functions.backward(loss, model)


PIPELINE_STRATEGY: Strategy = attrs.evolve(
    SINGLE,
    name="PP",
    config=PP,
    full_parameters=False,
    converts_layers=False,
    updates_on_host=False,
    verifies_replicas=True,
    check=_check,
    wrap=_wrap,
    forward=forward,
    generate=generate,
    backward=_backward,
    run=run,
    clip_norm=clip_norm,
    apply=apply_with_buffers,
    state=state_of,
    load_state=load_state,
    weights=pipeline_weights,
    average=unsupported("averaging of replicas", by="PP"),
    fused=(("backward", _backward),),
)
