"""Manifests from a stranger: an error of the checkpoint, and nothing else, whatever they say."""

import json
import math
import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fxtrain.checkpoint.manifest import MANIFEST, load_manifest
from property_tests._manifests import check_refused, file_bytes, framed, mutated, save_small


@pytest.fixture(scope="module")
def saved(pair, tmp_path_factory):
    """A checkpoint of two ranks: its folder and what its manifest says."""
    path = pair.run(save_small, str(tmp_path_factory.mktemp("saved")))[0]
    with open(os.path.join(path, MANIFEST), "rb") as file:
        return path, json.loads(file.read())["manifest"]


def test_what_was_written_is_read(saved):
    assert not check_refused(file_bytes(saved[1]))


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data())
def test_changed_structure_is_refused_or_holds_together(saved, data):
    changed = data.draw(mutated(saved[1]))
    if check_refused(file_bytes(changed)):
        return
    manifest = load_manifest(file_bytes(changed))
    for entry in manifest.tensors.values():
        for part in entry.parts:
            size = math.prod(part.shape) * entry.itemsize
            assert 0 <= part.offset <= part.offset + size <= manifest.files[part.file].size
    assert all("/" not in name and ".." not in name for name in manifest.files)


@settings(max_examples=150)
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
    check_refused(framed(bytes(body)))


@given(data=st.data())
def test_changed_bytes_under_the_old_digest(saved, data):
    raw = bytearray(file_bytes(saved[1]))
    place = data.draw(st.integers(0, len(raw) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != raw[place]))
    raw[place] = byte
    assert check_refused(bytes(raw))


@given(st.binary(max_size=300))
@example(b"")
@example(b"{}")
def test_any_bytes(raw):
    assert check_refused(raw)
    check_refused(framed(raw))
