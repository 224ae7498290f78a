"""Losses and gradients that are not finite, on any rank."""

from fxtrain import ops
from fxtrain._errors import StepError
from fxtrain.state import Batch, DistContext, Wrapped

__all__ = ["nonfinite_problem"]


def nonfinite_problem(ctx: DistContext, batch: Batch, model: Wrapped) -> StepError | None:
    """An error that names the ranks with a non-finite loss or gradient; equal on every rank."""
    bad_grads = not model.strategy.finite(model)
    bad_losses = int(model.window.bad_losses)
    model.window.bad_losses.zero_()
    found = ops.gather_objects((bad_losses, bad_grads), ctx)
    if not any(losses or grads for losses, grads in found):
        return None
    lines = [
        f"  rank {rank}: {losses} non-finite loss{'' if losses == 1 else 'es'}; "
        f"gradients are {'non-finite' if grads else 'finite'}"
        for rank, (losses, grads) in enumerate(found)
        if losses or grads
    ]
    return StepError(
        "\n".join(
            [
                f"Non-finite values before update {model.window.updates + 1} "
                f"(epoch {batch.position.epoch}, index {batch.position.index}):",
                *lines,
                'Update skipped. Use Plan(nonfinite="skip") to continue without raising.',
            ]
        ),
        code="FX501",
    )
