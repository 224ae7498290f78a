"""Files of quantised models, damaged at random: loaded and usable, or refused by name."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxtrain as fx
from fxtrain.precision.quantizing import quantize_layers
from tests._damage import damaged, misshapen

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


@pytest.mark.parametrize("name", RECORDS)
@given(data=st.data())
def test_a_damaged_quantised_file_is_loaded_or_refused(folder, files, name, data):
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
