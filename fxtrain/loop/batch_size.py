"""The largest batch size that fits, with the rows of an update unchanged."""

import traceback
from collections.abc import Callable

import attrs
import torch

from fxtrain import ops
from fxtrain._errors import PlanError
from fxtrain.loop.releasing import empty_cache
from fxtrain.state import DistContext, Plan, check_connected, shown

__all__ = ["find_batch_size", "is_out_of_memory"]

# What allocators raise as a plain RuntimeError: CPU, MPS, CUDA libraries, XPU, NPU, XLA.
_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "UR_RESULT_ERROR_OUT_OF_RESOURCES",
    "RESOURCE_EXHAUSTED",
)


def find_batch_size(
    ctx: DistContext,
    trial: Callable[[int, Plan], object],
    start: int,
    plan: Plan | None = None,
    *,
    shrink: float = 0.5,
) -> tuple[int, Plan]:
    """Find the largest batch size that fits on all ranks, and the plan with which to train.

    Sizes are tried from `start` downwards. Only divisors of `start * plan.accumulate` are tried, so
    that with the plan's new `accumulate` an update sees as many rows as asked for.

    Args:
        ctx: The ranks that must agree.
        trial: (batch size, plan) → anything. It builds what training needs and runs a few steps of
            that size; an out-of-memory error, or the result False, means that it does not fit. So a
            trial may also answer from a dry run, without running anything. What it allocates is
            freed afterwards if it keeps no reference.
        start: The largest batch size.
        plan: `accumulate` is read; by default `fx.Plan()`.
        shrink: The next size is at most this times the last one: 0.5 or 0.9.

    Returns:
        The batch size, and the plan with `accumulate` scaled; the same on every rank.

    Effects:
        One exchange of packets for each size; none at one rank. Between sizes, garbage is
        collected and the device's cache is emptied.

    Raises:
        PlanError: nothing fits, or an argument makes no sense; on every rank.
        CollectiveError: the trial communicates, and a rank that ran out of memory never joined a
            collective; after the context's timeout. Any other error of the trial is raised on the
            rank that has it, and named on the others.

    Example:
        >>> import fxtrain as fx
        >>> def trial(size, plan):
        ...     if size > 10:
        ...         raise MemoryError
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     size, plan = fx.find_batch_size(ctx, trial, 32, fx.Plan(accumulate=2))
        ...     size, plan.accumulate
        (8, 8)
    """
    check_connected("find_batch_size", ctx)
    if type(start) is not int or start < 1 or not 0 < shrink < 1:
        raise PlanError(
            f"find_batch_size(start={shown(start)}, shrink={shown(shrink)}): start is the largest "
            f"batch size, 1 or more, and shrink is between 0 and 1, such as 0.5."
        )
    plan = Plan() if plan is None else plan
    rows, size = start * plan.accumulate, start
    while size:
        candidate = attrs.evolve(plan, accumulate=rows // size)
        if _fits(ctx, trial, size, candidate):
            return size, candidate
        most = int(size * shrink)
        size = next((n for n in range(most, 0, -1) if rows % n == 0), 0)
    raise PlanError(
        f"find_batch_size: no batch size from {start} down to 1 fits into memory. Use recompute, "
        f"a lower precision, FSDP or more ranks."
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what caused it, says that memory ran out, on any kind of device.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shape mismatch"))
        (True, False)
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(seen, RuntimeError) and any(words in str(seen) for words in _WORDS):
            return True
        seen = seen.__cause__
    return False


def _fits(ctx: DistContext, trial: Callable[[int, Plan], object], size: int, plan: Plan) -> bool:
    """Whether a size fits on every rank; nothing of the trial is left."""
    fits, problem = True, None
    try:
        fits = trial(size, plan) is not False
    except Exception as error:  # any error must be reported to the other ranks
        traceback.clear_frames(error.__traceback__)  # whose variables hold tensors
        fits = False
        problem = None if is_out_of_memory(error) else error
    empty_cache(ctx.device)
    ops.raise_together(problem, ctx)
    return ops.all_ranks(fits, ctx)
