"""torch_xla: a step is traced, compiled once and run as one graph."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain import _tree
from fxtrain.backends.core import step_functions
from fxtrain.backends.core.initial_values import apply_with_buffers
from fxtrain.backends.core.model_state import load_state
from fxtrain.backends.core.module_changes import (
    move_module,
    prepare_module,
    record_module,
    send_values,
    unknown_classes,
    unused_axes,
)
from fxtrain.backends.core.weights import in_user_dtypes, torch_weights
from fxtrain.backends.single import SINGLE, make_handle
from fxtrain.backends.xla import xla_runtime
from fxtrain.ops.block_names import block_names
from fxtrain.state import (
    XLA,
    DistContext,
    MicroBatch,
    Plan,
    StateReader,
    Strategy,
    UpdateResult,
    UpdateSpec,
    Weight,
    Wrapped,
)

Undo = Callable[[], None]


@attrs.define(kw_only=True, eq=False)
class RecompilationLog:
    """Compilations inside the steps of one model.

    It only counts and warns.

    Attributes:
        quiet_steps: Steps that may compile: the first ones create gradients and optimizer states.
        steps: Micro-batches so far.
        compiled: Those that were compiled.
        before: Compilations in the process when the step began.
    """

    quiet_steps: int
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
        if self.steps <= self.quiet_steps:
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
    xla_runtime.import_xla(needed_by="Plan(strategy=XLA(...))")
    config: XLA = plan.strategy
    problems: list[str] = []
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
    problems += unknown_classes(module, config.blocks, field="XLA(blocks=...)")
    problems += unused_axes(ctx, "XLA", ("context", "tensor", "pipeline"))
    if ctx.devices == 1:
        problems += unused_axes(ctx, "XLA with one device per process", ("shard",))
    return tuple(problems)


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
    prepare_module(module, plan, ctx, _checkpointed)
    engine = module
    if ctx.devices > 1 and ctx.mesh.shard > 1:
        engine, undo = shard_parameters(module, ctx, config.blocks or block_names(module))
        undos.callback(undo)
    plain = make_handle(strategy, module, ctx, plan, optimizer, scheduler, undo=undos.close)
    xla_runtime.mark_step()
    watch = RecompilationLog(quiet_steps=3 * plan.accumulate)
    return attrs.evolve(plain, engine=engine, strategy_state=watch)


@contextmanager
def _sync(model: Wrapped, micro_batch: MicroBatch) -> Iterator[None]:
    """Average gradients over replicas; a micro-batch without an update ends its graph here."""
    model.strategy_state.begin()
    yield
    data = model.ctx.axis("data")
    if micro_batch.reduces and data.world_size > 1:
        grads = [p.grad for p in model.module.parameters() if p.grad is not None]
        xla_runtime.mean(grads, data.world_size)
    if not micro_batch.reduces or (model.plan.sync_each and not micro_batch.closes):
        _end(model)


def _apply(model: Wrapped, update: UpdateSpec) -> UpdateResult:
    outcome = apply_with_buffers(model, update)
    if model.strategy_state.steps < model.plan.accumulate:  # it created the optimizer's states
        split_states(model)
    _end(model)
    return outcome


def _end(model: Wrapped) -> None:
    """Submit the graph of a micro-batch to the device."""
    xla_runtime.mark_step()
    model.strategy_state.end()


def _finite(model: Wrapped) -> bool | Tensor:
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


def move_to_device(module: nn.Module, ctx: DistContext, *, downcast: bool) -> Undo:
    """Move a module to the device; return what undoes the change of dtypes.

    Effects:
        The module gets new parameters: torch cannot swap the memory of old ones for an XLA
        device's. Names that shared one parameter share one again.
    """
    formats = {name: tensor.dtype for name, tensor in _tensors(module).items()}
    move_module(module, ctx.device, dtype=torch.bfloat16 if downcast else None)

    def undo() -> None:
        with torch.no_grad():
            for name, tensor in _tensors(module).items():
                tensor.data = tensor.data.to(formats[name])

    return undo if downcast else lambda: None


def shard_parameters(
    module: nn.Module, ctx: DistContext, blocks: Sequence[str]
) -> tuple[nn.Module, Undo]:
    """Shard parameters over the shard axis; return the module to run instead, and the undo."""
    mesh = xla_runtime.spmd_mesh(ctx.mesh)
    around = xla_runtime.import_xla("experimental.spmd_fully_sharded_data_parallel")
    sharding = xla_runtime.import_xla("distributed.spmd.xla_sharding")
    changes_since = record_module(module)
    engine = around.SpmdFullyShardedDataParallel(
        module,
        mesh=mesh,
        shard_output=_split_rows,
        extra_data_axis="data" if ctx.mesh.replicate > 1 else None,
    )
    # Its hook on the whole model has no effect here, and torch warns that the model's inputs do not
    # require grad.
    revert, _ = changes_since()
    revert()
    for block in [part for part in module.modules() if type(part).__name__ in blocks]:
        sharding.apply_backward_optimization_barrier(block)
        block.register_forward_hook(lambda _, __, out: _split_rows(out, mesh))

    def undo() -> None:
        for parameter in module.parameters():
            sharding.clear_sharding(parameter)

    return engine, undo


def split_states(model: Wrapped) -> None:
    """Shard optimizer states as their parameters are.

    The compiler usually does that too, but not always; a restored run would then be another
    program, which rounds in another order.
    """
    if model.ctx.devices == 1 or model.ctx.mesh.shard == 1:
        return
    spmd = xla_runtime.import_xla("distributed.spmd")
    around = xla_runtime.import_xla("experimental.spmd_fully_sharded_data_parallel")
    mesh = xla_runtime.spmd_mesh(model.ctx.mesh)
    for optimizer in model.optimizers:
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                    spec = around._prepare_spmd_partition_spec(value, shard_maximal=True)
                    spmd.mark_sharding(value, mesh, spec)


def _split_rows(out: Any, mesh: Any) -> None:
    """Keep the rows that a block returns on the devices on which they are."""
    spmd = xla_runtime.import_xla("distributed.spmd")
    for leaf in _tree.flatten(out)[0]:
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.is_floating_point():
            spmd.mark_sharding(leaf, mesh, xla_runtime.batch_sharding(leaf))


def _checkpointed(forward: Callable[..., Any], keep: tuple[str, ...]) -> Callable[..., Any]:
    """A forward whose activations torch_xla recomputes in backward."""
    checkpoint = xla_runtime.import_xla("utils.checkpoint").checkpoint

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not kwargs:
            return checkpoint(forward, *args)
        # It takes positional arguments only; keyword arguments are bound by the signature.
        bound = inspect.signature(forward).bind(*args, **kwargs)
        return checkpoint(lambda *inputs: forward(*inputs, **bound.kwargs), *bound.args)

    return run


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def _raises_parameters(plan: Plan) -> bool:
    return SINGLE.raises_parameters(plan) and not plan.strategy.downcast


XLA_STRATEGY: Strategy = attrs.evolve(
    SINGLE,
    name="XLA",
    config=XLA,
    raises_parameters=_raises_parameters,
    one_rank=False,
    waits_in_forward=True,
    grads_in_module=False,
    full_parameters=False,
    converts_layers=False,
    updates_on_host=False,
    verify=None,
    check=_check,
    wrap=_wrap,
    sync=_sync,
    finite=_finite,
    apply=_apply,
    load_state=_load_state,
    weights=_weights,
    unwrap=_unwrap,
)
