"""Megatron's tensors and settings beside those of transformers: one table for each family.

Megatron stacks the matrices that one product computes: queries, keys and values of each group of
heads, and the gate and the input of a gated MLP. It cuts tensors over tensor-parallel ranks.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from fxtrain._record import shown
from fxtrain.errors import CheckpointError

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
# Names under Transformer Engine's fused layers and in torch_dist, which means the same tensors.
_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


@attrs.frozen
class Row:
    """One tensor of Megatron, or the same one of each layer."""

    megatron: str  # its name; `{}` is the number of the layer
    names: tuple[str, ...]  # its parts in transformers
    cut: int | None = None  # the dimension that tensor-parallel ranks divide
    layout: Literal["plain", "qkv", "gated", "vocab"] = "plain"  # of the parts; vocab is padded
    transposed: bool = False  # in transformers


@attrs.frozen(kw_only=True)
class Family:
    """A family of models that both libraries have."""

    model_type: str  # its name in transformers
    rows: tuple[Row, ...]
    tied: tuple[str, str]  # names of the output layer and of the embedding in transformers
    fields: Mapping[str, str]  # settings: the argument of Megatron, the field of transformers
    fixed: Mapping[str, Any]  # arguments of Megatron that every model of the family has


_BLOCK = "decoder.layers.{}."


def _llama_rows() -> tuple[Row, ...]:
    hf = "model.layers.{}."
    qkv = tuple(f"{hf}self_attn.{letter}_proj.weight" for letter in "qkv")
    gated = (f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight")
    return (
        Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), 0, "vocab"),
        Row(f"{_BLOCK}input_layernorm.weight", (f"{hf}input_layernorm.weight",)),
        Row(f"{_BLOCK}self_attention.linear_qkv.weight", qkv, 0, "qkv"),
        Row(f"{_BLOCK}self_attention.linear_proj.weight", (f"{hf}self_attn.o_proj.weight",), 1),
        Row(f"{_BLOCK}pre_mlp_layernorm.weight", (f"{hf}post_attention_layernorm.weight",)),
        Row(f"{_BLOCK}mlp.linear_fc1.weight", gated, 0, "gated"),
        Row(f"{_BLOCK}mlp.linear_fc2.weight", (f"{hf}mlp.down_proj.weight",), 1),
        Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
        Row("output_layer.weight", ("lm_head.weight",), 0, "vocab"),
    )


def _qwen2_rows() -> tuple[Row, ...]:
    biases = tuple(f"model.layers.{{}}.self_attn.{letter}_proj.bias" for letter in "qkv")
    return (*_llama_rows(), Row(f"{_BLOCK}self_attention.linear_qkv.bias", biases, 0, "qkv"))


def _gpt2_rows() -> tuple[Row, ...]:
    hf = "transformer.h.{}."
    attention, mlp = f"{_BLOCK}self_attention.", f"{_BLOCK}mlp."
    norms = {"decoder.final_layernorm": "transformer.ln_f"}
    norms |= {f"{_BLOCK}input_layernorm": f"{hf}ln_1", f"{_BLOCK}pre_mlp_layernorm": f"{hf}ln_2"}
    ends = ("weight", "bias")
    return (
        Row("embedding.word_embeddings.weight", ("transformer.wte.weight",), 0, "vocab"),
        Row("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
        *(Row(f"{a}.{end}", (f"{b}.{end}",)) for a, b in norms.items() for end in ends),
        Row(
            f"{attention}linear_qkv.weight", (f"{hf}attn.c_attn.weight",), 0, "qkv", transposed=True
        ),
        Row(f"{attention}linear_qkv.bias", (f"{hf}attn.c_attn.bias",), 0, "qkv"),
        Row(f"{attention}linear_proj.weight", (f"{hf}attn.c_proj.weight",), 1, transposed=True),
        Row(f"{attention}linear_proj.bias", (f"{hf}attn.c_proj.bias",)),
        Row(f"{mlp}linear_fc1.weight", (f"{hf}mlp.c_fc.weight",), 0, transposed=True),
        Row(f"{mlp}linear_fc1.bias", (f"{hf}mlp.c_fc.bias",), 0),
        Row(f"{mlp}linear_fc2.weight", (f"{hf}mlp.c_proj.weight",), 1, transposed=True),
        Row(f"{mlp}linear_fc2.bias", (f"{hf}mlp.c_proj.bias",)),
        Row("output_layer.weight", ("lm_head.weight",), 0, "vocab"),
    )


_LLAMA_FIELDS = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size", "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads", "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings", "norm_epsilon": "rms_norm_eps",
}  # fmt: skip
_GPT2_FIELDS = {
    "num_layers": "n_layer", "hidden_size": "n_embd", "ffn_hidden_size": "n_inner",
    "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
    "norm_epsilon": "layer_norm_epsilon",
}  # fmt: skip
_LLAMA_FIXED = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"}
_LLAMA_FIXED |= {"add_bias_linear": False}
_GPT2_FIXED = {"swiglu": False, "normalization": "LayerNorm", "add_bias_linear": True}
_GPT2_FIXED |= {"position_embedding_type": "learned_absolute", "squared_relu": False}
_LLAMA_TIED = ("lm_head.weight", "model.embed_tokens.weight")
# Arguments that change what a model computes, with the only value that is converted.
_PLAIN = {"apply_layernorm_1p": False, "rotary_interleaved": False, "rotary_percent": 1.0}
_PLAIN |= {"use_rope_scaling": False, "apply_residual_connection_post_layernorm": False}

FAMILIES: Mapping[str, Family] = MappingProxyType({
    family.model_type: family
    for family in (
        Family(
            model_type="llama", rows=_llama_rows(), tied=_LLAMA_TIED,
            fields=_LLAMA_FIELDS, fixed={**_LLAMA_FIXED, "add_qkv_bias": False},
        ),
        Family(
            model_type="qwen2", rows=_qwen2_rows(), tied=_LLAMA_TIED,
            fields=_LLAMA_FIELDS, fixed={**_LLAMA_FIXED, "add_qkv_bias": True},
        ),
        Family(
            model_type="gpt2", rows=_gpt2_rows(), fixed=_GPT2_FIXED, fields=_GPT2_FIELDS,
            tied=("lm_head.weight", "transformer.wte.weight"),
        ),
    )
})  # fmt: skip


def pattern_of(name: str) -> tuple[str, int | None]:
    """A name of Megatron as in the tables, and the number of its layer."""
    for fused, apart in _FUSED.items():
        name = name.replace(fused, apart)
    match = _LAYER.search(name)
    return _LAYER.sub("{}", name, count=1), None if match is None else int(match[0])


def fused_name(name: str) -> str:
    """A name as a model of Transformer Engine's fused layers has it."""
    for fused, apart in _FUSED.items():
        name = name.replace(apart, fused)
    return name


def family_of(names: Sequence[str]) -> Family:
    """The family whose table has all patterns of names."""
    unknown: list[str] = []
    for family in FAMILIES.values():
        others = sorted(set(names) - {row.megatron for row in family.rows})
        if not others:
            return family
        unknown = min(unknown or others, others, key=len)
    raise CheckpointError(
        f"The model has {shown(unknown[0])}"
        f"{f' and {len(unknown) - 1} more kinds of tensors' if unknown[1:] else ''}, which none of "
        f"the families {', '.join(FAMILIES)} has. Convert it with Megatron's own tools."
    )


def check_family(family: Family, args: Mapping[str, Any]) -> None:
    """Raise if arguments of Megatron say that a model computes something else than its family."""
    for name, value in {**family.fixed, **_PLAIN}.items():
        if args.get(name, value) != value:
            raise CheckpointError(
                f"The model was trained with {name}={shown(args[name])}, but "
                f"{family.model_type} of transformers computes {name}={value!r}."
            )


def positive_count(args: Mapping[str, Any], name: str) -> int:
    """A positive number among arguments of Megatron."""
    value = args.get(name)
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"Megatron's argument {name} is {shown(value)}, not a positive number. Pass "
            f"args={{{name!r}: ...}} with the one that the model was trained with."
        )
    return value


def heads_of(args: Mapping[str, Any]) -> tuple[int, int]:
    """Heads of queries, and groups of them that share a key and a value."""
    heads = positive_count(args, "num_attention_heads")
    grouped = args.get("group_query_attention", False) is True
    return heads, positive_count(args, "num_query_groups") if grouped else heads


def config_of(family: Family, args: Mapping[str, Any], *, vocab: int, tied: bool) -> dict[str, Any]:
    """The fields of a config of transformers."""
    args = {**args, "num_query_groups": heads_of(args)[1]}
    config: dict[str, Any] = {"model_type": family.model_type}
    for name, field in family.fields.items():
        if args.get(name) is not None:
            config[field] = args[name]
    config |= {"vocab_size": vocab, "tie_word_embeddings": tied}
    if family.model_type == "gpt2":
        # Megatron's fused activation is the approximation by tanh.
        approximate = args.get("bias_gelu_fusion") is True or args.get("openai_gelu") is True
        return config | {"activation_function": "gelu_new" if approximate else "gelu"}
    base = args.get("rotary_base", 10_000)
    return config | {"rope_parameters": {"rope_type": "default", "rope_theta": float(base)}}


def arguments_of(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's arguments for a model of transformers; raises if it computes something else."""
    args: dict[str, Any] = {name: config.get(field) for name, field in family.fields.items()}
    heads, width = positive_count(args, "num_attention_heads"), positive_count(args, "hidden_size")
    groups = args.get("num_query_groups") or heads
    args["num_query_groups"] = groups
    args["group_query_attention"] = groups != heads
    args["kv_channels"] = args.get("kv_channels") or width // heads
    args["ffn_hidden_size"] = args["ffn_hidden_size"] or 4 * width
    if family.model_type == "gpt2":
        activation = config.get("activation_function", "gelu_new")
        if activation not in ("gelu_new", "gelu_pytorch_tanh", "gelu"):
            raise CheckpointError(f"Megatron's GPT has no activation {shown(activation)}.")
        args["bias_gelu_fusion"] = activation != "gelu"
    else:
        rope = config.get("rope_parameters") or {}
        kind = rope.get("rope_type", "default")
        if kind != "default" or config.get("hidden_act", "silu") != "silu":
            raise CheckpointError(
                f"The config has rope_type {shown(kind)} and hidden_act "
                f"{shown(config.get('hidden_act'))}; only 'default' and 'silu' can be written."
            )
        args["rotary_base"] = rope.get("rope_theta", config.get("rope_theta", 10_000))
    return {**args, **family.fixed, **_PLAIN, "add_position_embedding": True}


def to_transformers(
    row: Row, parts: Sequence[Tensor], heads: tuple[int, int], vocab: int
) -> list[Tensor]:
    """The tensors of `row.names`, from the parts that tensor-parallel ranks have."""
    if row.cut is None and not all(torch.equal(part, parts[0]) for part in parts[1:]):
        raise CheckpointError(f"Tensor-parallel ranks have different values of {row.megatron}.")
    parts = parts[:1] if row.cut is None else parts
    apart: list[Sequence[Tensor]] = [(part,) for part in parts]
    if row.layout == "gated":
        apart = [part.chunk(2) for part in parts]
    elif row.layout == "qkv":
        queries, groups = heads
        shape = (groups // len(parts), queries // groups + 2, -1)
        grouped = [part.unflatten(0, shape) for part in parts]
        apart = [
            (g[:, :-2].flatten(0, 2), *(g[:, at].flatten(0, 1) for at in (-2, -1))) for g in grouped
        ]
    whole = [torch.cat(of_ranks, row.cut or 0) for of_ranks in zip(*apart, strict=True)]
    if row.layout == "vocab":
        whole = [whole[0][:vocab]]
    if len(row.names) == 1:
        whole = [torch.cat(whole)]
    return [(tensor.t() if row.transposed else tensor).contiguous() for tensor in whole]


def from_transformers(
    row: Row, tensors: Sequence[Tensor], heads: tuple[int, int], padded: int, ranks: int
) -> list[Tensor]:
    """Megatron's tensor from those of `row.names`: the part of each tensor-parallel rank."""
    tensors = [tensor.t() if row.transposed else tensor for tensor in tensors]
    queries, groups = heads
    if row.layout == "vocab":
        (rows,) = tensors
        tensors = [torch.cat([rows, rows.new_zeros(padded - len(rows), *rows.shape[1:])])]
    elif row.layout == "qkv" and len(tensors) == 1:
        size = len(tensors[0]) // (queries + 2 * groups)
        tensors = tensors[0].split([queries * size, groups * size, groups * size])
    if row.cut is None:
        return [torch.cat(list(tensors))] * ranks
    parts = zip(*(tensor.tensor_split(ranks, row.cut) for tensor in tensors), strict=True)
    if row.layout != "qkv":
        return [torch.cat(of_rank) for of_rank in parts]
    shape = (groups // ranks, -1, len(tensors[0]) // queries)
    try:
        stacked = [
            torch.cat([part.unflatten(0, shape) for part in of_rank], 1) for of_rank in parts
        ]
    except RuntimeError as error:
        raise CheckpointError(
            f"write_megatron: the shapes of the tensors are not those of the config ({error})."
        ) from error
    return [of_rank.flatten(0, 2) for of_rank in stacked]
