"""What to try before a run: batch sizes and learning rates."""

import copy
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from fxtrain import ops
from fxtrain._record import record, shown
from fxtrain.backends.core.device_mesh import separate_meshes
from fxtrain.backends.core.model_state import local_part_of, memory_reader, shape_and_dtype
from fxtrain.choosing.candidates import Question
from fxtrain.choosing.devices import Device, read_device
from fxtrain.choosing.report import Choice, ChoiceRow
from fxtrain.choosing.searching import search
from fxtrain.choosing.trials import SHORT, run_function
from fxtrain.data import Sharded
from fxtrain.errors import CollectiveError, PlanError, StepError
from fxtrain.loop.evaluating import Mean
from fxtrain.loop.releasing import empty_cache
from fxtrain.loop.stepping import StepFns, step
from fxtrain.ops.plan_agreement import plan_for
from fxtrain.ops.same_errors import fail_together
from fxtrain.profiling import place, read_bytes
from fxtrain.state import DDP, DistContext, Mesh, Plan, Wrapped
from fxtrain.state.context import check_connected, simulated
from fxtrain.state.mesh import resolve_mesh
from fxtrain.state.registry import registered

__all__ = [
    "Choice",
    "ChoiceRow",
    "RateCurve",
    "choose",
    "find_batch_size",
    "find_lr",
    "predict_batch_size",
]
__dir__ = __all__.copy  # for completion


# What allocators raise as a plain RuntimeError: CPU, MPS, CUDA libraries, XPU, NPU, XLA.
_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    # No kernel of cuDNN takes so many elements, or has its workspace. Smaller batches have one.
    "CUDNN_STATUS_NOT_SUPPORTED",
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
        For each size, four exchanges of packets and process groups that the context has for the
        trial only, since ranks that run out of memory leave collectives that others have started;
        none at one rank. A rank that waits for one that ran out of memory is interrupted. Between
        sizes, garbage is collected and the device's cache is emptied.

    Raises:
        PlanError: nothing fits, with the last error of this rank as its cause, or an argument makes
            no sense; on every rank.
        Exception: any other error of the trial, on the rank that has it; a CollectiveError that
            names it on the others.

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
    _check_takes("find_batch_size", "trial", trial, start, plan)
    errors: list[Exception] = []
    for size, candidate in _candidates(start, plan, shrink):
        if _fits(ctx, trial, size, candidate, errors):
            return size, candidate
    raise _nothing_fits("find_batch_size", start) from (errors[-1] if errors else None)


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
        The same as `fx.dry_run`, once for each size, with at most two micro-batches of an update.

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
        >>> size, plan = fx.tuning.predict_batch_size(train, 64, world=8, device_memory="300kB")
        >>> size, plan.accumulate
        (16, 4)
    """
    _check("predict_batch_size", start, shrink)
    memory = read_bytes(device_memory) or 0
    _check_takes("predict_batch_size", "train", train, DistContext(), start, Plan())
    axes = resolve_mesh(Mesh() if mesh is None else mesh, world)
    plan = plan_for("predict_batch_size", simulated(DistContext(world_size=world, mesh=axes)), plan)
    for size, candidate in _candidates(start, plan, shrink):
        short = min(candidate.accumulate, SHORT)  # longer updates need no more memory
        run = run_function(
            train, (attrs.evolve(candidate, mesh=mesh, accumulate=short), size), world
        )
        if others := [problem.text for problem in run.problems if problem.fatal]:
            raise PlanError(
                f"predict_batch_size: the dry run of batch size {size} ends with a problem:\n"
                + "\n".join(others)
            )
        if run.peak <= memory:
            return size, candidate
    raise _nothing_fits("predict_batch_size", start)


def choose(
    train: Callable[[DistContext, int, Plan], object],
    *,
    world: int,
    device: str | Device,
    rows: int,
    plan: Plan | None = None,
    keep: Collection[str] = (),
    minutes: float = 10.0,
    processes: int | None = None,
    cache: str = "",
) -> Choice:
    """Choose strategy, mesh, micro-batch and recomputation, from dry runs of many plans.

    No device is needed. Plans that `fx.wrap` refuses, or whose parameters do not fit, are dropped
    without a dry run. Of the others, at most 60 have one, the most promising first, and their time
    is estimated from what they compute and send.

    Args:
        train: (context, batch size, plan) → anything. It builds the model and trains with batches
            of that size, as in `fx.dry_run`, which ends it. A function at the top of a module runs
            in parallel processes, each of which imports the module; any other in this process.
        world: World size.
        device: A name such as "H100", the path of a file that `fxtrain env --measure` wrote, or an
            `fx.state.Device`.
        rows: Rows of an update, of all ranks together.
        plan: Your plan. Its fields that are not at their defaults stay.
        keep: Names of fields that stay although they are at their defaults.
        minutes: Time after which the best plan so far is returned.
        processes: Dry runs at a time; one for each core by default.
        cache: Folder in which dry runs are kept, so that the same question is answered at once;
            by default none are.

    Returns:
        The ten fastest plans that fit, and why others were dropped: `choice.plan` is the best one.

    Effects:
        Those of `fx.dry_run` for each plan; what the function prints is dropped. Starts processes,
        so a script calls this under `if __name__ == "__main__":`. Writes into `cache`.

    Raises:
        PlanError: no such device, an argument makes no sense, or the function does not run on one
            rank.
        StepError: the function returned without an update.

    Example:
        >>> import fxtrain as fx, torch
        >>> def train(ctx, size, plan):
        ...     net = torch.nn.Linear(1000, 1000)
        ...     model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.Adam(p))
        ...     loader = torch.utils.data.DataLoader(torch.ones(9999, 1000), batch_size=size)
        ...     fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
        ...     for batch in fx.shard(loader, ctx, plan):
        ...         fx.step(ctx, batch, fns)
        >>> plan = fx.Plan(mesh=fx.Mesh(replicate=8))
        >>> choice = fx.tuning.choose(train, world=8, device="H100", rows=64, plan=plan)
        >>> choice.best.batch_size, choice.plan.accumulate
        (8, 1)
    """
    plan = Plan() if plan is None else plan
    names = {field.name for field in attrs.fields(Plan)}
    if type(rows) is not int or rows < 1 or not minutes > 0 or not set(keep) <= names:
        raise PlanError(
            f"choose(rows={shown(rows)}, minutes={shown(minutes)}, keep={shown(keep)}): rows of an "
            f"update are 1 or more, minutes above 0, and keep has names of fields of a plan."
        )
    place(world, 0, plan.mesh)
    _check_takes("choose", "train", train, DistContext(), rows, plan)
    changed = {name for name in names if getattr(plan, name) != getattr(Plan(), name)}
    at = read_device(device)
    question = Question(
        plan=plan,
        fixed=frozenset(changed | set(keep)),
        world=world,
        node=at.ranks_per_node,
        rows=rows,
    )
    alone = attrs.evolve(plan, strategy=DDP(), mesh=None, accumulate=1)
    return search(
        partial(run_function, train),
        question,
        at,
        probe=(alone, min(rows, 2)),  # some layers need two rows
        minutes=minutes,
        processes=processes,
        cache=cache,
    )


def _check(call: str, start: Any, shrink: Any) -> None:
    if type(start) is not int or start < 1 or not 0 < shrink < 1:
        raise PlanError(
            f"{call}(start={shown(start)}, shrink={shown(shrink)}): start is the largest "
            f"batch size, 1 or more, and shrink is between 0 and 1, such as 0.5."
        )


def _check_takes(call: str, name: str, fn: Callable[..., object], *args: Any) -> None:
    """Check that a function takes what it will be called with, before it is."""
    try:
        taken = inspect.signature(fn)
    except ValueError:  # of a function written in C
        return
    try:
        taken.bind(*args)
    except TypeError as error:
        words = ["ctx", "size", "plan"][-len(args) :]
        raise PlanError(
            f"{call}: {name} is called as {name}({', '.join(words)}), but its parameters are "
            f"{taken}: {error}. Define it as `def {name}({', '.join(words)})`, and train with that "
            f"plan, whose accumulate follows from the batch size."
        ) from None


def _candidates(start: int, plan: Plan, shrink: float) -> Iterator[tuple[int, Plan]]:
    """Batch sizes downwards, each with the plan that keeps the rows of an update."""
    rows, size = start * plan.accumulate, start
    strategy = registered(type(plan.strategy))
    plan = plan if strategy is None else strategy.without_batch(plan)
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
    """Whether an error, or what caused it, says that memory ran out, on any kind of device."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(seen, RuntimeError) and any(words in str(seen) for words in _WORDS):
            return True
        seen = seen.__cause__
    return False


def _fits(
    ctx: DistContext,
    trial: Callable[[int, Plan], object],
    size: int,
    plan: Plan,
    errors: list[Exception],
) -> bool:
    """Whether a size fits on every rank; nothing of the trial is left but its error in a list."""
    fits, ran_out, problem = False, False, None
    try:
        with separate_meshes(ctx):
            fits = trial(size, plan) is not False
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # whose variables hold tensors
        problem, ran_out = error, is_out_of_memory(error)
        errors += [error] * ran_out
    finally:
        empty_cache(ctx.device)
    try:
        rows = _share(ctx, too_large=ran_out or (problem is None and not fits))
    except CollectiveError as error:
        if problem is None or ran_out:
            raise
        raise problem from (problem.__cause__ or error)
    # A rank that ran out of memory is why collectives of the others failed.
    if any(rows):
        return False
    with fail_together(ctx):
        if problem is not None:
            raise problem
    return True


def _share(ctx: DistContext, *, too_large: bool) -> list[bool]:
    """By rank, whether a size is too large for it."""
    try:
        return ops.gather_objects(too_large, ctx)
    except CollectiveError as error:
        if error.code != "FX301":
            raise
    # Another rank was still in a call of its trial, which this has ended.
    return ops.gather_objects(too_large, ctx)


M = TypeVar("M", bound=nn.Module)
_MEMORY = 0.9
_NOISY = 0.1  # share of the curve, at its beginning, whose slopes are mostly noise


@record
class RateCurve:
    """Losses over learning rates, and what they suggest. A plain value, equal on every rank.

    Attributes:
        rates: Learning rates, each a constant factor above the one before.
        losses: Mean loss of all ranks in the update of each rate.

    Example:
        >>> import fxtrain as fx
        >>> curve = fx.tuning.RateCurve(rates=(1e-3, 1e-2, 1e-1, 1.0), losses=(9.0, 8.0, 1.0, 9.0))
        >>> curve.suggestion
        0.01
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def smoothed(self) -> tuple[float, ...]:
        """Means over a twentieth of the curve on each side, which shift nothing along it."""
        count = len(self.losses)
        losses: list[float] = []
        for n in range(count):
            side = min(max(1, count // 20), n, count - 1 - n)
            losses.append(sum(self.losses[n - side : n + side + 1]) / (2 * side + 1))
        return tuple(losses)

    @property
    def suggestion(self) -> float | None:
        """The rate at which the smoothed loss falls fastest; None if it never falls."""
        losses = self.smoothed
        first = max(1, int(_NOISY * len(losses)))
        slopes = {n: losses[n + 1] - losses[n - 1] for n in range(first, len(losses) - 1)}
        best = min(slopes, key=lambda n: slopes[n], default=None)
        return None if best is None or slopes[best] >= 0 else self.rates[best]


def find_lr(
    ctx: DistContext,
    fns: StepFns[M],
    loader: Sharded[object],
    *,
    start: float = 1e-7,
    stop: float = 10.0,
    updates: int = 100,
    diverged: float = 4.0,
) -> RateCurve:
    """Train some updates with exponentially growing learning rates, then restore everything.

    Schedulers are not stepped. The first parameter group gets the rate, and others keep their
    ratio to it. The test ends early when the loss diverges.

    Args:
        ctx: The context for which the model was wrapped.
        fns: The model and its loss.
        loader: From `fx.shard`, under the model's plan; it is read from its position on, which
            does not change.
        start: The first rate.
        stop: The last rate.
        updates: Number of rates, 2 or more.
        diverged: End when the smoothed loss has grown to this times its minimum, or is not
            finite.

    Returns:
        The curve, the same on every rank; `curve.suggestion` is a rate.

    Effects:
        Restores parameters, buffers, optimizers, schedulers, the loss scale and random generators
        bit for bit at the end, also after an error. Memory for a copy of them. Per update, those
        of `fx.step`, one all-reduce of two numbers, and one wait for the device.

    Raises:
        PlanError: an argument makes no sense, or the strategy is DeepSpeed, PP or Offload.
        StepError: an accumulation window is open, or what `fx.step` raises; non-finite values
            end the test instead.

    Example:
        >>> import fxtrain as fx, torch
        >>> from torch.utils.data import DataLoader
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(1, 1), ctx,
        ...                     optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        ...     fns = fx.StepFns(model=model, loss=lambda model, x: model(x.data).square().mean())
        ...     loader = fx.shard(DataLoader(torch.ones(4, 1), batch_size=2), ctx)
        ...     curve = fx.tuning.find_lr(ctx, fns, loader, start=1e-4, stop=1.0, updates=20)
        >>> 1e-4 < curve.suggestion < 1.0, model.optimizer.param_groups[0]["lr"]
        (True, 0.1)
    """
    check_connected("find_lr", ctx)
    _check_rates(fns, start, stop, updates, diverged)
    rates = tuple(start * (stop / start) ** (n / (updates - 1)) for n in range(updates))
    with kept_state(ctx, fns.model):
        losses = _losses(ctx, fns, loader, rates, diverged)
    return RateCurve(rates=rates[: len(losses)], losses=losses)


def _check_rates(fns: StepFns, start: float, stop: float, updates: int, diverged: float) -> None:
    grows = 0 < start < stop < math.inf
    if type(updates) is not int or updates < 2 or not grows or not diverged > 1:
        raise PlanError(
            f"find_lr(start={shown(start)}, stop={shown(stop)}, updates={shown(updates)}, "
            f"diverged={shown(diverged)}): rates grow from start, above 0, to stop, in 2 or more "
            f"updates, and diverged is above 1."
        )
    placed = fns.model.strategy.weights(fns.model).values()
    if fns.model.ctx.mesh.pipeline > 1 or any(weight.together or weight.place for weight in placed):
        raise PlanError(
            f"find_lr: {fns.model.strategy.name} keeps trained values in other places than the "
            f"module's parameters on each rank. Use Single, DDP, FSDP or TP."
        )
    if fns.model.window.is_open:
        raise StepError(
            "find_lr: an accumulation window is open. Call it before training, or after an update."
        )


def _losses(
    ctx: DistContext,
    fns: StepFns,
    loader: Sharded,
    rates: tuple[float, ...],
    diverged: float,
) -> tuple[float, ...]:
    plan = attrs.evolve(fns.model.plan, nonfinite="ignore")
    model = attrs.evolve(fns.model, plan=plan, scheduler=None, schedulers=())
    trial = StepFns(model=model, loss=fns.loss)
    ratios = _ratios(model)
    losses: list[float] = []
    mean = Mean()
    _set_rates(model, ratios, rates[0])
    for batch in loader.updates(sys.maxsize):
        report = step(ctx, batch, trial)
        mean = mean.update(report)
        if not (report.applied or report.skipped):
            continue
        loss, mean = mean.reduce(ctx), Mean()
        if not math.isfinite(loss):
            break
        losses.append(loss)
        if len(losses) == len(rates) or _has_diverged(losses, diverged):
            break
        _set_rates(model, ratios, rates[len(losses)])
    return tuple(losses)


def _has_diverged(losses: list[float], times: float) -> bool:
    """Whether the exponential moving average is far above its minimum."""
    mean, means = 0.0, list[float]()
    for n, loss in enumerate(losses, 1):
        mean = _MEMORY * mean + (1 - _MEMORY) * loss
        means.append(mean / (1 - _MEMORY**n))
    return means[-1] > min(means) + (times - 1) * abs(min(means))


def _ratios(model: Wrapped) -> list[float]:
    """The rate of each parameter group, relative to the first one's."""
    groups = [group for optimizer in model.optimizers for group in optimizer.param_groups]
    rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
    return [rate / rates[0] if rates[0] else 1.0 for rate in rates]


def _set_rates(model: Wrapped, ratios: list[float], rate: float) -> None:
    groups = [group for optimizer in model.optimizers for group in optimizer.param_groups]
    for group, ratio in zip(groups, ratios, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * ratio)
        else:
            group["lr"] = rate * ratio


@contextmanager
def kept_state(ctx: DistContext, model: Wrapped) -> Iterator[None]:
    """Restore a model, its optimizers, schedulers and loss scale, and random state, after a block.

    Takes memory for a copy of what a checkpoint of this model contains, on the model's devices.
    """
    state = model.strategy.state(model)
    parts = {key: local_part_of(tensor).clone() for key, tensor in state.tensors.items()}
    own = {key: tensor.detach().clone() for key, tensor in state.own.items()}
    shapes = {key: shape_and_dtype(tensor) for key, tensor in state.tensors.items()}
    saved = memory_reader(ctx, shapes, parts, own, copy.deepcopy(state.values))
    with ops.fork_rng(ctx):
        try:
            yield
        finally:
            model.strategy.load_state(model, saved)
