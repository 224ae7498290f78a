"""Model files and checkpoints, damaged at random: read, or refused by name, and quickly."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxtrain as fx
from fxtrain.big.memory_estimates import read_weights
from fxtrain.precision.quantizing import quantize_layers
from tests._damage import (
    damaged,
    damaged_inside,
    misshapen,
    only,
    replaced,
    small_net,
)
from tests._slow import slow_after

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable"),
    # torch says so of pickles that it did not write.
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
]


def _bytes(data, path, **how):
    torch.save(data, path, **how)
    return path.read_bytes()


# Models


@pytest.fixture(scope="module")
def models(folder):
    """The bytes of one model in every form."""
    state = small_net().state_dict()
    fx.export(state, folder / "whole")
    fx.export(state, folder / "split", max_shard=60)
    return {
        ".safetensors": (folder / "whole" / "model.safetensors").read_bytes(),
        ".pt": _bytes(state, folder / "m.pt"),
        ".bin": _bytes(state, folder / "m.bin", _use_new_zipfile_serialization=False),
    }


def _load(path):
    return only(fx.CheckpointError, fx.load_model, path, small_net())


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin"])
@given(data=st.data())
def test_a_damaged_model_is_loaded_or_refused(folder, models, suffix, data):
    path = folder / f"damaged{suffix}"
    path.write_bytes(data.draw(damaged(models[suffix])))
    _load(path)


@given(data=st.data())
def test_a_damaged_pickle_of_a_model_is_loaded_or_refused(folder, models, data):
    path = folder / "inside.pt"
    path.write_bytes(data.draw(damaged_inside(models[".pt"])))
    _load(path)


@given(data=st.data())
def test_a_damaged_header_is_loaded_or_refused(folder, models, data):
    """The length fits, so that the header itself is looked at."""
    raw = models[".safetensors"]
    end = 8 + int.from_bytes(raw[:8], "little")
    header = data.draw(damaged(raw[8:end]))
    path = folder / "header.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])
    _load(path)
    only((fx.PlanError, fx.CheckpointError), read_weights, str(path))


@pytest.mark.parametrize("how", [damaged, misshapen])
@given(data=st.data())
def test_a_damaged_index_is_loaded_or_refused(folder, models, how, data):
    path = folder / "split" / "damaged.safetensors.index.json"
    raw = (folder / "split" / "model.safetensors.index.json").read_bytes()
    if how is damaged:
        path.write_bytes(data.draw(damaged(raw)))
    else:
        path.write_text(json.dumps(data.draw(misshapen(json.loads(raw))), default=str))
    _load(path)
    only((fx.PlanError, fx.CheckpointError), read_weights, str(path))


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4,
    "hidden_size": 64, "text_config": {"num_key_value_heads": 2, "head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("how", [damaged, misshapen])
@given(data=st.data())
def test_a_damaged_config_of_a_model_is_read_or_refused(folder, models, how, data):
    path = folder / "whole" / "config.json"
    if how is damaged:
        path.write_bytes(data.draw(damaged(json.dumps(CONFIG).encode())))
    else:
        path.write_text(json.dumps(data.draw(misshapen(CONFIG)), default=str))
    only((fx.PlanError, fx.CheckpointError), read_weights, str(folder / "whole"))


# Checkpoints of fxtrain


@pytest.fixture(scope="module")
def saved(folder):
    """A checkpoint of one rank."""
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(small_net(), ctx, optimizer=torch.optim.AdamW)
        return Path(fx.save(folder / "saved", ctx, model, extra={"a": torch.ones(3)}).path)


def _restore(path):
    with fx.detect(env={}, device="cpu") as ctx:
        fx.restore(path, ctx, fx.wrap(small_net(), ctx, optimizer=torch.optim.AdamW))


@given(data=st.data())
def test_a_damaged_data_file_is_found(saved, data):
    path = next(saved.glob("*.safetensors"))
    whole = path.read_bytes()
    changed = data.draw(damaged(whole))
    with replaced(path, lambda _: changed):
        assert only(fx.CheckpointError, fx.checkpoint.verify, saved) == (changed == whole)
        assert only(fx.CheckpointError, _restore, saved) or changed != whole


RECORDS = {
    "bnb4": (fx.Bnb4(), "bitsandbytes"),
    "bnb8": (fx.Bnb8(), "bitsandbytes"),
    "int8": (fx.Torchao(), "torchao"),
    "int4": (fx.Torchao(weights="int4"), "torchao"),
    "float8": (fx.Torchao(weights="float8"), "torchao"),
}
TEXTS = [
    "[" * 100_000 + "]" * 100_000, '{"a":' * 5_000, "[]", "5", "null", "", "{}", '{"_type": []}',
]  # fmt: skip
SUMMARY = "quant_state"


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 2)).eval()


@pytest.fixture(scope="module")
def files(folder):
    """(header, body) of a file of each format."""
    made = {}
    for name, (record, package) in RECORDS.items():
        pytest.importorskip(package)
        net = _net()
        quantize_layers(net, record, torch.device("cpu"))
        fx.export(net, folder / name)
        raw = next((folder / name).glob("*.safetensors")).read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        made[name] = json.loads(raw[8:end]), raw[end:]
    return made


def _put(header, body, name, text):
    """Replace the bytes of one tensor, and move all others."""
    entry = header[name]
    start, end = entry["data_offsets"]
    for key, other in header.items():
        if key != "__metadata__" and other["data_offsets"][0] >= end:
            other["data_offsets"] = [
                one + len(text) - (end - start) for one in other["data_offsets"]
            ]
    entry |= {"data_offsets": [start, start + len(text)], "shape": [len(text)]}
    return body[:start] + text + body[end:]


@st.composite
def _changed_text(draw, text):
    how = draw(st.sampled_from(["bytes", "values", "text"]))
    if how == "text":
        return draw(st.sampled_from(TEXTS))
    if how == "bytes":
        return draw(damaged(text.encode())).decode(errors="replace")
    return json.dumps(draw(misshapen(json.loads(text))), default=str)


@st.composite
def _changed(draw, header, body):
    """A file in which a description, or the shape of a tensor, is another one."""
    header = json.loads(json.dumps(header))
    metadata = header["__metadata__"]
    tensors = [name for name in header if name != "__metadata__"]
    texts = [name for name in metadata if name != "format"] + [n for n in tensors if SUMMARY in n]
    name = draw(st.sampled_from(texts + tensors))
    if name in metadata:
        metadata[name] = draw(_changed_text(metadata[name]))
    elif SUMMARY in name:
        start, end = header[name]["data_offsets"]
        text = draw(_changed_text(body[start:end].decode()))
        body = _put(header, body, name, text.encode(errors="replace"))
    else:
        shape = header[name]["shape"]
        header[name]["shape"] = draw(st.sampled_from([[1, *shape], [*shape, 1], shape[::-1]]))
    return header, body, name


@pytest.mark.parametrize("name", slow_after(2, RECORDS))
@given(data=st.data())
def test_a_damaged_quantized_file_is_loaded_or_refused(folder, files, name, data):
    header, body, changed = data.draw(_changed(*files[name]))
    path = folder / f"{name}.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    net = _net()
    try:
        fx.load_model(path, net)
    except fx.CheckpointError as error:
        assert path.name in str(error) or changed in str(error)
        assert all(one.isprintable() or one in "\n\t" for one in str(error))
        assert len(str(error)) < 6_000
        assert all(type(part) is nn.Linear for part in net)
    else:
        with torch.no_grad():
            assert net(torch.ones(2, 128)).shape == (2, 2)
