"""Manifests from a stranger: an error of the checkpoint, and nothing else, whatever they say."""

import copy
import json
import math
import os
import shutil
import tempfile
import tracemalloc

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import fxtrain as fx
from fxtrain.checkpoint.manifest import MANIFEST, digest_of, load_manifest

HUGE = [2**31, 2**40, 2**62, 2**63 - 1, 2**63, 10**30, -1, -(2**63), 0, 1, 3]
WRONG = [None, True, False, "", "x", 0.5, 1e308, [], {}, [[]], {"$": "tuple", "items": [1]}]
WRONG += ["../../etc/passwd", "/etc/passwd", "rank-00000.safetensors", "a\0b", "..", "é" * 50]
WRONG += [{"$": kind} for kind in ("tensor", "eval", "", "dict", "numpy")]
WRONG += [{"$": "dtype", "value": name} for name in ("onnx", "load", "float32", 3, "_dynamo")]
WRONG += [{"$": "device", "value": name} for name in ("cuda:99", "cpu", -1, "x" * 99)]
WRONG += [{"$": "tensor", "name": name} for name in ("model/module.0.weight", "nowhere", 3, [])]
WRONG += [{"$": "dict", "items": items} for items in ([[[], 1]], [1], {"a": 1}, [[1, 2, 3]])]
WRONG += [{"$": "numpy", "name": "extra.a", "scalar": True}, {"$": "bytes", "value": "?"}]


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def _model(ctx):
    model = fx.wrap(
        _net(),
        ctx,
        fx.Plan(precision=fx.Precision(compute="fp16", scale=fx.LossScale(initial=4.0))),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
        scheduler=lambda made: torch.optim.lr_scheduler.ExponentialLR(made, 0.9),
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.optimizers[0].step()
    return model


def _save(ctx, folder):
    extra = {"a": torch.ones(3), "b": (1, 2.5, float("inf"), b"x"), "c": {1: {2, 3}}, "d": ctx.rank}
    return fx.save(folder, ctx, _model(ctx), extra={**extra, "d": 0}).path


@pytest.fixture(scope="module")
def saved(pair, tmp_path_factory):
    """A checkpoint of two ranks: its folder and what its manifest says."""
    path = pair.run(_save, str(tmp_path_factory.mktemp("saved")))[0]
    with open(os.path.join(path, MANIFEST), "rb") as file:
        return path, json.loads(file.read())["manifest"]


def _framed(body):
    """The bytes of a manifest with a digest that is right."""
    return b'{"digest":"' + digest_of(body).encode() + b'","manifest":' + body + b"}\n"


def _bytes(data):
    return _framed(json.dumps(data).encode())


def _places(data, path=()):
    """The path of everything inside, the whole first."""
    yield path
    if isinstance(data, dict | list):
        for key, one in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _places(one, (*path, key))


def _at(data, path):
    for key in path:
        data = data[key]
    return data


@st.composite
def _mutated(draw, data, top=()):
    """The same with up to three changes to its structure, below `top`."""
    data = copy.deepcopy(data)
    for _ in range(draw(st.integers(1, 3))):
        paths = [one for one in _places(_at(data, top)) if one]
        if not paths:
            break
        path = draw(st.sampled_from(paths))
        holder, key = _at(_at(data, top), path[:-1]), path[-1]
        how = draw(st.sampled_from(["wrong", "huge", "drop", "copy", "deep", "key", "near"]))
        if how == "drop":
            del holder[key]
        elif how == "copy":
            other = draw(st.sampled_from(list(_places(data))[1:]))
            holder[key] = copy.deepcopy(_at(data, other))
        elif how == "deep":
            for _ in range(draw(st.sampled_from([3, 70, 200]))):
                holder[key] = [holder[key]]
        elif how == "key" and isinstance(holder, dict):
            holder[draw(st.sampled_from(["../x", "/etc/passwd", "$", "", "x", "a/b"]))] = (
                holder.pop(key)
            )
        elif how == "near" and type(holder[key]) is int:
            holder[key] += draw(st.sampled_from([-8, -4, -1, 1, 4, 8]))
        else:
            holder[key] = copy.deepcopy(draw(st.sampled_from(HUGE if how == "huge" else WRONG)))
    return data


def _refused(raw):
    """Read a manifest; whether it was refused. Any other exception ends the test."""
    tracemalloc.start()
    try:
        load_manifest(raw)
    except fx.CheckpointError as error:
        assert len(str(error)) < 5_000
        return True
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 100 * len(raw) + 1_000_000
    return False


def test_what_was_written_is_read(saved):
    assert not _refused(_bytes(saved[1]))


@settings(max_examples=300)
@given(data=st.data())
def test_changed_structure_is_refused_or_holds_together(saved, data):
    changed = data.draw(_mutated(saved[1]))
    if _refused(_bytes(changed)):
        return
    manifest = load_manifest(_bytes(changed))
    for entry in manifest.tensors.values():
        for part in entry.parts:
            size = math.prod(part.shape) * entry.itemsize
            assert 0 <= part.offset <= part.offset + size <= manifest.files[part.file].size
    assert all("/" not in name and ".." not in name for name in manifest.files)


@settings(max_examples=300)
@given(data=st.data())
def test_changed_bytes_under_a_right_digest(saved, data):
    body = bytearray(json.dumps(saved[1]).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        how = data.draw(st.sampled_from(["set", "cut", "add", "repeat"]))
        if how == "set":
            body[place] = data.draw(st.integers(0, 255))
        elif how == "cut":
            del body[place : place + data.draw(st.integers(1, 300))]
        elif how == "add":
            body[place:place] = data.draw(
                st.sampled_from([b"9" * 400, b"[" * 500, b'"', b"\0", b"-"])
            )
        else:
            body[place:place] = body[place : place + 200]
    _refused(_framed(bytes(body)))


@given(data=st.data())
def test_changed_bytes_under_the_old_digest(saved, data):
    raw = bytearray(_bytes(saved[1]))
    place = data.draw(st.integers(0, len(raw) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != raw[place]))
    raw[place] = byte
    assert _refused(bytes(raw))


@given(st.binary(max_size=300))
@example(b"")
@example(b"{}")
def test_any_bytes(raw):
    assert _refused(raw)
    _refused(_framed(raw))


def _first(table):
    return next(iter(table.values()))


def _weight(body):
    return body["tensors"]["model/module.0.weight"]


NAMED = {
    "a path that leads out": lambda b: b["files"].update({"../x.safetensors": _first(b["files"])}),
    "an absolute path": lambda b: b["files"].update({"/x.safetensors": _first(b["files"])}),
    "a part in a file of another name": lambda b: _weight(b)["parts"][0].update(file="/etc/passwd"),
    "a negative offset": lambda b: _weight(b)["parts"][0].update(offset=-8),
    "an offset beyond the file": lambda b: _weight(b)["parts"][0].update(offset=1 << 40),
    "an offset in the header": lambda b: _weight(b)["parts"][0].update(offset=8),
    "two parts over each other": lambda b: _weight(b)["parts"].append(_weight(b)["parts"][0]),
    "no parts": lambda b: _weight(b).update(parts=[]),
    "an absurd shape": lambda b: _weight(b).update(shape=[1 << 40, 1 << 40]),
    "too many dimensions": lambda b: _weight(b).update(shape=[1] * 65),
    "an absurd header": lambda b: _first(b["files"]).update(header=1 << 62),
    "a file without its size": lambda b: _first(b["files"]).pop("size"),
    "another format": lambda b: b.update(format=2),
    "a format that equals 1": lambda b: b.update(format=True),
    "a digest too short": lambda b: _weight(b)["parts"][0].update(digests=["00"]),
    "too many digests": lambda b: _weight(b)["parts"][0]["digests"].append("0" * 32),
    "an unknown dtype": lambda b: _weight(b).update(dtype="object"),
    "an alias of nothing": lambda b: b["aliases"].update({"model/a": "model/b"}),
    "an alias of an alias": lambda b: b["aliases"].update({"a": "b", "b": "a"}),
    "no ranks": lambda b: b.update(own=[]),
    "more ranks than saved": lambda b: b["own"].append({}),
    "an infinite metric": lambda b: b.update(metric=float("1e999")),
    "a huge metric": lambda b: b.update(metric=10**400),
    "a position that is none": lambda b: b["position"].update(updates="3"),
    "nested too deep": lambda b: b.update(position=json.loads("[" * 400 + "]" * 400)),
}


@pytest.mark.parametrize("what", NAMED)
def test_known_attacks_are_refused(saved, what):
    body = copy.deepcopy(saved[1])
    NAMED[what](body)
    assert _refused(_bytes(body))


@pytest.mark.parametrize(
    "text, word",
    [
        (b'{"format":1,"format":1}', "twice"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b'{"format":' + b"9" * 5_000 + b"}", "not JSON"),
        (b'{"format":NaN}', "NaN is not a JSON number"),
        (b'{"format":Infinity}', "Infinity is not a JSON number"),
        (b'{"a":"\xff"}', "not JSON"),
        (b"[]", "not a JSON object"),
    ],
)
def test_json_that_is_none(text, word):
    with pytest.raises(fx.CheckpointError, match=word):
        load_manifest(_framed(text))


# Restoring


def _try(ctx, path):
    """What restoring says; an exception of any other kind fails the test."""
    model = _model(ctx)
    before = torch.cuda.is_initialized(), sorted(os.listdir(os.path.dirname(path)))
    try:
        fx.restore(path, ctx, model)
        said = None
    except fx.CheckpointError as error:
        said = str(error)
    assert before == (torch.cuda.is_initialized(), sorted(os.listdir(os.path.dirname(path))))
    return said


def _with(folder, body):
    with open(os.path.join(folder, MANIFEST), "wb") as file:
        file.write(_bytes(body))


@settings(max_examples=40)
@given(data=st.data())
def test_restoring_what_a_stranger_wrote(pair, saved, data):
    top = data.draw(st.sampled_from([("models",), ("extra",), ("own",), ("aliases",), ()]))
    if top == ("aliases",):  # there are none, so give it some
        body = copy.deepcopy(saved[1])
        names = st.sampled_from([*body["tensors"], "model/module.9.weight"])
        body["aliases"] = data.draw(st.dictionaries(names, names, min_size=1, max_size=3))
    else:
        body = data.draw(_mutated(saved[1], top))
    with tempfile.TemporaryDirectory() as above:
        folder = shutil.copytree(saved[0], os.path.join(above, "copy"))
        _with(folder, body)
        said = pair.run(_try, folder)
        assert (said[0] is None) == (said[1] is None)
        if _refused(_bytes(body)):
            assert said[0] is not None


def _one_tensor_many_times(body):
    body["extra"] = [{"$": "tensor", "name": "extra.a"}] * 1000


def _numpys_place(body):
    weight = body["own"][0]["random.numpy"]
    weight["shape"] = weight["parts"][0]["shape"] = [2, 313]  # 626 numbers


def _no_counts(body):
    for rank in body["own"]:
        rank["model/nothing"] = rank.pop("model/counts")


HOSTILE = {
    "numpy": _numpys_place,
    "counts": _no_counts,
    "optimizers": lambda b: b["models"]["model"]["values"].update(optimizers=[3]),
    "groups": lambda b: b["models"]["model"]["values"]["optimizers"][0].update(groups=None),
    "module": lambda b: b["models"]["model"]["values"].update(module={"module.x.y": 1}),
    "values": lambda b: b["models"]["model"].update(values=[]),
    "scheduler": lambda b: b["models"]["model"]["values"].update(schedulers=[7]),
    "extra": lambda b: b.update(extra={"$": "tensor", "name": "model/nowhere"}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_sections_are_an_error_on_every_rank(pair, saved, what, tmp_path):
    body = copy.deepcopy(saved[1])
    HOSTILE[what](body)
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    _with(folder, body)
    said = pair.run(_try, str(folder))
    assert said[0] and said[1]


def _memory(ctx, path):
    found = fx.restore(path, ctx, _model(ctx)).extra
    return len(found), len({one.data_ptr() for one in found})


def test_a_tensor_that_is_named_often_is_read_once(pair, saved, tmp_path):
    body = copy.deepcopy(saved[1])
    _one_tensor_many_times(body)
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    _with(folder, body)
    assert pair.run(_memory, str(folder)) == [(1000, 1)] * 2


@pytest.mark.parametrize("name", [MANIFEST, "rank-00000.safetensors"])
def test_a_link_that_leads_out_is_not_followed(pair, saved, name, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    os.rename(folder / name, tmp_path / "outside")
    os.symlink(tmp_path / "outside", folder / name)
    said = pair.run(_try, str(folder))
    assert said[0] and name in said[0] and said[0] == said[1]
