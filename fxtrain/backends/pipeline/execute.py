"""Batches through a pipeline: in training with loss and backward, and forward alone."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain import _tree, ops
from fxtrain._errors import PlanError, StepError
from fxtrain.backends.core import step_functions
from fxtrain.backends.core.microbatches import join, parts_of_batch, split
from fxtrain.backends.fsdp.strategy import loss_on_parts, splits_logits
from fxtrain.backends.pipeline.last_stage import broadcast_loss, broadcast_outputs, fake_output
from fxtrain.backends.pipeline.partition import parts_for
from fxtrain.backends.pipeline.stage_gradients import reduce_grads
from fxtrain.state import PP, Batch, WeightedLoss, Wrapped

__all__ = ["forward", "run"]

ComputeLoss = Callable[[Wrapped, Batch], WeightedLoss]


class _ModelCalled(BaseException):
    """The user's loss function calls the model; not an Exception, which it might catch."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = (args, kwargs)


def run(
    model: Wrapped,
    batch: Batch,
    compute_loss: ComputeLoss,
    reduce: bool,  # noqa: FBT001
) -> WeightedLoss:
    """Forward, loss and backward of a batch in micro-batches, by the plan's schedule.

    The user's loss function runs on every rank up to its call of the model, whose arguments are
    all that stages need of it, and once more on the last stage, with the outputs.

    Raises:
        PlanError: micro-batches do not divide the batch, or the model cannot be split.
        StepError: the loss function does not call the model.
    """
    engine = model.engine
    if engine is model.module:
        return step_functions.run(model, batch, compute_loss, reduce)
    micro_batches = _micro_batches_of(model, batch)
    seeds = [_seed(model, micro_batch) for micro_batch in micro_batches]
    calls = [
        _capture_arguments(model, compute_loss, *pair)
        for pair in zip(micro_batches, seeds, strict=True)
    ]
    from fxtrain.backends.pipeline.schedules import prepare

    ready = prepare(model, calls, train=True)
    if model.scaler is not None:
        model.scaler.scale(torch.zeros((), device=model.ctx.device))  # torch starts it so
    shares: list[WeightedLoss] = []

    def finish(out: Any, index: int) -> Tensor:
        share = _computed_loss(model, compute_loss, micro_batches[index], seeds[index], out)
        shares.append(attrs.evolve(share, loss=share.mean))
        loss = share.loss if model.scaler is None else model.scaler.scale(share.loss)
        return loss.clone() if loss._is_view() else loss

    def fake() -> WeightedLoss:
        out = fake_output(model, ready, calls[0])
        return _computed_loss(model, compute_loss, micro_batches[0], seeds[0], out)

    with model.strategy.sync(model, reduce):
        _run_all(model, ready, calls, finish)
        told = broadcast_loss(model, ready, shares, batch, fake)
        if batch.position.micro == 0:  # sums over stages are made once a window
            reduce_grads(model)
    return told


def _micro_batches_of(model: Wrapped, batch: Batch) -> list[Batch]:
    """The micro-batches of a batch."""
    layout = model.engine.layout
    parts = parts_for(model.plan, layout, batch.sizes)
    if not parts:
        raise PlanError(
            f"PP runs {layout.parts} micro-batches, which do not divide a batch of "
            f"{', '.join(map(str, sorted(set(batch.sizes))))} rows on a rank. Use a batch size "
            f"that is a multiple of {layout.parts}, or PP(microbatches=...) with a divisor of it."
        )
    return parts_of_batch(batch, model.ctx.axis("data").rank, parts)


def forward(model: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Outputs for a batch, without gradients; every rank of the pipeline calls this.

    Raises:
        StepError: gradients are on: forward and backward belong together here.
    """
    engine = model.engine
    if engine is model.module:
        return step_functions.forward(model, args, kwargs)
    if torch.is_grad_enabled():
        raise StepError(
            "PP runs forward and backward of micro-batches together, inside of fx.step. Train "
            "with fx.step, and call the model under torch.no_grad() to evaluate it."
        )
    rows = _tree.row_count((args, kwargs))
    if not rows:
        raise StepError(
            "PP splits the rows of a batch, and no argument of the model is a tensor with rows."
        )
    parts = _parts_of_forward(model, rows)
    calls = split((args, kwargs), rows, parts)
    from fxtrain.backends.pipeline.schedules import prepare

    ready = prepare(model, calls, train=False)
    outputs: list[Any] = []

    def finish(out: Any, _: int) -> Tensor:
        apart = splits_logits(model.ctx, model.plan.strategy.stages)
        outputs.append(_tree.map_leaves(_whole, out) if apart else out)
        return torch.zeros(1, device=model.ctx.device)

    _run_all(model, ready, calls, finish)
    whole = join(outputs, rows // parts) if outputs else None
    if outputs and model.plan.precision.output == "fp32":
        whole = _tree.map_leaves(step_functions.to_float, whole)

    def fake() -> Any:
        return join([fake_output(model, ready, calls[0])] * parts, rows // parts)

    config: PP = model.plan.strategy
    return whole if config.outputs == "last" else broadcast_outputs(model, ready, whole, fake)


def _parts_of_forward(model: Wrapped, rows: int) -> int:
    """Micro-batches of a forward; as many on every data rank where these gather units together."""
    data = model.ctx.axis("data")
    everywhere = {rows}
    if model.plan.strategy.stages is not None and data.world_size > 1 and not data.comm.simulated:
        everywhere = set(ops.gather_objects(rows, data))
    most: int = model.engine.layout.parts
    return max(n for n in range(1, most + 1) if all(rows % n == 0 for rows in everywhere))


def _run_all(
    model: Wrapped, ready: Any, calls: Sequence[Any], finish: Callable[[Any, int], Tensor]
) -> None:
    """Run every micro-batch through this rank's stages.

    Args:
        finish: Makes of the model's outputs for a micro-batch what torch goes on with.
    """
    engine = model.engine
    index_of = {stage: number for number, stage in engine.stages.items()}

    def job(stage: Any, received: tuple[Tensor, ...], index: int) -> Any:
        with ops.autocast(model):
            ended, out = stage.visit(calls[index], received, ready.sends.get(index_of[stage], ()))
        return finish(out, index) if ended else out

    apart = splits_logits(model.ctx, model.plan.strategy.stages)
    with loss_on_parts(nullcontext()) if apart else nullcontext():
        engine.run(ready, job)


def _capture_arguments(
    model: Wrapped, compute_loss: ComputeLoss, micro_batch: Batch, seed: int
) -> Any:
    """The arguments with which the user's loss function calls the model."""

    def called(_: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise _ModelCalled(args, kwargs)

    try:
        # What it draws by chance must be the same on all stages, and when it runs again.
        with ops.fork_rng(model.ctx, seed):
            compute_loss(_replaced_forward(model, called), micro_batch)
    except _ModelCalled as found:
        return found.call
    raise StepError(
        "PP: the loss function did not call the model that it was given. Write "
        "loss=lambda model, batch: ... model(...), with one call."
    )


def _computed_loss(
    model: Wrapped, compute_loss: ComputeLoss, micro_batch: Batch, seed: int, out: Any
) -> WeightedLoss:
    answers = [
        out
        if model.plan.precision.output != "fp32"
        else _tree.map_leaves(step_functions.to_float, out)
    ]

    def called(_: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not answers:
            raise StepError(
                "PP: the loss function called the model twice; a pipeline runs it once. Put "
                "what is compared into one batch."
            )
        return answers.pop()

    with ops.fork_rng(model.ctx, seed):
        return compute_loss(_replaced_forward(model, called), micro_batch)


def _replaced_forward(model: Wrapped, called: Callable[..., Any]) -> Wrapped:
    return attrs.evolve(model, strategy=attrs.evolve(model.strategy, forward=called))


def _seed(model: Wrapped, micro_batch: Batch) -> int:
    place = micro_batch.position
    rank = model.ctx.axis("data").rank
    text = f"{model.plan.seed} {place.epoch} {place.index} {rank} {micro_batch.part}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _whole(leaf: Any) -> Any:
    full = getattr(leaf, "full_tensor", None)  # of logits in parts
    return leaf if full is None else full()
