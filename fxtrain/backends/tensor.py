"""Tensor, sequence and expert parallelism: which layers are split, and how, by torch's DTensor."""

import fnmatch
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fxtrain.backends.core.device_mesh import (
    DistributedParameters,
    distribute_parameter,
    hide_local,
    show_local,
)
from fxtrain.backends.core.module_changes import unknown_patterns
from fxtrain.errors import StepError
from fxtrain.ops.block_names import block_names
from fxtrain.state import TP

Split = dict[str, str]
_SEQUENCE = Shard(1)
_FEATURES = Shard(-1)
_REPLICATED = Replicate()
# Layers of blocks by the last part of their names. A fused projection of queries, keys and values,
# as in GPT-2's c_attn, cannot be split into equal parts of whole heads; its attention is not split.
_KNOWN: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise"),
    **dict.fromkeys(("o_proj", "down_proj"), "rowwise"),
    "c_fc": "colwise",
    "mlp.c_proj": "rowwise",
}
# transformers' names for the styles that torch has too.
_HF_STYLES: Mapping[str, str] = {
    "colwise": "colwise",
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "rowwise": "rowwise",
    "embedding_rowwise": "rowwise",
    "replicated_with_grad_allreduce": "reduce",
    "moe_tp_experts": "expert",
}
_EXPERT_STYLES = ("moe_tp_experts",)


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
    for name, style in splits.items():
        layer = module.get_submodule(name)
        inside = any(_within(name, block) for block, _ in blocks)
        if style == "reduce":
            _sum_gradients(layer, mesh, distributed)
            continue
        if style == "expert":
            split_experts(layer, mesh, distributed)
            continue
        split_input = inside and style != "rowwise" and _parent(name) not in gathering
        keep = config.loss and style == "colwise_gather"
        options = {"sequence": inside, "split_input": split_input, "keep": keep}
        _split_layer(layer, mesh, style, distributed, **options)

    def gather(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # Kept as a DTensor, so that gradients of several layers are summed and scattered at once.
        return _on_first(args, kwargs, lambda x: _laid_out(x, mesh, _SEQUENCE, _REPLICATED))

    for name in sorted(gathering):
        module.get_submodule(name).register_forward_pre_hook(gather, with_kwargs=True)
    for block, _ in blocks:
        _sum_in_stream(module, block, splits, gathering, mesh, distributed)
    if blocks:
        enter = functools.partial(_enter, mesh)
        blocks[0][1].register_forward_pre_hook(enter, with_kwargs=True)
        blocks[-1][1].register_forward_hook(functools.partial(_leave, mesh))


def _split_layer(
    layer: nn.Module,
    mesh: DeviceMesh,
    style: str,
    distributed: DistributedParameters,
    *,
    sequence: bool,
    split_input: bool,
    keep: bool,
) -> None:
    """Split a layer's parameters, and lay out its input and output as they and the next need."""
    for name, _ in list(layer.named_parameters(recurse=False)):
        how: Placement = Shard(split_dim(layer, style))
        if name == "bias":
            how = _REPLICATED if style == "rowwise" else Shard(0)
        distribute_parameter(layer, name, mesh, how, distributed)
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
        index, weights = index - first, _summed_back(weights, mesh)
        # Tokens for other ranks' experts go to none: one index past the last, with weight zero.
        away = (index < 0) | (index >= here)
        index, weights = index.masked_fill(away, here), weights.masked_fill(away, 0.0)
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


def _summed_back(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same value on every rank; its gradient is summed over the ranks."""
    whole = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def local_copy(value: DTensor) -> Tensor:
    """This rank's part, as a copy: torch warns if a block returns the view of to_local."""
    part = value.to_local()
    return torch.ops.aten._unsafe_view(part, part.shape)


def find_splits(module: nn.Module, config: TP) -> Split:
    """Module name to style, from the config, the model or a given plan."""
    names = [name for name, _ in module.named_modules()]
    if config.styles:
        return {
            name: rule.style
            for rule in config.styles
            for name in fnmatch.filter(names, rule.modules)
        }
    splits = {
        name: _HF_STYLES[style]
        for pattern, style in _transformers_plan(module).items()
        for name in fnmatch.filter(names, pattern)
        if style in _HF_STYLES
    } or {
        name: style
        for name in names
        for ending, style in _KNOWN.items()
        if f".{name}".endswith(f".{ending}")
    }
    tied = set().union(*_conflicting_ties(module, splits))
    return {name: style for name, style in splits.items() if name not in tied}


def split_problems(module: nn.Module, config: TP, n: int) -> list[str]:
    """Patterns that match nothing, layers that cannot be split, sizes that are not divisible."""
    names = [name for name, _ in module.named_modules()]
    patterns = [rule.modules for rule in config.styles]
    problems = unknown_patterns(patterns, names, field="TP(styles=...)", what="module")
    unknown = sorted({s for s in _transformers_plan(module).values() if s not in _HF_STYLES})
    splits = find_splits(module, config)
    if not config.styles and (unknown or not splits):
        kind = type(module).__name__
        why = f"{kind} has no tensor-parallel plan, which some models of transformers have"
        if unknown:
            why = f"the plan of {kind} has styles that torch does not: {', '.join(unknown)}"
        return [
            f"TP: {why}. Name the layers to split: "
            f"fx.TP(styles=(fx.Style(modules='blocks.*.up', style='colwise'), ...))."
        ]
    for name, style in splits.items():
        problems += _layer_problems(name, module.get_submodule(name), style, n)
    problems += _head_problems(module, n)
    problems += [
        f"TP: {' and '.join(sorted(owners))} share a parameter, but are split differently. "
        f"Give both the same split (a rowwise embedding matches a colwise head), or neither."
        for owners in _conflicting_ties(module, splits)
    ]
    return problems + (_sequence_problems(module, splits) if config.sequence else [])


def _sequence_problems(module: nn.Module, splits: Split) -> list[str]:
    blocks = region(module)
    if not blocks:
        return [
            "TP(sequence=True) splits activations from the first block to the last, and this "
            "model has no ModuleList of blocks. Use sequence=False."
        ]
    whole = [name for name, style in splits.items() if style == "expert"]
    whole += [
        name
        for block, part in blocks
        for name, layer in part.named_modules(prefix=block)
        if name not in splits and any(p.ndim > 1 for p in layer.parameters(recurse=False))
    ]
    if not whole:
        return []
    return [
        f"TP(sequence=True): {', '.join(whole[:4])} would see only a part of the sequence. Split "
        f"every layer of a block, which experts do not allow, or use sequence=False."
    ]


def region(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks between whose first and last activations sequences may be split, in order."""
    kinds = block_names(module)
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and part and type(part[0]).__name__ in kinds:
            return [(f"{name}.{index}", block) for index, block in part.named_children()]
    return []


def _transformers_plan(module: nn.Module) -> dict[str, str]:
    """The plan of a transformers model: its own, plus that of its base model under a prefix."""
    plan: dict[str, str] = {}
    for prefix, part in module.named_modules():
        entries = getattr(part, "_tp_plan", None)
        if isinstance(entries, Mapping):
            start = f"{prefix}." if prefix else ""
            plan.update({f"{start}{pattern}": style for pattern, style in entries.items()})
    config = getattr(module, "config", None)
    base = getattr(module, "base_model_prefix", "")
    start = f"{base}." if base and hasattr(module, base) else ""
    carried = getattr(config, "base_model_tp_plan", None) or {}
    entries = {**{f"{start}{pattern}": style for pattern, style in carried.items()}, **plan}
    experts = tuple(f"{pattern}." for pattern, style in entries.items() if style in _EXPERT_STYLES)
    # Their entries for the parameters of experts describe another split: here experts stay whole.
    return {pattern: style for pattern, style in entries.items() if not pattern.startswith(experts)}


def _layer_problems(name: str, layer: nn.Module, style: str, n: int) -> list[str]:
    if style == "reduce":
        return []
    size: Any = None
    if style == "expert" and is_mixture(layer):
        size = layer.num_experts
    elif style != "expert" and (isinstance(layer, nn.Linear | nn.Embedding) or is_conv1d(layer)):
        size = layer.get_parameter("weight").shape[split_dim(layer, style)]
    if size is None:
        takes = "a mixture of experts" if style == "expert" else "Linear and Embedding layers"
        return [f"TP: {name} is a {type(layer).__name__}, but {style} splits {takes}."]
    if size % n == 0:
        return []
    return [
        f"TP: {name} is split {style} along a dimension of {size}, not divisible by {n} tensor "
        f"ranks. Use Mesh(tensor=...) with a divisor of {size}, or leave it unsplit."
    ]


def is_mixture(layer: nn.Module) -> bool:
    """Whether a module has the stacked weights of all its experts, and a forward that routes.

    It has their number as `num_experts`, and takes (tokens, experts of each, weights of those).
    """
    sizes = {p.shape[0] if p.ndim else 0 for p in layer.parameters(recurse=False)}
    inner = any(True for child in layer.children() for _ in child.parameters())
    stacked = not inner and sizes == {getattr(layer, "num_experts", None)}
    return stacked and len(inspect.signature(layer.forward).parameters) >= 3


def count_routes(index: Tensor, size: int) -> Tensor:
    """How often each expert below `size` occurs in an index of experts, which are all below it.

    torch.bincount waits for the device, and has no shape in a dry run.
    """
    flat = index.flatten().long()
    return flat.new_zeros(size).scatter_add(0, flat, torch.ones_like(flat))


def split_dim(layer: nn.Module, style: str) -> int:
    """The dimension along which a layer's weight is split."""
    turned = isinstance(layer, nn.Embedding) or is_conv1d(layer)
    return int(style == "rowwise") if not turned else int(style != "rowwise")


def is_conv1d(layer: nn.Module) -> bool:
    """transformers' linear layer of GPT-2, whose weight is transposed."""
    return type(layer).__name__ == "Conv1D" and layer.get_parameter("weight").ndim == 2


def _head_problems(module: nn.Module, n: int) -> list[str]:
    config = getattr(module, "config", None)
    sizes = {
        name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    }
    if not any(name.endswith("k_proj") for name, _ in module.named_modules()):
        return []
    return [
        f"TP: the model has {name}={size}, not divisible by {n} tensor ranks, and a head "
        f"cannot be split. Use Mesh(tensor=...) with a divisor of {size}."
        for name, size in sizes.items()
        if isinstance(size, int) and size % n
    ]


def _conflicting_ties(module: nn.Module, splits: Split) -> list[set[str]]:
    """Names of modules that share a parameter but would split it differently."""
    cuts: dict[int, dict[str, int | None]] = {}
    for name, part in module.named_modules():
        for _, parameter in part.named_parameters(recurse=False):
            style = splits.get(name, "reduce")
            cut = None if style == "reduce" else split_dim(part, style)
            cuts.setdefault(id(parameter), {})[name] = cut
    return [set(owners) for owners in cuts.values() if len(set(owners.values())) > 1]
