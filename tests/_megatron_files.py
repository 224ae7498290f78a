"""Files as Megatron writes them, in its format `torch`, made of a model of transformers."""

import argparse

import torch

from fxtrain.interop.megatron_names import FAMILIES, heads_of

_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def _arguments(family, config):
    args = {name: config.get(field) for name, field in family.fields.items()}
    heads, groups = args["num_attention_heads"], args.get("num_query_groups")
    args["num_query_groups"] = groups or heads
    args["group_query_attention"] = args["num_query_groups"] != heads
    args["ffn_hidden_size"] = args["ffn_hidden_size"] or 4 * args["hidden_size"]
    args["bias_gelu_fusion"] = config.get("activation_function", "gelu_new") != "gelu"
    rope = config.get("rope_parameters") or {}
    return {**args, **family.fixed, "rotary_base": rope.get("rope_theta", 10_000)}


def _cut(row, whole, ranks):
    if row.cut is None:
        return [whole] * ranks
    if row.layout == "gated":
        gate, up = (half.chunk(ranks) for half in whole.chunk(2))
        return [torch.cat(pair) for pair in zip(gate, up, strict=True)]
    return list(whole.chunk(ranks, row.cut))


def _from_transformers(row, parts, heads, padded):
    whole = torch.cat([part.t() if row.transposed else part for part in parts])
    if row.layout == "vocab":
        return torch.cat([whole, whole.new_zeros(padded - len(whole), *whole.shape[1:])])
    if row.layout != "qkv":
        return whole
    queries, groups = heads
    size = len(whole) // (queries + 2 * groups)
    each = whole.split([queries * size, groups * size, groups * size])
    return torch.cat([part.unflatten(0, (groups, -1, size)) for part in each], 1).flatten(0, 2)


def write_megatron(
    tensors, config, folder, *, tensor=1, pipeline=1, fused=True, vocab_multiple=128
):
    """Write weights for `tensor` × `pipeline` ranks; return the folder of the checkpoint."""
    family = FAMILIES[config["model_type"]]
    args = _arguments(family, config)
    output, embedding = family.tied
    tied = output not in tensors or config.get("tie_word_embeddings", True)
    vocab, multiple = len(tensors[embedding]), tensor * vocab_multiple
    padded = -(-vocab // multiple) * multiple
    args |= {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "vocab_size": vocab,
        "untie_embeddings_and_output_weights": not tied,
    }
    here = args["num_layers"] // pipeline
    models = {(rank, stage): {} for rank in range(tensor) for stage in range(pipeline)}
    for row in family.rows:
        last = row.megatron.startswith(("decoder.final_layernorm", "output_layer"))
        copied = tied and row.megatron == "output_layer.weight"
        if copied and pipeline == 1:
            continue
        for layer in range(args["num_layers"]) if "{}" in row.megatron else (None,):
            stage = (pipeline - 1 if last else 0) if layer is None else layer // here
            names = (embedding,) if copied else row.names
            parts = [tensors[name.format(layer)].detach() for name in names]
            whole = _from_transformers(row, parts, heads_of(args), padded)
            name = row.megatron.format(None if layer is None else layer % here)
            for apart, other in _FUSED.items() if fused else ():
                name = name.replace(apart, other)
            for rank, part in enumerate(_cut(row, whole, tensor)):
                models[rank, stage][name] = part.clone()
    for (rank, stage), model in models.items():
        place = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else "")
        (folder / "release" / place).mkdir(parents=True, exist_ok=True)
        contents = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 0}
        torch.save({**contents, "model": model}, folder / "release" / place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    return folder / "release"
