"""Keeps the gradients of an open accumulation window apart from those of other models.

The loss of another model that calls this one, as a generator's calls its discriminator, leaves
gradients in this model too. Between windows the next one drops them. Inside a window they would be
added to its sum, so they are dropped as soon as that backward ends.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxtrain import _tree
from fxtrain.backends.core.open_windows import PENDING
from fxtrain.backends.core.placeholders import fsdp_parameters
from fxtrain.state import Wrapped


def is_foreign(model: Wrapped) -> bool:
    """Whether a backward that runs now is another model's, while this one's window is open."""
    return not model.own_backward and bool(model.window.micro)


def watch_outputs(out: Any, model: Wrapped, found: Callable[[Wrapped], None] | None = None) -> None:
    """Call a function at the start of each backward of another model through these outputs.

    Args:
        out: What forward returned; only tensors that `_tree.flatten` finds are watched.
        found: (model) → None; `keep_apart` by default.
    """

    def begins(_: Tensor) -> None:
        if is_foreign(model):
            (found or keep_apart)(model)

    for leaf in _tree.flatten(out)[0]:
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            leaf.register_hook(begins)


def keep_apart(model: Wrapped) -> None:
    """Put the window's gradients aside until the backward that runs now has ended."""
    if model.put_aside:  # by an earlier output
        return
    for holder, name in _places(model.module):
        model.put_aside.append((holder, name, getattr(holder, name)))
        setattr(holder, name, None)
    torch.autograd.Variable._execution_engine.queue_callback(lambda: put_back(model))


def put_back(model: Wrapped) -> None:
    """Drop what was added since `keep_apart`, and restore the window's gradients."""
    for holder, name, value in reversed(model.put_aside):  # some were listed twice
        setattr(holder, name, value)
    model.put_aside.clear()


def _places(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """Every attribute that holds a gradient of a parameter, or the sum that FSDP keeps of it."""
    for parameter in module.parameters():
        yield parameter, "grad"
    for part in module.modules():
        for one in fsdp_parameters(part):
            yield one.sharded_param, "grad"
            if PENDING in vars(one):  # until torch 2.13
                yield one, PENDING
            if hasattr(one, "_unsharded_param"):  # gathered before
                yield one._unsharded_param, "grad"
