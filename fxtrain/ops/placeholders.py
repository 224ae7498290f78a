"""Micro-batches of which this rank has no row, and which it runs for the other ranks' sake.

Its rows are placeholders, and what a model computes from them may be infinite or NaN. A factor of
zero in the loss does not help: zero times infinity is NaN. So their gradients are replaced by zeros
where they reach a parameter, before a strategy adds or reduces them, and buffers, such as running
statistics, are as before afterwards.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxtrain.state import ModelStatus


def runs_placeholders(status: ModelStatus) -> bool:
    """Whether a micro-batch of a model runs in which this rank has no row."""
    micro_batch = status.running or status.block
    return micro_batch is not None and not micro_batch.has_rows


@contextmanager
def uncounted(
    modules: Sequence[nn.Module], before: Mapping[str, Tensor] | None = None
) -> Iterator[Callable[[], None]]:
    """A block in which all gradients of modules are zero, and which leaves their buffers unchanged.

    Except those of experts that are spread over ranks: they come from the tokens of others.

    Args:
        modules: The modules.
        before: Values of the buffers of the first module before a forward that has run already.

    Yields:
        () → None, to be called after a forward and before its backward: FSDP makes the parameters
        that receive gradients in its first forward.
    """
    buffers = [(b, b.detach().clone()) for module in modules for b in module.buffers()]
    if before is not None:
        named = dict(modules[0].named_buffers())
        buffers += [(named[name], value) for name, value in before.items() if name in named]
    handles: dict[int, Any] = {}

    def drop_gradients() -> None:
        for parameter in itertools.chain.from_iterable(map(_receiving, modules)):
            if parameter.requires_grad and id(parameter) not in handles:
                handles[id(parameter)] = parameter.register_hook(torch.zeros_like)

    drop_gradients()
    try:
        yield drop_gradients
    finally:
        for handle in handles.values():
            handle.remove()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _receiving(module: nn.Module) -> Iterator[Tensor]:
    """The tensors that receive gradients of this rank's rows: parameters, and what FSDP gathers."""
    gathered = (
        parameter._unsharded_param
        for part in module.modules()
        for parameter in fsdp_parameters(part)
        if hasattr(parameter, "_unsharded_param")  # gathered before
    )
    for parameter in itertools.chain(module.parameters(), gathered):
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None or "expert" not in mesh.mesh_dim_names:
            yield parameter


def fsdp_groups(part: Any) -> Iterator[Any]:
    """torch's groups of the parameters that FSDP shards in a module, without its children's."""
    if hasattr(part, "_get_fsdp_state"):
        state = part._get_fsdp_state()
        several = hasattr(state, "_fsdp_param_groups")  # since torch 2.13
        every = state._fsdp_param_groups if several else [state._fsdp_param_group]
        yield from (group for group in every if group is not None)


def fsdp_parameters(part: Any) -> Iterator[Any]:
    """torch's records of those parameters."""
    for group in fsdp_groups(part):
        yield from group.fsdp_params
