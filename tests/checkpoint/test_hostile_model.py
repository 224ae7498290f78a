"""Model files and folders made to mislead: an error before memory is taken."""

import json
import os
import struct

import pytest
import safetensors.torch
import torch
from torch import nn

import fxtrain as fx
from fxtrain.models import load_model
from fxtrain.models.folder import INDEX, MARKER, SINGLE
from tests._errors import raises_code
from tests.checkpoint._exports import Holder, assert_same, loaded, some_state


def _write_header(path, header, body=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + body)


def _one(**changes):
    return {"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | changes}


HOSTILE = {
    "empty": (b"", None),
    "giant header": (b"{}", 10**15),
    "longest header": (b"{}", 2**64 - 1),
    "not JSON": (b"{nope", None),
    "not UTF-8": (b"\xff\xfe", None),
    "a list": ([], None),
    "deep nesting": (b"[" * 200_000, None),
    "a name twice": (b'{"w": {}, "w": {}}', None),
    "no fields": ({"w": {}}, None),
    "a dtype": (_one(dtype="Q4"), None),
    "no dtype": (_one(dtype=["U8"]), None),
    "negative shape": (_one(shape=[-4]), None),
    "a shape of truth": (_one(shape=[True] * 4), None),
    "a shape of text": (_one(shape="4"), None),
    "absurd shape": (_one(shape=[2**62, 2**62]), None),
    "absurd shape of nothing": (_one(shape=[2**62, 0]), None),
    "negative offset": (_one(data_offsets=[-4, 0]), None),
    "backward": (_one(data_offsets=[4, 0]), None),
    "three offsets": (_one(data_offsets=[0, 4, 4]), None),
    "behind the end": (_one(data_offsets=[100, 104]), None),
    "too long": (_one(shape=[5], data_offsets=[0, 5]), None),
    "too short": (_one(shape=[3], data_offsets=[0, 3]), None),
    "overlap": (_one() | {"v": _one()["w"]}, None),
    "metadata": (_one() | {"__metadata__": {"a": 1}}, None),
    "metadata list": (_one() | {"__metadata__": []}, None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_an_error(tmp_path, name):
    header, length = HOSTILE[name]
    path = tmp_path / SINGLE
    if name == "empty":
        path.write_bytes(b"")
    else:
        _write_header(path, header, b"\1\2\3\4", length)
    with raises_code("FX602", "model.safetensors"):
        load_model(path, Holder({"w": torch.zeros(4, dtype=torch.uint8)}))


def test_the_same_header_without_the_fault_is_read(tmp_path):
    _write_header(tmp_path / SINGLE, _one(), b"\1\2\3\4")
    holder = Holder({"w": torch.zeros(4, dtype=torch.uint8)})
    load_model(tmp_path, holder)
    assert holder.w.tolist() == [1, 2, 3, 4]


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / SINGLE)
    with raises_code("FX600", SINGLE):
        load_model(tmp_path / SINGLE, nn.Linear(1, 1))


def _index(folder, places):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize(
    "name",
    ["../out.safetensors", "/etc/out.safetensors", "a/../../out.safetensors", "..", "", ".",
     "C:\\out.safetensors", "..\\out.safetensors", "link.safetensors", "linked/out.safetensors"],
)  # fmt: skip
def test_an_index_names_files_inside_its_folder_only(tmp_path, name):
    safetensors.torch.save_file(some_state(count=1), tmp_path / "out.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link.safetensors").symlink_to(tmp_path / "out.safetensors")
    (folder / "linked").symlink_to(tmp_path)
    _index(folder, {"w0": name})
    with raises_code("FX600", "outside the folder"):
        load_model(folder, Holder(some_state(count=1)))
    (folder / SINGLE).symlink_to(tmp_path / "out.safetensors")
    (folder / INDEX).unlink()
    with raises_code("FX600", "outside the folder"):
        load_model(folder, Holder(some_state(count=1)))


def test_the_cache_of_a_hub_is_read_through_its_links(tmp_path):
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    safetensors.torch.save_file(some_state(), blobs / "0f1e")
    (snapshot / "a.safetensors").symlink_to("../../blobs/0f1e")
    _index(snapshot, dict.fromkeys(some_state(), "a.safetensors"))
    assert_same(loaded(snapshot, some_state()), some_state())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "not an object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"w0": 3}}', "no weight_map"),
        ('{"weight_map": {"w0": "a", "w0": "b"}}', "appears twice"),
        ('{"weight_map": {"w0": "absent.safetensors"}}', "absent.safetensors' does not exist"),
        ('{"weight_map": {"w7": "a.safetensors"}}', "the index lists 'w7'"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, text, words):
    safetensors.torch.save_file(some_state(), tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(fx.CheckpointError, match=words):
        load_model(tmp_path, Holder(some_state()))


def test_only_what_the_index_lists_is_read(tmp_path):
    safetensors.torch.save_file(some_state(), tmp_path / "a.safetensors")
    _index(tmp_path, {"w0": "a.safetensors"})
    with raises_code("FX603", "4 missing"):
        load_model(tmp_path, Holder(some_state()))


def test_two_models_in_one_folder_are_told_apart(tmp_path):
    safetensors.torch.save_file(some_state(1), tmp_path / "a.safetensors")
    _index(tmp_path, dict.fromkeys(some_state(), "a.safetensors"))
    safetensors.torch.save_file(some_state(2), tmp_path / SINGLE)
    with raises_code("FX600", SINGLE, INDEX):
        load_model(tmp_path, Holder(some_state()))
    assert_same(loaded(tmp_path / SINGLE, some_state()), some_state(2))
    assert_same(loaded(tmp_path / INDEX, some_state()), some_state(1))
    (tmp_path / MARKER).write_text("")  # an export was interrupted here
    assert_same(loaded(tmp_path, some_state()), some_state(2))


def test_a_folder_without_a_model_says_what_it_holds(tmp_path):
    state = {"weight": torch.ones(1, 1), "bias": torch.ones(1)}
    safetensors.torch.save_file(state, tmp_path / "weights.safetensors")
    net = nn.Linear(1, 1)
    load_model(tmp_path, net)
    assert net.bias == 1
    (tmp_path / "more.safetensors").write_text("")
    with raises_code("FX601", "more.safetensors"):
        load_model(tmp_path, nn.Linear(1, 1))
