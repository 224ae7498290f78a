"""Stages of the model on the ranks of the pipeline axis, by torch.distributed.pipelining.

Batches run through them in micro-batches: in training with backward, else forward alone.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import attrs
import torch
from torch import Tensor, nn
from torch import distributed as dist

from fxtrain import _tree, ops
from fxtrain.backends.core import step_functions
from fxtrain.backends.core.initial_values import apply_with_buffers
from fxtrain.backends.core.module_changes import unused_axes
from fxtrain.backends.fsdp.strategy import (
    loss_on_parts,
    overlapped,
    raises_parameters,
    sharding_problems,
    shards,
    splits_logits,
    undone_together,
)
from fxtrain.backends.pipeline.batch_parts import join_rows, parts_of_batch, split_parts
from fxtrain.backends.pipeline.generation import generate
from fxtrain.backends.pipeline.partition import (
    SCHEDULES,
    bubble_share,
    microbatch_count,
    parts_for,
    pipeline_problems,
)
from fxtrain.backends.pipeline.stage import ReceivedFakes
from fxtrain.backends.pipeline.weights import (
    clip_norm,
    load_state,
    pipeline_state,
    pipeline_weights,
    reduce_grads,
)
from fxtrain.backends.single import SINGLE, make_handle, wrap_without_engine
from fxtrain.backends.tensor import region
from fxtrain.errors import PlanError, StepError
from fxtrain.ops.devices import as_scalar
from fxtrain.ops.placeholders import uncounted
from fxtrain.state import (
    PP,
    Batch,
    DistContext,
    Mesh,
    MicroBatch,
    Plan,
    Strategy,
    WeightedLoss,
    Wrapped,
    unsupported,
)

ComputeLoss = Callable[[Wrapped, Batch], WeightedLoss]


def _check(ctx: DistContext, plan: Plan, module: nn.Module) -> tuple[str, ...]:
    if ctx.world_size == 1:
        return ()
    problems = [*_axis_problems(ctx, plan.strategy), *_plan_problems(plan)]
    if plan.strategy.stages is not None:
        problems += sharding_problems(ctx, plan.strategy.stages, module)
        if plan.strategy.stages.expert is not None:
            problems.append("PP(stages=fx.FSDP(expert=...)) is not supported. Omit expert.")
        problems += _stage_problems(ctx, plan.strategy, module)
    if ctx.mesh.pipeline > 1:
        problems += pipeline_problems(module, plan, ctx.mesh.pipeline)
    return tuple(problems)


def _axis_problems(ctx: DistContext, config: PP) -> list[str]:
    problems = unused_axes(ctx, "PP", ("context",))
    if config.stages is None:
        problems += unused_axes(ctx, "PP without stages=", ("shard", "tensor"))
    if ctx.mesh.pipeline == 1:
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
    if plan.methods:
        problems.append(
            f"PP splits forward into stages, and Plan(methods={plan.methods}) names other methods. "
            f"Remove methods, or use DDP() or FSDP()."
        )
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
    if ctx.world_size == 1:  # there is nothing to split
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


# Not an Exception: `except Exception` in the loss function must not stop it.
class _ModelCalled(BaseException):
    """Raised where the loss function calls the model, which ends its first run."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = (args, kwargs)


def run(model: Wrapped, micro_batch: MicroBatch, compute_loss: ComputeLoss) -> WeightedLoss:
    """Forward, loss and backward of a batch in micro-batches, by the plan's schedule.

    The user's loss function runs twice on the last stage; `fxtrain.backends.pipeline` says why.

    Raises:
        PlanError: micro-batches do not divide the batch, or the model cannot be split.
        StepError: the loss function does not call the model.
    """
    engine, batch = model.engine, micro_batch.batch
    parts = _parts_of(model, batch)
    seeds = [_seed(model, part) for part in parts]
    calls = [
        _capture_arguments(model, compute_loss, *pair) for pair in zip(parts, seeds, strict=True)
    ]
    from fxtrain.backends.pipeline.schedules import prepare_schedule

    ready = prepare_schedule(model, calls, train=True)
    if model.scaler is not None:
        model.scaler.scale(torch.zeros((), device=model.ctx.device))  # initializes torch's scaler
    shares: list[WeightedLoss] = []

    def finish(out: Any, index: int) -> Tensor:
        share = _computed_loss(model, compute_loss, parts[index], seeds[index], out)
        shares.append(attrs.evolve(share, loss=share.mean))
        loss = share.loss if model.scaler is None else model.scaler.scale(share.loss)
        # torch's schedules detach it in place, which a view refuses.
        return loss.clone() if loss._is_view() else loss

    def fake() -> WeightedLoss:
        out = fake_output(model, ready, calls[0])
        return _computed_loss(model, compute_loss, parts[0], seeds[0], out)

    with model.strategy.sync(model, micro_batch):
        # Sharded stages have parameters of their own.
        modules = (model.module, *engine.stages.values())
        block = nullcontext(_nothing) if micro_batch.has_rows else uncounted(modules)
        with block as after_stage:
            _run_all(model, ready, calls, finish, after_stage)
        shared = broadcast_loss(model, ready, shares, batch, fake)
        if micro_batch.closes:  # sums over stages are computed once per window
            reduce_grads(model)
    return shared


def _parts_of(model: Wrapped, batch: Batch) -> list[Batch]:
    """The micro-batches of a batch."""
    partition = model.engine.partition
    parts = parts_for(model.plan, partition, batch.sizes)
    if not parts:
        raise PlanError(
            f"PP runs {partition.parts} micro-batches, but a batch of "
            f"{', '.join(map(str, sorted(set(batch.sizes))))} rows on a rank is not divisible by "
            f"that. Use a batch size that is a multiple of {partition.parts}, or "
            f"PP(microbatches=...) with a divisor of it."
        )
    return parts_of_batch(batch, model.ctx.axis("data").rank, parts)


def forward(model: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Outputs for a batch, without gradients; every rank of the pipeline must call this.

    Raises:
        StepError: gradients are enabled: a pipeline runs forward and backward together.
    """
    if torch.is_grad_enabled():
        raise StepError(
            "PP runs forward and backward of micro-batches together, inside fx.step, so that "
            "fx.update cannot take a loss computed before. Train with fx.step(ctx, batch, fns), "
            "and call the model under torch.no_grad() to evaluate it."
        )
    rows = _tree.row_count((args, kwargs))
    if not rows:
        raise StepError(
            "PP splits the rows of a batch, but no argument of the model is a tensor with rows. "
            "Pass tensors whose first dimension is the batch."
        )
    parts = _parts_of_forward(model, rows)
    calls = split_parts((args, kwargs), rows, parts)
    from fxtrain.backends.pipeline.schedules import prepare_schedule

    ready = prepare_schedule(model, calls, train=False)
    outputs: list[Any] = []

    def finish(out: Any, _: int) -> Tensor:
        apart = splits_logits(model.ctx, model.plan.strategy.stages)
        outputs.append(_tree.map_leaves(_whole, out) if apart else out)
        return torch.zeros(1, device=model.ctx.device)

    _run_all(model, ready, calls, finish, _nothing)
    whole = join_rows(outputs, rows // parts) if outputs else None
    if outputs and model.plan.precision.output == "fp32":
        whole = _tree.map_leaves(step_functions.to_float, whole)

    def fake() -> Any:
        return join_rows([fake_output(model, ready, calls[0])] * parts, rows // parts)

    config: PP = model.plan.strategy
    return whole if config.outputs == "last" else broadcast_outputs(model, ready, whole, fake)


def _parts_of_forward(model: Wrapped, rows: int) -> int:
    """Micro-batches of a forward; as many on every data rank where these gather units together."""
    data = model.ctx.axis("data")
    everywhere = {rows}
    if model.plan.strategy.stages is not None and data.world_size > 1:
        everywhere = set(ops.gather_objects(rows, data))
    most: int = model.engine.partition.parts
    return max(n for n in range(1, most + 1) if all(rows % n == 0 for rows in everywhere))


def _nothing() -> None:
    """Do nothing after a stage."""


def _run_all(
    model: Wrapped,
    ready: Any,
    calls: Sequence[Any],
    finish: Callable[[Any, int], Tensor],
    after_stage: Callable[[], None],
) -> None:
    """Run every micro-batch through this rank's stages.

    Args:
        finish: Turns the model's outputs for a micro-batch into the value that torch continues
            with.
        after_stage: Called after each forward of a stage.
    """
    engine = model.engine
    index_of = {stage: number for number, stage in engine.stages.items()}

    def job(stage: Any, received: tuple[Tensor, ...], index: int) -> Any:
        with ops.autocast(model):
            ended, out = stage.visit(calls[index], received, ready.sends.get(index_of[stage], ()))
        after_stage()
        return finish(out, index) if ended else out

    apart = splits_logits(model.ctx, model.plan.strategy.stages)
    with loss_on_parts(nullcontext()) if apart else nullcontext():
        engine.run(ready, job)


def _capture_arguments(
    model: Wrapped, compute_loss: ComputeLoss, micro_batch: Batch, seed: int
) -> Any:
    """The arguments with which the user's loss function calls the model."""

    def raise_call(_: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        raise _ModelCalled(args, kwargs)

    try:
        # Its random draws must be equal on all stages, and equal again in the second run.
        with ops.fork_rng(model.ctx, seed):
            compute_loss(_replaced_forward(model, raise_call), micro_batch)
    except _ModelCalled as called:
        return called.call
    raise StepError(
        "PP: the loss function did not call the model that it received. Write "
        "loss=lambda model, batch: ... model(...), with one call."
    )


def _computed_loss(
    model: Wrapped, compute_loss: ComputeLoss, micro_batch: Batch, seed: int, out: Any
) -> WeightedLoss:
    if model.plan.precision.output == "fp32":
        out = _tree.map_leaves(step_functions.to_float, out)
    outputs = [out]

    def given(*_: Any) -> Any:
        if not outputs:
            raise StepError(
                "PP: the loss function called the model twice, but a pipeline runs it once. Put "
                "both inputs into one batch."
            )
        return outputs.pop()

    with ops.fork_rng(model.ctx, seed):
        return compute_loss(_replaced_forward(model, given), micro_batch)


def _replaced_forward(model: Wrapped, called: Callable[..., Any]) -> Wrapped:
    return attrs.evolve(model, strategy=attrs.evolve(model.strategy, forward=called))


def _seed(model: Wrapped, micro_batch: Batch) -> int:
    window, rank = model.window, model.ctx.axis("data").rank
    text = f"{model.plan.seed} {window.updates} {window.micro} {rank} {micro_batch.part}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _whole(leaf: Any) -> Any:
    full = getattr(leaf, "full_tensor", None)  # a sharded logit
    return leaf if full is None else full()


def broadcast_loss(
    model: Wrapped,
    ready: Any,
    shares: list[WeightedLoss],
    batch: Batch,
    fake: Callable[[], WeightedLoss],
) -> WeightedLoss:
    """The batch's weighted loss, on every rank of the pipeline.

    Args:
        ready: The schedule for batches of this kind.
        shares: Losses of the micro-batches, on the rank of the last stage.
        fake: Creates a fake one in a simulated world, where that rank sends nothing.

    Effects:
        A broadcast of four numbers; the first time, and for aux metrics, one of objects.
    """
    engine, window = model.engine, model.window
    if ready.form is None:
        silent = model.ctx.comm.simulated and not shares
        own = [fake()] if silent else shares
        ready.form = _broadcast_object(model, _form_of(own[0]) if own else None)
    dtype, provisional, form_of_aux = ready.form
    numbers = torch.zeros_like(window.sums)
    if shares:
        weights = torch.stack([_as(weighted.weight, numbers) for weighted in shares])
        means = torch.stack([_as(weighted.mean, numbers) for weighted in shares])
        total = weights.sum()
        numbers[0] = (means * weights).sum() / torch.where(total == 0, 1.0, total)
        numbers[1] = total
        numbers[2], numbers[3] = window.scale, window.weight
    source = engine.axis.comm.ranks[engine.source]
    dist.broadcast(numbers, source, group=engine.axis.comm.group)
    window.scale.copy_(numbers[2])
    window.weight.copy_(numbers[3])
    rows = batch.sizes[model.ctx.axis("data").rank]
    aux = None if form_of_aux is None else _broadcast_aux(model, ready, shares, rows // ready.parts)
    mean = numbers[0].to(dtype)
    weight = numbers[1] if provisional else rows
    return WeightedLoss(loss=mean, mean=mean, weight=weight, aux=aux, provisional=provisional)


def broadcast_outputs(model: Wrapped, ready: Any, whole: Any, fake: Callable[[], Any]) -> Any:
    """The last stage's outputs on every rank of the pipeline.

    Args:
        whole: The outputs on that rank; None on others.
        fake: Creates fake ones in a simulated world, where that rank sends nothing.
    """
    engine = model.engine
    if ready.form is None:
        own = fake() if model.ctx.comm.simulated and whole is None else whole
        ready.form = _broadcast_object(model, _tree.map_leaves(_emptied, own))
    if whole is None:
        whole = _tree.map_leaves(lambda leaf: _made(leaf, model.ctx.device), ready.form)
    return ops.broadcast(whole, engine.axis, src=engine.source)


def fake_output(model: Wrapped, ready: Any, call: Any) -> Any:
    """What a simulated last stage returns for a micro-batch, without values."""
    last = len(model.engine.partition.ranks) - 1
    mode = ReceivedFakes()
    received = tuple(mode.like(meta, model.ctx.device) for meta in ready.sends[last - 1])
    with ops.autocast(model):
        return model.engine.fake_stages[last].visit(call, received, ())[1]


def _form_of(weighted: WeightedLoss) -> tuple[torch.dtype, bool, Any]:
    """What is equal for all micro-batches; of aux metrics, without values, None without any."""
    aux = _tree.map_leaves(_emptied, weighted.aux)
    return weighted.mean.dtype, weighted.provisional, aux


def _broadcast_aux(model: Wrapped, ready: Any, shares: list[WeightedLoss], rows: int) -> Any:
    """The aux metrics of micro-batches with this many rows, joined.

    Effects:
        A broadcast of objects, for what is no tensor and for shapes, which may change from batch to
        batch, and one of tensors for each of their dtypes. The host waits for other ranks' hosts,
        and not for devices.
    """
    axis, device = model.engine.axis, model.ctx.device
    own = [_tree.map_leaves(lambda x: _moved(x, device), share.aux) for share in shares]
    if model.ctx.comm.simulated and not own:
        own = [_tree.map_leaves(lambda leaf: _made(leaf, device), ready.form[2])] * ready.parts
    aux = join_rows(own, rows, totals=True) if own else None
    form = _broadcast_object(model, _tree.map_leaves(_emptied, aux))
    if not own:
        aux = _tree.map_leaves(lambda leaf: _made(leaf, device), form)
    step_functions.broadcast_tensors(
        [leaf for leaf in _tree.flatten(aux)[0] if isinstance(leaf, Tensor)],
        axis,
        src=model.engine.source,
    )
    return aux


def _moved(leaf: Any, device: torch.device) -> Any:
    return leaf.detach().to(device).contiguous() if isinstance(leaf, Tensor) else leaf


def _broadcast_object(model: Wrapped, value: Any) -> Any:
    """The last stage's object on every rank; in a simulated world this rank's own."""
    axis, source = model.engine.axis, model.engine.source
    if model.ctx.comm.simulated:  # fake tensors cannot be sent as objects
        ops.broadcast_object(None, axis, src=source)
        return value
    return ops.broadcast_object(value, axis, src=source)


def _as(value: Any, like: Tensor) -> Tensor:
    return as_scalar(value, like).reshape(())


class _Form:
    """A leaf in place of a tensor that is received later; it is sent in a packet, unlike that."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _emptied(leaf: Any) -> Any:
    return _Form(leaf) if isinstance(leaf, Tensor) else leaf


def _made(leaf: Any, device: torch.device) -> Any:
    """A tensor to receive into; integers are 0, for simulated worlds where nothing arrives."""
    if isinstance(leaf, _Form):
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
    return leaf


def _of_stages(split: Callable[..., Any], whole: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs stages or reads what is split; one rank uses that of `Single`."""

    @functools.wraps(whole)
    def function(model: Wrapped, *args: Any, **kwargs: Any) -> Any:
        return (whole if model.ctx.world_size == 1 else split)(model, *args, **kwargs)

    return function


def _backward(loss: Tensor, model: Wrapped) -> None:
    if model.ctx.world_size > 1:
        unsupported("a separate backward; train with fx.step", by="PP")()
    SINGLE.backward(loss, model)


def _of_config(plan: Plan) -> Plan:
    """The plan of each stage by itself."""
    return attrs.evolve(plan, strategy=plan.strategy.stages)


def _raises_parameters(plan: Plan) -> bool:
    if plan.strategy.stages is None:
        return SINGLE.raises_parameters(plan)
    return raises_parameters(_of_config(plan))


def _shards(plan: Plan, mesh: Mesh) -> tuple[int, int]:
    return (1, 1) if plan.strategy.stages is None else shards(_of_config(plan), mesh)


def _in_host_memory(plan: Plan) -> bool:
    return plan.strategy.stages is not None and plan.strategy.stages.offload


def _overlapped(plan: Plan) -> tuple[str, ...]:
    """Stages that are replicas reduce their gradients once, after the schedule."""
    sharded = plan.strategy.stages is not None and plan.strategy.stages.mode != "none"
    return overlapped(_of_config(plan)) if sharded else ()


PIPELINE_STRATEGY: Strategy = attrs.evolve(
    SINGLE,
    name="PP",
    config=PP,
    raises_parameters=_raises_parameters,
    outputs_everywhere=lambda plan: plan.strategy.outputs == "all",
    shards=_shards,
    in_host_memory=_in_host_memory,
    overlapped=_overlapped,
    parts=microbatch_count,
    bubble=bubble_share,
    one_rank=False,
    waits_in_forward=True,
    grads_in_module=False,
    full_parameters=False,
    converts_layers=False,
    updates_on_host=False,
    check=_check,
    wrap=_wrap,
    forward=_of_stages(forward, SINGLE.forward),
    generate=generate,
    backward=_backward,
    run=_of_stages(run, SINGLE.run),
    clip_norm=_of_stages(clip_norm, SINGLE.clip_norm),
    apply=apply_with_buffers,
    state=_of_stages(pipeline_state, SINGLE.state),
    load_state=_of_stages(load_state, SINGLE.load_state),
    weights=_of_stages(pipeline_weights, SINGLE.weights),
    fused=(("backward", _backward),),
)
