"""Quantized files and plain transformers: each reads what the other writes."""

import json
import warnings

import attrs
import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.models.exporting import transformers_config, warn_of_readers
from fxtrain.precision.quantizing import quantize_layers, stored_tensors
from tests._errors import raises_code
from tests._slow import slow_after
from tests.precision._records import RECORDS, marked

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
    pytest.importorskip("accelerate", reason="transformers loads quantized models with it")
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


@pytest.mark.parametrize("name", marked(["int4"]))
def test_what_plain_transformers_cannot_read_is_said_before_writing(name, tmp_path):
    _, net = _llama()
    quantize_layers(net, RECORDS[name], CPU)
    with pytest.warns(UserWarning, match=r"layers\.0.* fx\.load_model reads these files"):
        fx.export(net, tmp_path)


@pytest.mark.parametrize("name", marked(["bnb8", "nf4", "int8", "int8 dynamic", "float8"]))
@pytest.mark.parametrize("options", slow_after(1, [{"head": True}, {"skip": "layers.1"}]), ids=str)
def test_transformers_finds_the_layers_that_are_quantized(name, options, tmp_path):
    pytest.importorskip("accelerate", reason="transformers loads quantized models with it")
    transformers, net = _llama()
    quantize_layers(net, attrs.evolve(RECORDS[name], **options), CPU)
    assert _warned(net) == []
    fx.export(net, tmp_path)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    _same(net, found)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    if name != "nf4":  # which bitsandbytes packs in forward
        assert torch.equal(found(tokens).logits, net(tokens).logits)


def _warned(net):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_readers(net)
    return [str(one.message) for one in found]


class _Named(nn.Module):
    """As much of a transformers model as `export` looks at."""

    from_pretrained = None

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(64, 64)
        self.block = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.block.proj = nn.Linear(64, 64)
        self.attention = nn.MultiheadAttention(64, 2)
        self.head = nn.Linear(64, 2)


@pytest.mark.parametrize("name", marked(["nf4"]))
def test_layers_that_are_not_quantized_are_named_in_the_config(name):
    net = _Named()
    quantize_layers(net, fx.Bnb4(skip="attention"), CPU)
    assert _warned(net) == []
    found = transformers_config(net)["llm_int8_skip_modules"]
    assert found == ["attention.out_proj", "head"]


@pytest.mark.parametrize("name", marked(["nf4"]))
def test_two_formats_in_one_model_are_said_before_writing(name, tmp_path):
    net = _Named()
    quantize_layers(net.block, fx.Bnb8(head=True), CPU)
    made = nn.Sequential(net.proj, nn.Linear(64, 2))
    quantize_layers(made, fx.Bnb4(), CPU)
    net.proj = made[0]
    assert _warned(net) == [
        "export: from_pretrained reads one format, and this model has bitsandbytes int8 "
        "and bitsandbytes nf4; fx.load_model reads these files."
    ]


@pytest.mark.parametrize("name", marked(["fp4"]))
@pytest.mark.parametrize("unpacked", [False, True], ids=["packed", "unpacked"])
def test_scales_that_bitsandbytes_reorders_are_refused(name, unpacked, tmp_path):
    net = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 2))
    quantize_layers(net, RECORDS[name], CPU)
    state = net[0].weight.quant_state
    if unpacked:
        state.absmax = state.absmax.view(64, 2).t().contiguous()
    else:
        state.packing_format_for_cpu = True  # as the library's forward does on some CPUs
    with fx.detect(env={}, device="cpu") as ctx:
        for call in (lambda: fx.wrap(net, ctx), lambda: fx.export(net, tmp_path)):
            with raises_code("FX600", "packed"):
                call()
