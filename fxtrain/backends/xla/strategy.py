"""torch_xla: a step is traced, compiled once and run as one graph."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
from torch import nn

from fxtrain.backends.core import buffers, step_functions
from fxtrain.backends.core.model_state import load_state
from fxtrain.backends.core.module_changes import send_values, unmatched_names
from fxtrain.backends.core.weights import in_user_dtypes, torch_weights
from fxtrain.backends.handle import make_handle
from fxtrain.backends.single import SINGLE
from fxtrain.backends.xla.module_placement import (
    move_to_device,
    recompute,
    shard_parameters,
    split_states,
)
from fxtrain.models.block_names import block_names
from fxtrain.ops import xla_runtime
from fxtrain.state import (
    XLA,
    DistContext,
    Plan,
    StateReader,
    Strategy,
    UpdateResult,
    UpdateSpec,
    Weight,
    Wrapped,
    unsupported,
)


@attrs.define(kw_only=True, eq=False)
class RecompilationLog:
    """Compilations inside the steps of one model.

    It only counts and warns.

    Attributes:
        quiet_steps: Steps that may compile: the first ones create gradients and optimizer states.
            None never warns.
        steps: Micro-batches so far.
        compiled: Those that were compiled.
        before: Compilations in the process when the step began.
    """

    quiet_steps: int | None
    steps: int = 0
    compiled: int = 0
    before: int | None = None

    def begin(self) -> None:
        """Start a step; compilations before it are not its own."""
        self.before = xla_runtime.compilations()

    def end(self) -> None:
        """End a step; warn if it was compiled, at increasing intervals."""
        now = xla_runtime.compilations()
        before, self.before = self.before, now
        self.steps += 1
        if before is None or now == before:
            return
        self.compiled += 1
        if self.quiet_steps is None or self.steps <= self.quiet_steps:
            return
        often = self.compiled
        if often & (often - 1) and often > self.quiet_steps + 1:  # at powers of two only
            return
        warnings.warn(
            f"XLA recompiled step {self.steps} of this model; {often} of its steps have been "
            f"compiled. Each new shape, and each Python number that changes from or to 0 or 1, "
            f"makes a new graph. Use DataLoader(drop_last=True) or pad rows to a few lengths.",
            stacklevel=6,
        )


def _check(ctx: DistContext, plan: Plan, module: nn.Module) -> tuple[str, ...]:
    xla_runtime.load(needed_by="Plan(strategy=XLA(...))")
    config: XLA = plan.strategy
    problems = list(unmatched_names(module, plan))
    if ctx.device.type != "xla":
        problems.append(
            f"XLA() needs an XLA device, but this context is on {ctx.device.type}. Set the "
            f"variable PJRT_DEVICE to TPU or CPU, or use fx.detect(device='xla')."
        )
    if plan.precision.compute == "fp16":
        problems.append("XLA devices do not support fp16. Use precision='bf16' or 'fp32'.")
    if config.downcast and plan.precision.compute != "bf16":
        problems.append(
            f"XLA(downcast=True) stores the model in bf16, but the plan computes in "
            f"{plan.precision.compute}. Use precision='bf16', or omit downcast."
        )
    if plan.compile is not None and plan.compile.backend != "openxla":
        problems.append(
            f"Compile(backend={plan.compile.backend!r}): torch_xla compiles what it traces "
            f"itself. Remove compile, or use backend='openxla'."
        )
    if plan.recompute_keep:
        problems.append("XLA recomputes all of a module: remove recompute_keep from the plan.")
    if plan.local is not None:
        problems.append("XLA() averages gradients in every update: remove local from the plan.")
    known = {type(part).__name__ for part in module.modules()}
    if unknown := [name for name in config.blocks if name not in known]:
        problems.append(
            f"XLA(blocks=...) names {', '.join(unknown)}, but no submodule of "
            f"{type(module).__name__} has this class. It has {', '.join(sorted(known)[:10])}."
        )
    used = {"replicate", "shard"} if ctx.devices > 1 else {"replicate"}
    problems += [
        f"The mesh has {axis}={size}, over which XLA() does not split. {_HINTS.get(axis, '')}"
        f"Omit the axis from fx.Mesh(...)."
        for axis, size in ctx.mesh.sizes.items()
        if size > 1 and axis not in used
    ]
    return tuple(problems)


_HINTS = {"shard": "Parameters are sharded over the devices of one process only (SPMD). "}


def _wrap(
    strategy: Strategy,
    module: nn.Module,
    ctx: DistContext,
    plan: Plan,
    optimizer: Any,
    scheduler: Any,
) -> Wrapped:
    data, config = ctx.axis("data"), plan.strategy
    undos = ExitStack()
    undos.callback(move_to_device(module, ctx, downcast=config.downcast))
    if data.world_size > 1:
        send_values((*module.parameters(), *module.buffers()), data)
    recompute(module, plan, ctx)
    engine = module
    if ctx.devices > 1 and ctx.mesh.shard > 1:
        engine, undo = shard_parameters(module, ctx, config.blocks or block_names(module))
        undos.callback(undo)
    plain = make_handle(strategy, module, ctx, plan, optimizer, scheduler, undo=undos.close)
    xla_runtime.mark_step()
    watch = RecompilationLog(quiet_steps=3 * plan.accumulate if config.warn_recompiles else None)
    return attrs.evolve(plain, engine=engine, strategy_state=watch)


@contextmanager
def _sync(model: Wrapped, enabled: bool) -> Iterator[None]:  # noqa: FBT001
    """Average gradients over replicas; a micro-batch without an update ends its graph here."""
    model.strategy_state.begin()
    yield
    data = model.ctx.axis("data")
    if enabled and data.world_size > 1:
        grads = [p.grad for p in model.module.parameters() if p.grad is not None]
        xla_runtime.mean(grads, data.world_size)
    if not enabled or (model.plan.sync_each and not model.window.closes):
        _end(model)


def _apply(model: Wrapped, update: UpdateSpec) -> UpdateResult:
    outcome = buffers.apply(model, update)
    if model.strategy_state.steps < model.plan.accumulate:  # it created the optimizer's states
        split_states(model)
    _end(model)
    return outcome


def _end(model: Wrapped) -> None:
    """Submit the graph of a micro-batch to the device."""
    xla_runtime.mark_step()
    model.strategy_state.end()


def _finite(model: Wrapped) -> bool:
    # Reading a value computes it separately, unless the graph was submitted before.
    xla_runtime.mark_step()
    return step_functions.finite(model)


def _load_state(model: Wrapped, saved: StateReader) -> None:
    load_state(model, saved)
    split_states(model)


def _weights(model: Wrapped) -> dict[str, Weight]:
    xla_runtime.mark_step()
    return in_user_dtypes(torch_weights(model), model)


def _unwrap(model: Wrapped) -> nn.Module:
    xla_runtime.mark_step()
    model.undo()
    return model.module


XLA_STRATEGY: Strategy = attrs.evolve(
    SINGLE,
    name="XLA",
    config=XLA,
    full_parameters=False,
    converts_layers=False,
    updates_on_host=False,
    verifies_replicas=False,
    check=_check,
    wrap=_wrap,
    sync=_sync,
    finite=_finite,
    apply=_apply,
    load_state=_load_state,
    weights=_weights,
    unwrap=_unwrap,
    average=unsupported("averaging of parameters", by="XLA"),
)
