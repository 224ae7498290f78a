"""Losses and gradients that are not finite, on any rank."""

from fxtrain import ops
from fxtrain._errors import StepError
from fxtrain.state import Batch, DistContext, UpdateSpec, Wrapped

__all__ = ["found_nonfinite"]


def found_nonfinite(ctx: DistContext, batch: Batch, model: Wrapped) -> bool:
    """Whether any rank has a non-finite loss or gradient; the same answer on every rank.

    Raises:
        StepError: one has, under `nonfinite="raise"`; it names the ranks. The update is skipped.
    """
    bad_grads = not model.strategy.finite(model)
    bad_losses = int(model.window.bad_losses)
    model.window.bad_losses.zero_()
    found = ops.gather_objects((bad_losses, bad_grads), ctx)
    if not any(losses or grads for losses, grads in found):
        return False
    if model.plan.nonfinite == "skip":
        return True
    model.strategy.apply(model, UpdateSpec(skip=True))
    lines = [
        f"  rank {rank}: {losses} non-finite loss{'' if losses == 1 else 'es'}; "
        f"gradients are {'non-finite' if grads else 'finite'}"
        for rank, (losses, grads) in enumerate(found)
        if losses or grads
    ]
    raise StepError(
        "\n".join(
            [
                f"Non-finite values before update {batch.position.updates} "
                f"(epoch {batch.position.epoch}, index {batch.position.index}):",
                *lines,
                'Update skipped. Use Plan(nonfinite="skip") to continue without raising.',
            ]
        ),
        code="FX501",
    )
