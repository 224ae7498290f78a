"""Known attacks by manifests: refused, and restoring reads nothing else."""

import copy
import json
import os
import shutil
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.checkpoint.manifest import MANIFEST, load_manifest
from property_tests._manifests import (
    check_refused,
    file_bytes,
    framed,
    mutated,
    save_small,
    small_model,
)
from tests._errors import raises_code


@pytest.fixture(scope="module")
def saved(pair, tmp_path_factory):
    """A checkpoint of two ranks: its folder and what its manifest says."""
    path = pair.run(save_small, str(tmp_path_factory.mktemp("saved")))[0]
    with open(os.path.join(path, MANIFEST), "rb") as file:
        return path, json.loads(file.read())["manifest"]


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
    "too many digests": lambda b: _weight(b)["parts"][0]["digests"].append("0" * 32),
    "an unknown dtype": lambda b: _weight(b).update(dtype="object"),
    "an alias of nothing": lambda b: b["aliases"].update({"model/a": "model/b"}),
    "an alias of an alias": lambda b: b["aliases"].update({"a": "b", "b": "a"}),
    "no ranks": lambda b: b.update(own=[]),
    "more ranks than saved": lambda b: b["own"].append({}),
    "an infinite metric": lambda b: b.update(metric=float("1e999")),
    "a position that is none": lambda b: b["position"].update(updates="3"),
    "nested too deep": lambda b: b.update(position=json.loads("[" * 400 + "]" * 400)),
}


@pytest.mark.parametrize("what", NAMED)
def test_known_attacks_are_refused(saved, what):
    body = copy.deepcopy(saved[1])
    NAMED[what](body)
    assert check_refused(file_bytes(body))


@pytest.mark.parametrize(
    "text, word",
    [
        (b'{"format":1,"format":1}', "twice"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b'{"format":' + b"9" * 5_000 + b"}", "is malformed"),
        (b'{"format":NaN}', "NaN is not a JSON number"),
        (b'{"format":Infinity}', "Infinity is not a JSON number"),
        (b'{"a":"\xff"}', "is malformed"),
        (b"[]", "is malformed"),
    ],
)
def test_json_that_is_none(text, word):
    with raises_code("FX602", word):
        load_manifest(framed(text))


# Restoring


def _try(ctx, path):
    """What restoring says; an exception of any other kind fails the test."""
    model = small_model(ctx)
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
        file.write(file_bytes(body))


@pytest.mark.slow
@settings(max_examples=40)
@given(data=st.data())
def test_restoring_what_a_stranger_wrote(pair, saved, data):
    top = data.draw(st.sampled_from([("models",), ("extra",), ("own",), ("aliases",), ()]))
    if top == ("aliases",):  # there are none, so give it some
        body = copy.deepcopy(saved[1])
        names = st.sampled_from([*body["tensors"], "model/module.9.weight"])
        body["aliases"] = data.draw(st.dictionaries(names, names, min_size=1, max_size=3))
    else:
        body = data.draw(mutated(saved[1], top))
    with tempfile.TemporaryDirectory() as above:
        folder = shutil.copytree(saved[0], os.path.join(above, "copy"))
        _with(folder, body)
        said = pair.run(_try, folder)
        assert (said[0] is None) == (said[1] is None)
        if check_refused(file_bytes(body)):
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
    "plan": lambda b: b["models"]["model"].update(plan=None),
    "a field of the plan": lambda b: b["models"]["model"]["plan"].update(precision=None),
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
    found = fx.restore(path, ctx, small_model(ctx)).extra
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
