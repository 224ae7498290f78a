"""Tiny models of transformers, the same on every rank; a test without transformers is skipped."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxtrain as fx
from fxtrain.backends.pipeline.partition import schedules_fit
from fxtrain.testing import all_at_once

# tests/state/test_old_torch.py sees that they are refused there.
PIPELINES = pytest.mark.skipif(
    not schedules_fit(), reason=f"PP() refuses the schedules of torch {torch.__version__}"
)
VOCABULARY = 24
# How the small transformer of fxtrain.testing is split over the tensor axis.
UP = fx.Style(modules="blocks.*.up", style="colwise")
DOWN = fx.Style(modules="blocks.*.down", style="rowwise")
ATTENTION = (
    fx.Style(modules="blocks.*.attention.[qkv]", style="colwise"),
    fx.Style(modules="blocks.*.attention.o", style="rowwise"),
)


def is_block(name, part):
    """What to shard as a unit, for plans that name a function."""
    return name.startswith("blocks.") and name.count(".") == 1


def synced_each(ranks, plan, mesh=None):
    """The law on everything at once, with gradients that are reduced for every micro-batch."""
    all_at_once(ranks, attrs.evolve(plan, sync_each=True), mesh)


class Experts(nn.Module):
    """A mixture of linear experts with stacked weights (experts, out, in) and biases."""

    def __init__(self, weight, bias):
        super().__init__()
        self.num_experts = len(weight)
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, tokens, index, weights):
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row, place = torch.where(index == expert)
            made = F.linear(tokens[row], self.weight[expert], self.bias[expert])
            out = out.index_add(0, row, made * weights[row, place, None])
        return out


_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _made(kind, config, **sizes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes))


def llama(**changes):
    return _made("LlamaForCausalLM", "LlamaConfig", **{**_SIZES, **changes}).double()


def tied_llama():
    return llama(tie_word_embeddings=True)


def mixtral():
    """Of fp32: torch has no grouped products of fp64."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return _made("MixtralForCausalLM", "MixtralConfig", **_SIZES, **experts)


def qwen2_moe():
    """Of fp32, with an expert that every token uses beside the chosen ones."""
    sizes = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    return _made("Qwen2MoeForCausalLM", "Qwen2MoeConfig", **_SIZES, **sizes, **experts)


def qwen3_moe():
    """Of fp32."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    return _made("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_SIZES, **experts, head_dim=4)


def gpt2():
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return _made("GPT2LMHeadModel", "GPT2Config", **sizes, **rates).double()


def t5():
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2}
    rest = {"num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False}
    return _made("T5ForConditionalGeneration", "T5Config", **sizes, **rest).double()
