"""A module on XLA devices: moved with its tied parameters, sharded over devices, and undone."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxtrain import _tree
from fxtrain.backends.core.module_changes import move_module, prepare_module
from fxtrain.ops import xla_runtime
from fxtrain.state import DistContext, Plan, Wrapped

Undo = Callable[[], None]


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

    return undo if downcast else _nothing


def recompute(module: nn.Module, plan: Plan, ctx: DistContext) -> None:
    """Recompute activations with torch_xla's functions, and compile, as the plan says."""
    prepare_module(module, plan, ctx, _checkpointed)


def shard_parameters(
    module: nn.Module, ctx: DistContext, blocks: Sequence[str]
) -> tuple[nn.Module, Undo]:
    """Shard parameters over the shard axis; return the module to run instead, and the undo."""
    mesh = xla_runtime.device_mesh(ctx.mesh)
    around = xla_runtime.load("experimental.spmd_fully_sharded_data_parallel")
    sharding = xla_runtime.load("distributed.spmd.xla_sharding")
    hooks = _Hooks(module)
    engine = around.SpmdFullyShardedDataParallel(
        module,
        mesh=mesh,
        shard_output=_split_rows,
        extra_data_axis="data" if ctx.mesh.replicate > 1 else None,
    )
    # Its hook on the whole model has no effect here, and torch warns that the model's inputs do not
    # require grad.
    hooks.undo()
    for block in [part for part in module.modules() if type(part).__name__ in blocks]:
        sharding.apply_backward_optimization_barrier(block)
        block.register_forward_hook(lambda _, __, out: _split_rows(out, mesh))

    def undo() -> None:
        hooks.undo()
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
    spmd = xla_runtime.load("distributed.spmd")
    around = xla_runtime.load("experimental.spmd_fully_sharded_data_parallel")
    mesh = xla_runtime.device_mesh(model.ctx.mesh)
    for optimizer in model.optimizers:
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                    spec = around._prepare_spmd_partition_spec(value, shard_maximal=True)
                    spmd.mark_sharding(value, mesh, spec)


def _split_rows(out: Any, mesh: Any) -> None:
    """Keep the rows that a block returns on the devices on which they are."""
    spmd = xla_runtime.load("distributed.spmd")
    for leaf in _tree.flatten(out)[0]:
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.is_floating_point():
            spmd.mark_sharding(leaf, mesh, xla_runtime.batch_sharding(leaf))


class _Hooks:
    """The hooks that modules have now, to remove those added later."""

    def __init__(self, module: nn.Module) -> None:
        self._had = [
            (part, set(part._forward_hooks), set(part._backward_hooks), part._is_full_backward_hook)
            for part in module.modules()
        ]

    def undo(self) -> None:
        for part, forward, backward, full in self._had:
            for hooks, had in ((part._forward_hooks, forward), (part._backward_hooks, backward)):
                for key in hooks.keys() - had:
                    del hooks[key]
            part._is_full_backward_hook = full


def _checkpointed(forward: Callable[..., Any], keep: tuple[str, ...]) -> Callable[..., Any]:
    """A forward whose activations torch_xla recomputes in backward."""
    checkpoint = xla_runtime.load("utils.checkpoint").checkpoint

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not kwargs:
            return checkpoint(forward, *args)
        # It takes positional arguments only; keyword arguments are bound by the signature.
        bound = inspect.signature(forward).bind(*args, **kwargs)
        return checkpoint(lambda *given: forward(*given, **bound.kwargs), *bound.args)

    return run


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def _nothing() -> None:
    """Undo nothing."""
