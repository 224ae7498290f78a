"""`fxtrain estimate-memory`: what is read of a model, and the arithmetic."""

import importlib
import importlib.machinery
import importlib.util
import json
import struct
import sys
import types

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fxtrain as fx
from fxtrain.big.memory_estimates import (
    BYTES,
    OPTIMIZERS,
    SHARDING,
    inference,
    measure_weights,
    read_weights,
    training,
)
from fxtrain.cli import Exit, main
from fxtrain.cli.memory_commands import ESTIMATE
from fxtrain.models.code_models import KvCache
from tests._errors import raises_code

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight  # shared: counted once
        self.norm = nn.BatchNorm1d(4)
        self.layers[0].requires_grad_(False)


@pytest.fixture
def factory(monkeypatch, process_state):
    """`mymodels:Net`, and others beside it."""
    module = types.ModuleType("mymodels")
    module.Net, module.number, module.bad = Net, lambda: 3, lambda: 1 / 0
    monkeypatch.setitem(sys.modules, "mymodels", module)
    return "mymodels:Net"


def test_a_factory_is_built_without_values(factory):
    weights = read_weights(factory)
    about = measure_weights(weights)
    own = Net()
    parameters = sum(p.numel() for p in own.parameters())
    buffers = sum(b.numel() for b in own.buffers())
    assert about["parameters"] == parameters + buffers
    assert about["trained"] == parameters - 20  # the first layer is frozen
    assert about["largest_layer"] == {"name": "embed", "parameters": 40, "bytes": 160}


def test_headers_and_code_agree(factory, tmp_path):
    tensors = {name: tensor.clone() for name, tensor in Net().state_dict().items()}
    tensors.pop("head.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    stored = {(t.name, t.numel, t.nbytes) for t in read_weights(str(tmp_path)).tensors}
    built = {(t.name, t.numel, t.nbytes) for t in read_weights(factory).tensors}
    assert stored == built


def test_an_index_leads_to_all_its_files(tmp_path):
    save_file({"a.weight": torch.zeros(3)}, tmp_path / "one.safetensors")
    save_file({"b.weight": torch.zeros(5, dtype=torch.bfloat16)}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    listed = {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}
    index.write_text(json.dumps({"weight_map": listed}))
    for source in (tmp_path, index):
        assert measure_weights(read_weights(str(source)))["stored_bytes"] == 12 + 10


def test_tensors_are_not_read(tmp_path):
    """A file with a header for 8 TiB and holes for the rest."""
    size = 2**43
    about = {"x": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    header = json.dumps(about).encode()
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    assert measure_weights(read_weights(str(path)))["stored_bytes"] == size


HEADERS = [
    b"", b"\x01", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 4) + b"nope",
    struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"a": 1 }',
    struct.pack("<Q", 58) + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}   ',
]  # fmt: skip


@pytest.mark.parametrize("content", HEADERS, ids=range(len(HEADERS)))
def test_a_damaged_file_is_an_error(content, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with raises_code("FX602"):
        read_weights(str(path))


def test_an_index_without_its_file_is_an_error(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with raises_code("FX600", "gone"):
        read_weights(str(tmp_path))
    index.write_text("{}")
    with raises_code("FX600", "weight_map"):
        read_weights(str(tmp_path))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("mymodels:Nett", "Did you mean 'Net'"),
        ("mymodels:number", "returned a int"),
        ("mymodels:bad", "mymodels:bad failed: ZeroDivisionError"),
        ("no_such_module:x", "No module named"),
        ("./nowhere", "no such file or folder"),
        ("nowhere.safetensors", "no such file or folder"),
        (".", "contains no .safetensors file"),
    ],
)
def test_what_is_no_model_is_an_error(source, says, factory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fx.PlanError, match=says):
        read_weights(source)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_config_that_is_none_is_an_error(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with raises_code("FX200", "config.json"):
        read_weights(str(tmp_path))


def test_training_bytes_by_hand(factory):
    weights = read_weights(factory)
    trained, everything = 40 + 40 + 8, 40 + 60 + 8 + 8  # with running mean and variance
    plain = training(weights, optimizer="adamw", precision="fp32")
    assert plain == {
        "parameters": 4 * everything,
        "gradients": 4 * trained,
        "optimizer": 8 * trained,
        "working": 0,
        "buffers": 8,  # one counter in int64
    }
    half = training(weights, precision="bf16")
    assert half["working"] == 2 * everything
    assert sum(half.values()) == sum(plain.values()) + half["working"]


def test_training_in_half_precision_by_hand(monkeypatch):
    module = types.ModuleType("mymodels")
    module.Half = lambda: Net().bfloat16()
    monkeypatch.setitem(sys.modules, "mymodels", module)
    trained, rest = 40 + 40 + 8, 20 + 8
    raised = training(read_weights("mymodels:Half"))
    assert (raised["parameters"], raised["gradients"]) == (4 * trained + 2 * rest, 4 * trained)
    precision = fx.Precision(compute="bf16", params="keep")
    choices = {"precision": "bf16", "optimizer": "adamw", "sharding": "none", "ranks": 1}
    kept = training(read_weights("mymodels:Half", fx.Plan(precision=precision)), **choices)
    assert (kept["parameters"], kept["gradients"]) == (2 * (trained + rest), 2 * trained)
    assert kept["optimizer"] == raised["optimizer"] / 2


def test_sharding_splits_more_and_more(factory):
    weights = read_weights(factory)
    whole = training(weights, precision="fp32")
    kinds = ["none", "optimizer", "gradients", "parameters"]
    split = [training(weights, precision="fp32", sharding=kind, ranks=4) for kind in kinds]
    assert split[0] == whole
    assert split[1] == whole | {"optimizer": whole["optimizer"] / 4}
    assert split[2] == split[1] | {"gradients": whole["gradients"] / 4}
    assert split[3]["parameters"] == whole["parameters"] / 4
    assert split[3]["working"] == 2 * 40 * 4  # the largest layer, and the next beside it
    alone = training(weights, precision="fp32", sharding="parameters", ranks=1)
    assert alone == whole


def test_inference_by_hand(tmp_path):
    save_file(
        {"a": torch.zeros(10), "b": torch.zeros(6, dtype=torch.int8)}, tmp_path / "m.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    weights = read_weights(str(tmp_path))
    assert weights.cache == KvCache(layers=3, heads=2, head_dim=8)
    held, cache = inference(weights, precision="bf16", batch=2, tokens=100)
    assert held == 10 * 2 + 6
    assert cache == 2 * 3 * 2 * 8 * 2 * 200
    assert inference(weights, precision="int4", tokens=1)[0] == 10 / 2 + 6


def test_a_timm_model_is_made_without_weights(monkeypatch):
    """timm's three functions, recorded: it is not among the packages of the tests."""
    made = []
    timm = types.ModuleType("timm")
    timm.is_model = lambda name: name == "net"
    timm.list_models = lambda: ["net", "other"]
    timm.create_model = lambda name, *, pretrained: made.append((name, pretrained)) or Net()
    timm.__spec__ = importlib.machinery.ModuleSpec("timm", None)
    monkeypatch.setitem(sys.modules, "timm", timm)
    assert measure_weights(read_weights("net"))["parameters"] > 0
    assert set(made) == {("net", False)}
    with raises_code("FX200", "net?"):
        read_weights("nett")


def test_headers_on_the_hub_are_fetched_where_that_was_asked(tmp_path, monkeypatch, capsys):
    """The hub's two functions, recorded, with the records that it gives."""
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    records = importlib.import_module("huggingface_hub.utils")
    info = records.TensorInfo(dtype="BF16", shape=[3, 4], data_offsets=(8, 32))
    file = records.SafetensorsFileMetadata(metadata={}, tensors={"a.weight": info})
    repo = records.SafetensorsRepoMetadata(
        metadata=None, sharded=False, weight_map={}, files_metadata={"model.safetensors": file}
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    fetched = []
    monkeypatch.setattr(hub, "get_safetensors_metadata", lambda name: fetched.append(name) or repo)
    monkeypatch.setattr(hub, "hf_hub_download", lambda *words: fetched.append(words) or str(path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # put back after the test
    words = ["estimate-memory", "me/mine", "--json"]
    assert main(words) == Exit.WRONG
    assert "--download` fetches its headers" in capsys.readouterr().err and fetched == []
    assert main([*words, "--download", "--tokens", "1"]) == Exit.WELL
    told = json.loads(capsys.readouterr().out)
    assert fetched == ["me/mine", ("me/mine", "config.json")]
    assert (told["parameters"], told["stored_bytes"]) == (12, 24)
    assert told["inference_bytes"]["cache"] == 2 * 3 * 2 * 8 * 2

    def unreachable(name):
        raise ConnectionError("offline")

    monkeypatch.setattr(hub, "get_safetensors_metadata", unreachable)
    assert main([*words, "--download"]) == Exit.WRONG
    assert "me/mine could not be fetched from the hub: offline" in capsys.readouterr().err


def test_a_model_that_is_not_here_says_how_to_get_or_give_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("bert-base-cased", "google-bert/bert-base-cased"):
        with pytest.raises(fx.PlanError) as caught:
            read_weights(name)
        told = str(caught.value)
        assert told.startswith(
            f"{name}: no such file or folder. For a model on the Hugging Face hub"
        )
        assert f"`fxtrain estimate-memory {name} --download`" in told
        assert all(way in told for way in ("config.json", ".safetensors", "MODULE:FUNCTION"))
        assert ("fxtrain[models]" in told) == ("/" not in name)


def test_a_config_of_transformers(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    weights = read_weights(str(tmp_path))
    about = measure_weights(weights)
    layer = 64 * 64 * 2 + 64 * 16 * 2 + 3 * 64 * 128 + 2 * 64
    assert about["largest_layer"]["parameters"] == layer
    assert about["trained"] == 3 * layer + 2 * 100 * 64 + 64
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with raises_code("FX200", "transformers"):
        read_weights(str(tmp_path / "config.json"))


def test_the_command_reports(factory, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # put back after the test
    words = ["estimate-memory", factory, "--sharding", "parameters", "--ranks", "4"]
    assert main([*words, "--json"]) == Exit.WELL
    told = json.loads(capsys.readouterr().out)
    sizes = training(read_weights(factory), sharding="parameters", ranks=4)
    assert told["training_bytes"]["total"] == round(sum(sizes.values()))
    assert told["largest_layer"]["name"] == "embed"
    assert told["inference_bytes"]["cache"] is None
    assert main(words) == Exit.WELL
    said = capsys.readouterr().out
    assert "total, without activations" in said and "unknown shape" in said
    assert main(["estimate-memory", "./nowhere"]) == Exit.WRONG


def test_the_command_offers_what_estimates_know():
    """Its choices are written out, so that --help does not import torch."""
    options = {option.name: option.type for option in ESTIMATE.params}
    assert list(options["optimizer"].choices) == list(OPTIMIZERS)
    assert list(options["sharding"].choices) == list(SHARDING)
    assert list(options["precision"].choices) == list(BYTES)


def test_several_precisions_are_one_table(factory, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # put back after the test
    words = ["estimate-memory", factory, "--precision", "fp32", "--precision", "int8"]
    assert main([*words, "--json"]) == Exit.WELL
    full, small = json.loads(capsys.readouterr().out)
    assert full["inference_precision"] == "fp32" and small["inference_precision"] == "int8"
    assert small["inference_bytes"]["weights"] < full["inference_bytes"]["weights"]
    assert main(words) == Exit.WELL
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["inference,", "one", "device", "fp32", "int8"] in lines
    assert ["training,", "each", "rank", "fp32", "bf16"] in lines  # int8 weights are for inference
    more = ["bf16", "int8", "int4"]
    words = ["estimate-memory", factory, *(word for name in more for word in ("--precision", name))]
    assert main(words) == Exit.WELL
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["inference,", "one", "device", *more] in lines
    assert ["training,", "each", "rank", "bf16"] in lines
