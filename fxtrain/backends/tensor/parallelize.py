"""Tensor, sequence and expert parallelism: layers over the tensor axis, by torch's DTensor."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
)

from fxtrain.backends.core.device_mesh import (
    DistributedParameters,
    distribute_parameter,
    hide_local,
    show_local,
)
from fxtrain.backends.tensor.layer_plan import Split, find_splits, region, split_dim
from fxtrain.errors import StepError
from fxtrain.state import TP

_SEQUENCE = Shard(1)
_FEATURES = Shard(-1)
_REPLICATED = Replicate()


def split_layers(
    module: nn.Module,
    mesh: DeviceMesh,
    config: TP,
    *,
    own: Callable[[nn.Module], bool] | None = None,
    distributed: DistributedParameters | None = None,
) -> None:
    """Split a module's layers as a config says.

    Args:
        own: Whether a layer or block should be split, where others belong to other ranks.
        distributed: DTensors by the id of the parameter, for modules that share it; extended.

    Effects:
        Replaces parameters by DTensors over the one-axis mesh, and adds hooks that lay out inputs
        and outputs. Shards are taken from this rank's own values; nothing is sent.
    """
    distributed = {} if distributed is None else distributed
    splits = find_splits(module, config)
    blocks = region(module) if config.sequence else []
    if own is not None:
        splits = {name: how for name, how in splits.items() if own(module.get_submodule(name))}
        blocks = [(name, block) for name, block in blocks if own(block)]
    gathering = _gathering(splits, [name for name, _ in blocks])
    ties = _ties(module)
    for name, style in splits.items():
        layer = module.get_submodule(name)
        inside = any(_within(name, block) for block, _ in blocks)
        if style == "reduce":
            _sum_gradients(layer, mesh, distributed)
            continue
        if style == "expert":
            split_experts(layer, mesh, distributed)
            continue
        _split_layer(layer, mesh, style, distributed)
        split_input = inside and style != "rowwise" and _parent(name) not in gathering
        keep = config.loss and style == "colwise_gather"
        _lay_out(layer, mesh, style, sequence=inside, split_input=split_input, keep=keep)
    for name in sorted(gathering):
        hook = functools.partial(_gather_input, mesh)
        module.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    for block, _ in blocks:
        _sum_in_stream(module, block, splits, gathering, mesh, distributed)
    if blocks:
        enter = functools.partial(_enter, mesh)
        blocks[0][1].register_forward_pre_hook(enter, with_kwargs=True)
        blocks[-1][1].register_forward_hook(functools.partial(_leave, mesh))
    for places in ties:
        _tie(places)


def _split_layer(
    layer: nn.Module, mesh: DeviceMesh, style: str, distributed: DistributedParameters
) -> None:
    dim = split_dim(layer, style)
    for name, _ in list(layer.named_parameters(recurse=False)):
        how: Placement = Shard(dim)
        if name == "bias":
            how = _REPLICATED if style == "rowwise" else Shard(0)
        distribute_parameter(layer, name, mesh, how, distributed)


def _lay_out(
    layer: nn.Module,
    mesh: DeviceMesh,
    style: str,
    *,
    sequence: bool,
    split_input: bool,
    keep: bool,
) -> None:
    """Hooks that give a layer the input layout its weight needs, and its output the next one's."""
    needed: Placement = _REPLICATED
    if style == "rowwise" and not isinstance(layer, nn.Embedding):
        needed = _FEATURES
    given = _SEQUENCE if split_input else needed
    output: Placement = _FEATURES
    if style == "rowwise":
        output = _SEQUENCE if sequence else _REPLICATED
    elif style == "colwise_gather" and not keep:
        output = _REPLICATED

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_laid_out(args[0], mesh, given, needed), *args[1:])

    def after(_: nn.Module, __: Any, out: Any) -> Any:
        out = out.redistribute(placements=[output])
        return out if keep else local_copy(out)

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def _laid_out(value: Any, mesh: DeviceMesh, current: Placement, needed: Placement) -> DTensor:
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh, [current], run_check=False)
    return value.redistribute(placements=[needed])


def _sum_gradients(part: nn.Module, mesh: DeviceMesh, distributed: DistributedParameters) -> None:
    """Leave a module's own parameters unsplit, and sum their gradients over the axis."""
    names = [name for name, _ in part.named_parameters(recurse=False)]
    for name in names:
        distribute_parameter(part, name, mesh, _REPLICATED, distributed)

    def before(module: nn.Module, _: Any) -> None:
        show_local(module, names, grad_placements=[Partial()])

    def after(module: nn.Module, _: Any, __: Any) -> None:
        hide_local(module, names)

    part.register_forward_pre_hook(before)
    part.register_forward_hook(after, always_call=True)


def _sum_in_stream(
    module: nn.Module,
    block: str,
    splits: Split,
    gathering: set[str],
    mesh: DeviceMesh,
    distributed: DistributedParameters,
) -> None:
    """Parameters in a block that see only a part of the sequence, such as those of norms."""
    for name, part in module.get_submodule(block).named_modules(prefix=block):
        apart = any(_within(name, parent) for parent in gathering)
        if name not in splits and not apart and list(part.parameters(recurse=False)):
            _sum_gradients(part, mesh, distributed)


def _gathering(splits: Split, blocks: list[str]) -> set[str]:
    """Modules in blocks all of whose column-wise layers take the same input: gathered once."""
    return {
        _parent(name)
        for name, style in splits.items()
        if style.startswith("colwise")
        and _parent(name) not in blocks
        and any(_within(name, block) for block in blocks)
    }


def _gather_input(mesh: DeviceMesh, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    # Kept as a DTensor, so that gradients of several layers are summed and scattered at once.
    return _on_first(args, kwargs, lambda value: _laid_out(value, mesh, _SEQUENCE, _REPLICATED))


def _enter(mesh: DeviceMesh, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    def part(value: Tensor) -> Tensor:
        if value.shape[1] % mesh.size():
            raise StepError(
                f"TP(sequence=True) splits sequences over {mesh.size()} tensor ranks, but this "
                f"one has {value.shape[1]} tokens. Pad it to a multiple of {mesh.size()}."
            )
        return _laid_out(value, mesh, _REPLICATED, _SEQUENCE).to_local()

    return _on_first(args, kwargs, part)


def _leave(mesh: DeviceMesh, _: nn.Module, __: Any, out: Any) -> Any:
    if isinstance(out, tuple):
        return (_leave(mesh, _, __, out[0]), *out[1:])
    return local_copy(_laid_out(out, mesh, _SEQUENCE, _REPLICATED))


def _on_first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[Any, Any]:
    """Change the activations: the first argument, or the keyword argument of transformers."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _ties(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((part, name))
    return [names for names in places.values() if len(names) > 1]


def _tie(places: list[tuple[nn.Module, str]]) -> None:
    (first, name), *others = places
    for part, other in others:
        part.register_parameter(other, first.get_parameter(name))


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def split_experts(part: nn.Module, mesh: DeviceMesh, distributed: DistributedParameters) -> None:
    """Give each rank its experts of a module whose expert weights are stacked.

    The ranks see the same tokens. Each computes the contribution of its own experts to the
    output, and one all-reduce sums them, as in a row-wise layer.

    Effects:
        Replaces parameters by DTensors sharded along their first dimension, and adds hooks so that
        forward sees this rank's part of them, of `num_experts` and of the routes.
    """
    names = [name for name, _ in part.named_parameters(recurse=False)]
    for name in names:
        distribute_parameter(part, name, mesh, Shard(0), distributed)
    signature = inspect.signature(part.forward)
    count: Any = part.num_experts
    here = count // mesh.size()
    first = mesh.get_local_rank() * here
    known = {"num_experts": here}
    if hasattr(part, "_is_expert_parallel"):
        known["_is_expert_parallel"] = True  # for transformers: some routes lead to no expert
    values = {name: getattr(part, name) for name in known}

    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        tokens, index, weights, *rest = signature.bind(*args, **kwargs).args
        show_local(module, names)
        vars(module).update(known)
        index, weights = _routes(index - first, _summed_back(weights, mesh), here)
        return (_summed_back(tokens, mesh), index, weights, *rest), {}

    def after(module: nn.Module, _: Any, __: Any, out: Any) -> Any:
        hide_local(module, names)
        vars(module).update(values)
        if not isinstance(out, Tensor):
            return out  # forward failed, and this hook was called to clean up
        whole = DTensor.from_local(out, mesh, [Partial()], run_check=False)
        return local_copy(whole.redistribute(placements=[Replicate()]))

    part.register_forward_pre_hook(before, with_kwargs=True)
    part.register_forward_hook(after, with_kwargs=True, always_call=True)


def _routes(index: Tensor, weights: Tensor, here: int) -> tuple[Tensor, Tensor]:
    """Route tokens for other ranks' experts to none: one index past the last, with weight zero."""
    away = (index < 0) | (index >= here)
    return index.masked_fill(away, here), weights.masked_fill(away, 0.0)


def _summed_back(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same value on every rank; its gradient is summed over the ranks."""
    whole = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def local_copy(value: DTensor) -> Tensor:
    """This rank's part, as a copy: torch warns if a block returns the view of to_local."""
    part = value.to_local()
    return torch.ops.aten._unsafe_view(part, part.shape)
