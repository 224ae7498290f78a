"""Which layers tensor parallelism splits, and how. Changes nothing, and needs no rank."""

import difflib
import fnmatch
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from fxtrain.models.block_names import block_names
from fxtrain.state import TP

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

Split = dict[str, str]


def find_splits(module: nn.Module, config: TP) -> Split:
    """Module name to style, from the config, the model or a given plan."""
    names = [name for name, _ in module.named_modules()]
    if config.styles:
        return {
            name: rule.style
            for rule in config.styles
            for name in fnmatch.filter(names, rule.modules)
        }
    splits = _rename_plan(module, names) or {
        name: style
        for name in names
        for ending, style in _KNOWN.items()
        if f".{name}".endswith(f".{ending}")
    }
    return _without_conflicting_ties(module, splits)


def split_problems(module: nn.Module, config: TP, n: int) -> list[str]:
    """Patterns that match nothing, layers that cannot be split, sizes that are not divisible."""
    names = [name for name, _ in module.named_modules()]
    problems: list[str] = []
    for rule in config.styles:
        if not fnmatch.filter(names, rule.modules):
            close = difflib.get_close_matches(rule.modules, names, n=3) or names[1:6]
            problems.append(
                f"TP: no module matches {rule.modules!r}. Did you mean {', '.join(close)}?"
            )
    unknown = sorted({s for s in _transformers_plan(module).values() if s not in _HF_STYLES})
    if unknown and not config.styles:
        problems.append(
            f"TP: {type(module).__name__} has a plan with {', '.join(unknown)}, for which torch "
            f"has no style. Pass fx.TP(styles=...) with {', '.join(sorted(set(_HF_STYLES)))}."
        )
        return problems
    splits = find_splits(module, config)
    if not splits and not problems:
        problems.append(
            f"TP: {type(module).__name__} has no plan of its own, and no layers named as in Llama "
            f"or GPT-2. Name the layers to split: fx.TP(styles=(fx.Style(modules='blocks.*.up', "
            f"style='colwise'), ...))."
        )
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
    mixed = [name for name, style in splits.items() if style == "expert"]
    if mixed:
        return [
            f"TP(sequence=True): experts need every token, but those of {mixed[0]} would see only "
            f"a part of the sequence. Use sequence=False."
        ]
    whole = [
        name
        for block, part in blocks
        for name, layer in part.named_modules(prefix=block)
        if name not in splits and any(p.ndim > 1 for p in layer.parameters(recurse=False))
    ]
    if not whole:
        return []
    return [
        f"TP(sequence=True): {', '.join(whole[:4])} are not split, and would see only a part of "
        f"the sequence. Split every layer of a block, or use sequence=False."
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
        found = getattr(part, "_tp_plan", None)
        if isinstance(found, Mapping):
            start = f"{prefix}." if prefix else ""
            plan.update({f"{start}{pattern}": style for pattern, style in found.items()})
    config = getattr(module, "config", None)
    base = getattr(module, "base_model_prefix", "")
    start = f"{base}." if base and hasattr(module, base) else ""
    carried = getattr(config, "base_model_tp_plan", None) or {}
    found = {**{f"{start}{pattern}": style for pattern, style in carried.items()}, **plan}
    experts = tuple(f"{pattern}." for pattern, style in found.items() if style in _EXPERT_STYLES)
    # Their entries for the parameters of experts describe another split: here experts stay whole.
    return {pattern: style for pattern, style in found.items() if not pattern.startswith(experts)}


def _rename_plan(module: nn.Module, names: list[str]) -> Split:
    return {
        name: _HF_STYLES[style]
        for pattern, style in _transformers_plan(module).items()
        for name in fnmatch.filter(names, pattern)
        if style in _HF_STYLES
    }


def _layer_problems(name: str, layer: nn.Module, style: str, n: int) -> list[str]:
    if style == "reduce":
        return []
    if style == "expert":
        return _expert_problems(name, layer, n)
    if not isinstance(layer, nn.Linear | nn.Embedding) and not is_conv1d(layer):
        return [
            f"TP: {name} is a {type(layer).__name__}, but {style} splits Linear and Embedding "
            f"layers."
        ]
    size = layer.get_parameter("weight").shape[split_dim(layer, style)]
    if size % n == 0:
        return []
    return [
        f"TP: {name} is split {style} along a dimension of {size}, not divisible by {n} tensor "
        f"ranks. Use Mesh(tensor=...) with a divisor of {size}, or leave the layer unsplit."
    ]


def is_mixture(layer: nn.Module) -> bool:
    """Whether a module has the stacked weights of all its experts, and a forward that routes.

    It has their number as `num_experts`, and takes (tokens, experts of each, weights of those).
    """
    sizes = {p.shape[0] if p.ndim else 0 for p in layer.parameters(recurse=False)}
    inner = any(True for child in layer.children() for _ in child.parameters())
    return not inner and sizes == {getattr(layer, "num_experts", None)} and _takes(layer) >= 3


def _expert_problems(name: str, layer: nn.Module, n: int) -> list[str]:
    if not is_mixture(layer):
        return [
            f"TP: {name} is a {type(layer).__name__}, but expert splits a module that has the "
            f"stacked weights of all its experts, their number as num_experts, and takes (tokens, "
            f"experts of each, weights of those)."
        ]
    count: Any = layer.num_experts
    if count % n == 0:
        return []
    return [
        f"TP: {name} has {count} experts, not divisible by {n} tensor ranks. Use "
        f"Mesh(tensor=...) with a divisor of {count}, or leave the module unsplit."
    ]


def _takes(layer: nn.Module) -> int:
    return len(inspect.signature(layer.forward).parameters)


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


def _without_conflicting_ties(module: nn.Module, splits: Split) -> Split:
    cut = {name for owners in _conflicting_ties(module, splits) for name in owners}
    return {name: style for name, style in splits.items() if name not in cut}
