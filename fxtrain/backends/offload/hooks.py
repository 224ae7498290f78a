"""Hooks that bring units to their device before forward and backward need them."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from fxtrain import _tree
from fxtrain.backends.offload.streaming import DeviceCopies, Streaming
from fxtrain.backends.offload.units import StreamedUnit
from fxtrain.errors import PlanError

_CACHES = ("past_key_values", "past_key_value", "cache_params")  # where layers put them
_outside_graphs: Any = torch.compiler.disable


def attach(module: nn.Module, streaming: Streaming, *, backward: bool) -> None:
    """Register hooks on a module, which `fx.wrap` removes as all that it changes.

    Args:
        backward: Whether units are also needed in backward.
    """

    @_outside_graphs
    def check_values(_: nn.Module, __: Any) -> None:
        streaming.ready()
        check.remove()  # once is enough

    check = module.register_forward_pre_hook(check_values)
    if any(tensor.device.type != "cpu" for tensor in streaming.tensors.values()):
        _move_values(module, streaming)
    for unit in streaming.units:
        if streaming.copies is not None:
            _use_copies(streaming, streaming.copies, unit)
        else:
            _use_in_place(streaming, unit, backward=backward)
    streamed = [owner for unit in streaming.units for owner in unit.owners]
    for part in dict.fromkeys([module, *streamed] if streamed else ()):
        vars(part)["_apply"] = _refuse_move


def _use_in_place(streaming: Streaming, unit: StreamedUnit, *, backward: bool) -> None:
    """Read a unit before its module, and again before its backward."""

    @_outside_graphs
    def enter(_: nn.Module, __: Any) -> None:
        streaming.use(unit)

    @_outside_graphs
    def leave(_: nn.Module, __: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            for leaf in _tensors(outputs):
                if leaf.requires_grad:
                    # Its gradient is known ahead of the backward of the unit.
                    leaf.register_hook(lambda _: streaming.use(unit))
                    return

    for part in unit.owners if unit.root is None else (unit.root,):
        part.register_forward_pre_hook(enter)
        if backward:
            part.register_forward_hook(leave)


def _use_copies(streaming: Streaming, copies: DeviceCopies, unit: StreamedUnit) -> None:
    """Load a unit before its module and before any module with one of its tensors.

    The second is for a forward that calls only a part of the unit, as recomputation does.
    """
    running: list[Any] = []  # for each module of the unit that runs, what autograd saves through

    @_outside_graphs
    def enter(_: nn.Module, __: Any) -> None:
        unit.users += 1  # it stays on its device until `leave`
        within = any(running)
        running.append(None)
        streaming.use(unit)
        if torch.is_grad_enabled() and not within:
            saved = _saved_by_place(streaming, copies)
            saved.__enter__()
            running[-1] = saved

    @_outside_graphs
    def leave(_: nn.Module, __: Any, ___: Any) -> None:
        if not running:  # a hook before this one raised
            return
        saved = running.pop()
        if saved is not None:
            saved.__exit__(None, None, None)
        copies.end(unit)

    parts = unit.owners if unit.root is None else (unit.root, *unit.owners)
    for part in dict.fromkeys(parts):
        part.register_forward_pre_hook(enter)
        part.register_forward_hook(leave, always_call=True)


def _saved_by_place(streaming: Streaming, copies: DeviceCopies) -> Any:
    """Let autograd keep, of a tensor that is in a copy of a unit, only where it is there."""

    def pack(tensor: Tensor) -> Any:
        place = copies.find(tensor)
        if place is None:
            return tensor
        return (*place, tensor.dtype, tensor.shape, tensor.stride())

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        unit, start, dtype, shape, stride = packed
        streaming.use(unit)
        return unit.flat.view(dtype).as_strided(shape, stride, start // dtype.itemsize)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _move_values(module: nn.Module, streaming: Streaming) -> None:
    """Move inputs to where they are used, and the model's outputs to where its inputs were."""
    first = next(iter(streaming.tensors.values())).device
    before: list[torch.device | None] = []

    def enter(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        before.append(next((leaf.device for leaf in _tensors((args, kwargs))), None))
        return _moved(args, first), _moved(kwargs, first)

    def leave(_: nn.Module, __: Any, outputs: Any) -> Any:
        device = before.pop() if before else None
        return outputs if device is None or outputs is None else _moved(outputs, device)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)
    if len({tensor.device for tensor in streaming.tensors.values()}) == 1:
        return

    def move_inputs(device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return _moved(args, device), _moved(kwargs, device)

    devices = {
        name: tensor.device for tensor in streaming.tensors.values() for name in tensor.names
    }
    for path, part in module.named_modules():
        names = [f"{path}.{key}" for key in (*part._parameters, *part._buffers)]
        placed = [devices[name] for name in names if name in devices]
        if placed and part is not module:
            move = functools.partial(move_inputs, placed[-1])
            part.register_forward_pre_hook(move, with_kwargs=True)


def _moved(tree: Any, device: torch.device) -> Any:
    """A tree with its tensors on a device; caches stay where layers have put them."""
    if isinstance(tree, dict) and any(name in tree for name in _CACHES):
        caches = {name: tree[name] for name in _CACHES if name in tree}
        rest = {name: value for name, value in tree.items() if name not in caches}
        return {**_moved(rest, device), **caches}
    if all(leaf.device == device for leaf in _tensors(tree)):
        return tree
    return _tree.map_leaves(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _tree.flatten(tree)[0] if isinstance(leaf, Tensor)]


def _refuse_move(*_: Any, **__: Any) -> Any:
    raise PlanError(
        "A streamed model cannot be moved or converted (.to, .cuda, .half, ...): its placement "
        "says where every tensor is. Wrap the model with another placement, or take it out with "
        "fx.unwrap(model)."
    )
