"""Hooks that bring units to their device as forward and backward come to them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fxtrain import _tree
from fxtrain._errors import PlanError
from fxtrain.backends.offload.device_copies import DeviceCopies
from fxtrain.backends.offload.streaming import Streaming

__all__ = ["attach"]

_KEPT = ("past_key_values", "past_key_value", "cache_params")  # where layers put them
_Undo = Callable[[], None]


def attach(module: nn.Module, streaming: Streaming, *, backward: bool) -> _Undo:
    """Put hooks on a module; returns what takes them off.

    Args:
        backward: Units are needed in backward, too.
    """
    undo: list[_Undo] = []
    undo.append(_check_values(module, streaming))
    devices = {one.device for one in streaming.tensors.values()}
    if any(device.type != "cpu" for device in devices):
        undo += _move_values(module, streaming)
    for index, unit in enumerate(streaming.units):
        if streaming.copies is not None:
            undo += _use_copies(streaming, index)
            continue
        for part in unit.owners if unit.root is None else (unit.root,):
            use = functools.partial(_use, streaming, index)
            undo.append(part.register_forward_pre_hook(use).remove)
            if backward:
                after = functools.partial(_use_in_backward, streaming, index)
                undo.append(part.register_forward_hook(after).remove)
    undo += [_refuse_moves(part) for part in _with_streamed(module, streaming)]

    def undo_all() -> None:
        for take_back in reversed(undo):
            take_back()
        undo.clear()

    return undo_all


def _check_values(module: nn.Module, streaming: Streaming) -> _Undo:
    """Check before each forward that there are values; once, if nothing streams."""
    hooks: list[Any] = []
    hooks.append(module.register_forward_pre_hook(functools.partial(_ready, streaming, hooks)))
    return hooks[0].remove


@torch.compiler.disable
def _ready(streaming: Streaming, hooks: list[Any], module: nn.Module, args: Any) -> None:
    streaming.ready()
    if not streaming.units:
        hooks[0].remove()


@torch.compiler.disable
def _use(streaming: Streaming, unit: int, module: nn.Module, args: Any) -> None:
    streaming.use(unit)


@torch.compiler.disable
def _use_in_backward(
    streaming: Streaming, unit: int, module: nn.Module, args: Any, outputs: Any
) -> None:
    """Read a unit again once the gradient of its output is known: ahead of its own backward."""
    if not torch.is_grad_enabled():
        return
    for leaf in _tree.flatten(outputs)[0]:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(functools.partial(_before_backward, streaming, unit))
            return


def _before_backward(streaming: Streaming, unit: int, grad: Tensor) -> None:
    streaming.use(unit)


def _use_copies(streaming: Streaming, unit: int) -> list[_Undo]:
    """Load a unit before its module and before any module with one of its tensors.

    The second is for a forward that calls only a part of the unit, as recomputation does.
    """
    copies = streaming.copies
    assert copies is not None
    one = streaming.units[unit]
    undo: list[_Undo] = []
    blocks: list[Any] = []
    parts = list(one.owners) if one.root is None else [one.root, *one.owners]
    for part in dict.fromkeys(parts):
        enter = functools.partial(_enter, streaming, copies, unit, blocks)
        leave = functools.partial(_leave, copies, unit, blocks)
        undo.append(part.register_forward_pre_hook(enter).remove)
        undo.append(part.register_forward_hook(leave, always_call=True).remove)
    return undo


@torch.compiler.disable
def _enter(
    streaming: Streaming,
    copies: DeviceCopies,
    unit: int,
    blocks: list[Any],
    module: nn.Module,
    args: Any,
) -> None:
    copies.begin(unit)
    within = any(blocks)
    blocks.append(None)
    streaming.use(unit)
    if torch.is_grad_enabled() and not within:
        saved = torch.autograd.graph.saved_tensors_hooks(
            functools.partial(_pack, copies), functools.partial(_unpack, streaming, copies)
        )
        saved.__enter__()
        blocks[-1] = saved


@torch.compiler.disable
def _leave(
    copies: DeviceCopies,
    unit: int,
    blocks: list[Any],
    module: nn.Module,
    args: Any,
    outputs: Any,
) -> None:
    if not blocks:  # a hook before this one raised
        return
    saved = blocks.pop()
    if saved is not None:
        saved.__exit__(None, None, None)
    copies.end(unit)


def _pack(copies: DeviceCopies, tensor: Tensor) -> Any:
    """What autograd keeps of a tensor: of one in a copy, only where it is."""
    found = copies.find(tensor)
    if found is None:
        return tensor
    return (*found, tensor.dtype, tensor.shape, tensor.stride())


def _unpack(streaming: Streaming, copies: DeviceCopies, packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    unit, start, dtype, shape, stride = packed
    streaming.use(unit)
    flat = copies.bytes_of(unit)
    return flat.view(dtype).as_strided(shape, stride, start // dtype.itemsize)


def _move_values(module: nn.Module, streaming: Streaming) -> list[_Undo]:
    """Move inputs to where they are used, and the model's outputs to where its inputs were."""
    first = next(iter(streaming.tensors.values())).device
    before: list[torch.device | None] = []

    def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        before.append(_device_of((args, kwargs)))
        return _moved(args, first), _moved(kwargs, first)

    def leave(module: nn.Module, args: Any, outputs: Any) -> Any:
        device = before.pop() if before else None
        return outputs if device is None or outputs is None else _moved(outputs, device)

    undo = [
        module.register_forward_pre_hook(enter, with_kwargs=True).remove,
        module.register_forward_hook(leave, always_call=True).remove,
    ]
    if len({one.device for one in streaming.tensors.values()}) == 1:
        return undo
    owners: dict[int, tuple[nn.Module, torch.device]] = {}
    places = {name: one for one in streaming.tensors.values() for name in one.names}
    for path, part in module.named_modules():
        for key in (*part._parameters, *part._buffers):
            name = f"{path}.{key}" if path else key
            if name in places and part is not module:
                owners[id(part)] = (part, places[name].device)
    for part, device in owners.values():
        move = functools.partial(_move_inputs, device)
        undo.append(part.register_forward_pre_hook(move, with_kwargs=True).remove)
    return undo


def _move_inputs(device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _moved(args, device), _moved(kwargs, device)


def _moved(tree: Any, device: torch.device) -> Any:
    """A tree with its tensors on a device; caches stay where layers have put them."""
    if isinstance(tree, dict) and any(name in tree for name in _KEPT):
        kept = {name: tree[name] for name in _KEPT if name in tree}
        rest = {name: value for name, value in tree.items() if name not in kept}
        return {**_moved(rest, device), **kept}
    if all(leaf.device == device for leaf in _tensors(tree)):
        return tree
    return _tree.map_leaves(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _tree.flatten(tree)[0] if isinstance(leaf, Tensor)]


def _device_of(tree: Any) -> torch.device | None:
    return next((leaf.device for leaf in _tensors(tree)), None)


def _with_streamed(module: nn.Module, streaming: Streaming) -> list[nn.Module]:
    parts = [part for unit in streaming.units for part in unit.owners]
    return list(dict.fromkeys([module, *parts])) if parts else []


def _refuse_moves(part: nn.Module) -> _Undo:
    """Let `.to`, `.cuda`, `.half` and the like say what to do instead."""
    vars(part)["_apply"] = _refuse

    def undo() -> None:
        vars(part).pop("_apply", None)

    return undo


def _refuse(*_: Any, **__: Any) -> Any:
    raise PlanError(
        "A streamed model cannot be moved or converted (.to, .cuda, .half, ...): its placement "
        "says where every tensor is. Wrap the model with another placement, or take it out with "
        "fx.unwrap(model)."
    )
