"""A micro-batch of which this rank has no row: it runs the model for the other ranks' sake.

Its rows are placeholders, and what a model computes from them may be infinite or NaN. A factor of
zero in the loss does not help: zero times infinity is NaN. So their gradients are replaced by zeros
where they reach a parameter, before a strategy adds or reduces them, and buffers, such as running
statistics, are as before afterwards.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxtrain.state import Batch, Wrapped


def has_no_row(model: Wrapped, batch: Batch) -> bool:
    """Whether this rank runs a batch for the other ranks' sake."""
    return not batch.sizes[model.ctx.axis("data").rank]


@contextmanager
def uncounted(modules: Sequence[nn.Module]) -> Iterator[Callable[[], None]]:
    """A block in which all gradients of modules are zero, and which leaves their buffers unchanged.

    Yields:
        () → None, to be called after a forward and before its backward: FSDP makes the parameters
        that receive gradients in its first forward.
    """
    buffers = [(b, b.detach().clone()) for module in modules for b in module.buffers()]
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
            for buffer, before in buffers:
                buffer.copy_(before)


def _receiving(module: nn.Module) -> Iterator[Tensor]:
    """The tensors that receive gradients: parameters, and what FSDP gathers of them."""
    yield from module.parameters()
    part: Any
    for part in module.modules():
        for parameter in fsdp_parameters(part):
            if hasattr(parameter, "_unsharded_param"):  # gathered before
                yield parameter._unsharded_param


def fsdp_parameters(part: Any) -> Iterator[Any]:
    """torch's records of the parameters that FSDP shards in a module, without its children's."""
    if hasattr(part, "_get_fsdp_state"):
        state = part._get_fsdp_state()
        several = hasattr(state, "_fsdp_param_groups")  # since torch 2.13
        for group in state._fsdp_param_groups if several else [state._fsdp_param_group]:
            yield from () if group is None else group.fsdp_params
