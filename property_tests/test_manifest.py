"""Manifests from a stranger: an error of the checkpoint, and nothing else, whatever they say."""

import itertools
import json
import math
import os

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.checkpoint.json_values import decode, encode
from fxtrain.checkpoint.manifest import MANIFEST, covers, load_manifest
from fxtrain.checkpoint.write_plan import held_boxes
from property_tests._manifests import check_refused, file_bytes, framed, mutated, save_small
from tests._errors import raises_code


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


# Boxes


def _counts(shape, boxes):
    """By looking at every cell."""
    cells = [
        cell
        for start, size in boxes
        for cell in itertools.product(*(range(a, a + n) for a, n in zip(start, size, strict=True)))
    ]
    return len(cells) == len(list(itertools.product(*map(range, shape))))


@st.composite
def _boxes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))

    def box():
        start = tuple(draw(st.integers(0, size)) for size in shape)
        return start, tuple(
            draw(st.integers(0, size - at)) for size, at in zip(shape, start, strict=True)
        )

    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):  # cut one, or replace it
        start, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        how = draw(st.sampled_from(["cut", "cut", "cut", "any", "both"]))
        if how != "cut" or not shape:
            boxes += [box()] if how == "any" else [(start, size)]
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[dim]))
        low = tuple(at if i == dim else n for i, n in enumerate(size))
        high = tuple(n - at if i == dim else n for i, n in enumerate(size))
        boxes += [(start, low), (tuple(a + at * (i == dim) for i, a in enumerate(start)), high)]
    return shape, boxes


@settings(max_examples=150)
@given(_boxes())
def test_parts_cover_a_tensor_if_they_have_as_many_cells(drawn):
    shape, boxes = drawn
    assert covers(shape, boxes) == _counts(shape, boxes)


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_stretches_of_a_tensor_are_boxes_that_cover_it(shape, data):
    size = math.prod(shape)
    whole = torch.arange(size).view(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
    parts = []
    for begin, end in itertools.pairwise([0, *cuts, size]):
        values = whole.flatten()[begin:end]
        stretch = fx.state.FlatShard(shape=tuple(shape), start=begin, values=values)
        found = held_boxes(stretch)
        for start, box in found:
            place = tuple(slice(a, a + n) for a, n in zip(start, box.shape, strict=True))
            assert torch.equal(whole[place], box)
        assert len(found) <= max(1, 2 * len(shape) - 1)
        parts += [(start, tuple(box.shape)) for start, box in found]
    assert parts and covers(tuple(shape), parts)


@pytest.mark.parametrize("part", [((1,), (2,)), ((-1,), (2,)), ((0,), (3,)), ((0,), (1,))])
def test_parts_outside_a_tensor_or_too_few_do_not_cover_it(part):
    assert not covers((2,), [part])


# Values

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from([torch.float32, torch.bool, torch.device("cpu"), torch.device("cuda:1")]),
    lambda inside: (
        st.lists(inside)
        | st.lists(inside).map(tuple)
        | st.dictionaries(st.text() | st.just("$"), inside)
        | st.dictionaries(st.integers() | st.booleans() | st.binary(), inside)
        | st.sets(st.integers() | st.text())
    ),
    max_leaves=20,
)


def _same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(
            _same(a, c) and _same(b, d) for (a, b), (c, d) in pairs
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value):
    written = json.loads(json.dumps(encode(value, "extra", {}), allow_nan=False))
    assert _same(decode(written, dict().__getitem__), value)


@given(st.recursive(st.integers(0, 9).map(lambda n: torch.arange(n)), st.lists, max_leaves=6))
def test_tensors_come_back_by_their_names(value):
    tensors = {}
    written = json.loads(json.dumps(encode([value], "extra", tensors)))
    flat = torch.utils._pytree.tree_leaves([value])
    assert len(tensors) == len(flat)
    back = torch.utils._pytree.tree_leaves(decode(written, tensors.__getitem__))
    assert all(one is other for one, other in zip(back, flat, strict=True))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["tensor", "tuple", "dict", "set", "numpy", "float", "bytes", "device"]),
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.dictionaries(
            st.sampled_from(["$", "items", "value", "name", "scalar", "a"]), inside, max_size=4
        )
        | st.fixed_dictionaries({"$": st.sampled_from(["tuple", "dict", "set"]), "items": inside})
        | st.fixed_dictionaries(
            {"$": st.sampled_from(["dtype", "device", "bytes", "float"]), "value": inside}
        )
        | st.fixed_dictionaries(
            {"$": st.just("numpy"), "name": st.sampled_from(["a", "b", "c"]), "scalar": inside}
        )
    ),
    max_leaves=10,
)
HELD = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16)}


@settings(max_examples=200)
@given(JSON)
@example({"$": "dtype", "value": "_dynamo"})
@example({"$": ["tuple"], "items": []})
@example({"$": "tuple", "items": "abc"})
@example({"$": "tuple", "items": [], "more": 1})
def test_any_json_is_a_value_or_an_error(data):
    try:
        decode(data, HELD.__getitem__)
    except fx.CheckpointError:
        return


def test_values_that_are_nested_too_deep():
    data = 0
    for _ in range(300):
        data = [data]
    with raises_code("FX602", "nested"):
        decode(data, HELD.__getitem__)
