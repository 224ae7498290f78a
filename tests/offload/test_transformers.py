"""Models of transformers, streamed: outputs and generated tokens of the resident model."""

import copy

import pytest
import torch

import fxtrain as fx
from tests._slow import slow_after

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(7)[None] % 24 + 1
_SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
_LLAMA = {**_SIZES, "num_key_value_heads": 2}
_T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 32}
_T5 |= {"decoder_start_token_id": 0}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 32}
MODELS = {
    "decoder": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "tied decoder": ("LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "tie_word_embeddings": True}),
    "experts": ("MixtralForCausalLM", "MixtralConfig", {**_LLAMA, **_EXPERTS}),
    "transposed weights": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "encoder": ("BertModel", "BertConfig", {**_SIZES, "max_position_embeddings": 16}),
    "encoder and decoder": ("T5ForConditionalGeneration", "T5Config", _T5),
    "vision": ("ViTModel", "ViTConfig", {**_SIZES, "image_size": 8, "patch_size": 4}),
}


@pytest.fixture(scope="module", params=MODELS)
def resident(request):
    kind, config, sizes = MODELS[request.param]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()


@pytest.fixture(scope="module")
def folder(resident, tmp_path_factory):
    at = tmp_path_factory.mktemp("model")
    fx.export(resident, at, max_shard="20KB")
    return at


def inputs(model):
    if model.config.model_type == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
    decoder = {"decoder_input_ids": TOKENS[:, :3]} if model.config.is_encoder_decoder else {}
    return {"input_ids": TOKENS, **decoder}


@pytest.mark.parametrize("share", slow_after(1, [0.2, 0.6]))
def test_streamed_outputs_equal_resident_ones(resident, folder, share):
    size = sum(parameter.numel() * 4 for parameter in resident.parameters())
    placed = placement_of(resident, int(size * share))
    kind, config = type(resident), resident.config
    with fx.detect(env={}, device="cpu") as ctx:
        empty = fx.big.empty(lambda: kind(copy.deepcopy(config)))
        plan = fx.Plan(strategy=fx.Offload(placement=placed, source=str(folder)))
        model = fx.wrap(empty.eval(), ctx, plan)
        assert placed.streamed
        with torch.no_grad():
            for _ in range(2):
                found, wanted = model(**inputs(resident)), resident(**inputs(resident))
                assert torch.equal(found[0], wanted[0])
        if resident.can_generate():
            options = {"max_new_tokens": 4, "do_sample": False}
            found = model.module.generate(TOKENS, **options)
            assert torch.equal(found, resident.generate(TOKENS, **options))
        assert fx.unwrap(model) is empty


def placement_of(model, limit):
    sizes = fx.big.sizes(model)
    least = int(1.5 * max(unit.bytes for unit in sizes.units))
    return fx.big.place(sizes, fx.big.budget({"cpu": max(limit, least)}))
