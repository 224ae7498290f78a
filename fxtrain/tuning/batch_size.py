"""The largest batch size that fits, and the one from which on more rows add little."""

import math
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain import ops
from fxtrain._record import at_least, at_least_and_below, record, shown
from fxtrain.errors import PlanError
from fxtrain.loop.releasing import empty_cache
from fxtrain.ops.plan_agreement import plan_for
from fxtrain.ops.same_errors import fail_together
from fxtrain.profiling import dry_run
from fxtrain.state import DeepSpeed, DistContext, Mesh, Plan
from fxtrain.state.context import check_connected
from fxtrain.state.deepspeed import WINDOW_ENTRIES, fill_from_config, read_config
from fxtrain.state.mesh import resolve_mesh

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
            that size; an out-of-memory error, or the result False, means that it does not fit. What
            it allocates is freed afterwards if it keeps no reference.
        start: The largest batch size.
        plan: `accumulate` is read, from its DeepSpeed config where the plan leaves it to that; by
            default the plan of the launch.
        shrink: The next size is at most this times the last one: 0.5 or 0.9.

    Returns:
        The batch size, and the plan with `accumulate` scaled, also in its DeepSpeed config; the
        same on every rank.

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
        ...     size, plan = fx.tuning.find_batch_size(ctx, trial, 32, fx.Plan(accumulate=2))
        ...     size, plan.accumulate
        (8, 8)
    """
    check_connected("find_batch_size", ctx)
    _check("find_batch_size", start, shrink)
    plan = plan_for("find_batch_size", ctx, plan)
    for size, candidate in _candidates(start, plan, shrink):
        if _fits(ctx, trial, size, candidate):
            return size, candidate
    raise _nothing_fits("find_batch_size", start)


def predict_batch_size(
    train: Callable[[DistContext, int, Plan], object],
    start: int,
    plan: Plan | None = None,
    *,
    world: int,
    device_memory: int | str,
    mesh: Mesh | None = None,
    shrink: float = 0.5,
) -> tuple[int, Plan]:
    """Like `find_batch_size`, from dry runs: nothing is computed, and no device is needed.

    Args:
        train: (context, batch size, plan) → anything. It builds the model and trains with batches
            of that size, as in `fx.dry_run`, which ends it.
        start: The largest batch size.
        plan: `accumulate` is read; by default `fx.Plan()`.
        world: World size to simulate.
        device_memory: Memory of one device: bytes, or text such as "80GB" or "24GiB". A dry run
            does not know what CUDA, allocators and NCCL take, so leave them a tenth.
        mesh: Ranks per axis; all ranks replicate by default.
        shrink: The next size is at most this times the last one: 0.5 or 0.9.

    Returns:
        The batch size, and the plan with `accumulate` scaled.

    Effects:
        The same as `fx.dry_run`, once for each size.

    Raises:
        PlanError: nothing fits, a dry run ends with another problem, or an argument makes no sense.
        ContextError: the mesh does not fit the world size, or a process group is open.

    Example:
        >>> import fxtrain as fx, torch
        >>> rows = torch.ones(8000, 1000)
        >>> def train(ctx, size, plan):
        ...     net = torch.nn.Linear(1000, 1)
        ...     model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        ...     loader = torch.utils.data.DataLoader(rows, batch_size=size)
        ...     fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
        ...     for batch in fx.shard(loader, ctx, plan):
        ...         fx.step(ctx, batch, fns)
        >>> size, plan = fx.tuning.predict_batch_size(train, 64, world=8, device_memory="200kB")
        >>> size, plan.accumulate
        (16, 4)
    """
    _check("predict_batch_size", start, shrink)
    plan = Plan() if plan is None else plan
    if isinstance(plan.strategy, DeepSpeed):
        data = read_config(plan.strategy)
        axes = resolve_mesh(Mesh() if mesh is None else mesh, world)
        plan = fill_from_config(plan, data, axes.replicate * axes.shard)
    for size, candidate in _candidates(start, plan, shrink):
        run = dry_run(
            lambda ctx, size=size, candidate=candidate: train(ctx, size, candidate),
            world=world,
            mesh=mesh,
            device_memory=device_memory,
        )
        if others := [
            problem.text for problem in run.problems if problem.fatal and problem.kind != "memory"
        ]:
            raise PlanError(
                f"predict_batch_size: the dry run of batch size {size} ends with a problem:\n"
                + "\n".join(others)
            )
        if not any(problem.kind == "memory" for problem in run.problems):
            return size, candidate
    raise _nothing_fits("predict_batch_size", start)


def _check(call: str, start: Any, shrink: Any) -> None:
    if type(start) is not int or start < 1 or not 0 < shrink < 1:
        raise PlanError(
            f"{call}(start={shown(start)}, shrink={shown(shrink)}): start is the largest "
            f"batch size, 1 or more, and shrink is between 0 and 1, such as 0.5."
        )


def _candidates(start: int, plan: Plan, shrink: float) -> Iterator[tuple[int, Plan]]:
    """Batch sizes downwards, each with the plan that keeps the rows of an update."""
    rows, size = start * plan.accumulate, start
    if isinstance(plan.strategy, DeepSpeed):
        data = read_config(plan.strategy)
        left = {name: "auto" for name in WINDOW_ENTRIES if name in data}
        config = {**data, **left} or None
        strategy = attrs.evolve(plan.strategy, config=config, micro_batch=None)
        plan = attrs.evolve(plan, strategy=strategy)
    while size:
        yield size, attrs.evolve(plan, accumulate=rows // size)
        most = int(size * shrink)
        size = next((n for n in range(most, 0, -1) if rows % n == 0), 0)


def _nothing_fits(call: str, start: int) -> PlanError:
    return PlanError(
        f"{call}: no batch size from {start} down to 1 fits into memory. Use recompute, "
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
    fits = False
    with fail_together(ctx):
        try:
            fits = trial(size, plan) is not False
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # whose variables hold tensors
            if not is_out_of_memory(error):
                raise
        finally:
            empty_cache(ctx.device)
    return ops.all_ranks(fits, ctx)


@record
class NoiseScale:
    """The simple noise scale of McCandlish et al. 2018, from gradients of two batch sizes.

    The squared norm of a gradient over B rows is on average ‖G‖² + tr(Σ) / B, with the gradient G
    of all data and the covariance Σ of gradients of single rows. Two batch sizes give both terms;
    `value` is tr(Σ) / ‖G‖². Far below that batch size, twice the rows halve the updates needed; far
    above it, they add little. A plain value, so a checkpoint can store it.

    Attributes:
        decay: Weight of earlier updates in the moving averages of both terms; 0 uses the last
            update only.
        noise: Moving average of tr(Σ), without correction for its beginning.
        signal: Moving average of ‖G‖², without correction for its beginning.
        updates: Updates so far.

    Source:
        An Empirical Model of Large-Batch Training, appendix A.1, arXiv:1812.06162.

    Example:
        >>> import fxtrain as fx
        >>> scale = fx.tuning.NoiseScale().update(small=(3.0, 2), large=(2.0, 8))
        >>> round(scale.value, 3)
        5.714
    """

    decay: float = attrs.field(default=0.95, validator=at_least_and_below(0, 1))
    noise: float = 0.0
    signal: float = 0.0
    updates: int = attrs.field(default=0, validator=at_least(0))

    def update(
        self, small: tuple[Tensor | float, float], large: tuple[Tensor | float, float]
    ) -> "NoiseScale":
        """Return the record after one more update.

        Args:
            small: Norm of a gradient over few rows, and their number: of one micro-batch, on one
                rank. For several, pass the root of the mean of their squared norms.
            large: Norm of the gradient over the rows of the update, unclipped (`report.grad_norm`),
                and their number.

        Returns:
            A new record; unchanged if a norm is not finite.

        Effects:
            Reads norms that are tensors, which waits for the device.

        Raises:
            PlanError: `large` does not have more rows than `small`.
        """
        few, b, many, rows = map(float, (*small, *large))
        if not 0 < b < rows:
            raise PlanError(
                f"NoiseScale.update: small has {b:g} rows, and large {rows:g}. Use a gradient of "
                f"fewer rows, such as one micro-batch of several or one rank's."
            )
        few, many = few * few, many * many  # infinite if too large, where ** raises
        noise = (few - many) / (1 / b - 1 / rows)
        signal = (rows * many - b * few) / (rows - b)
        if not (math.isfinite(noise) and math.isfinite(signal)):
            return self
        return attrs.evolve(
            self,
            noise=self.decay * self.noise + (1 - self.decay) * noise,
            signal=self.decay * self.signal + (1 - self.decay) * signal,
            updates=self.updates + 1,
        )

    @property
    def value(self) -> float | None:
        """The noise scale in rows; None while there is no positive estimate of ‖G‖²."""
        return max(self.noise, 0.0) / self.signal if self.signal > 0 else None
