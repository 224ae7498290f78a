"""Quantised files and plain transformers: each reads what the other writes."""

import json

import pytest
import torch

import fxtrain as fx
from fxtrain.precision import quantize_layers, stored_tensors
from tests.precision._records import marked

CPU = torch.device("cpu")


def _llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 24, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    return transformers, transformers.LlamaForCausalLM(config).eval()


def _same(one, other):
    first, second = stored_tensors(one), stored_tensors(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", marked(["bnb8", "nf4"]))
def test_files_are_read_by_either(name, tmp_path):
    pytest.importorskip("accelerate", reason="transformers loads quantised models with it")
    transformers, net = _llama()
    fx.export(net, tmp_path / "plain")
    record = fx.Bnb8(threshold=3.0) if name == "bnb8" else fx.Bnb4(compute="fp32")
    quantize_layers(net, record, CPU)
    fx.export(net, tmp_path / "ours")
    config = json.loads((tmp_path / "ours/config.json").read_text())["quantization_config"]
    assert config["llm_int8_skip_modules"] == ["lm_head"]
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    _same(net, found)
    options = (
        {"load_in_8bit": True, "llm_int8_threshold": 3.0}
        if name == "bnb8"
        else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain",
        dtype=torch.float32,
        quantization_config=transformers.BitsAndBytesConfig(**options),
    )
    theirs.save_pretrained(tmp_path / "theirs")
    _, plain = _llama()
    fx.load_model(tmp_path / "theirs", plain)
    _same(theirs, plain)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    assert torch.equal(plain(tokens).logits, net(tokens).logits)


@pytest.mark.parametrize("name", marked(["int8"]))
def test_what_plain_transformers_cannot_read_is_said_before_writing(name, tmp_path):
    _, net = _llama()
    quantize_layers(net, fx.Torchao(), CPU)
    with pytest.warns(UserWarning, match="fx.load_model reads these files"):
        fx.export(net, tmp_path)
