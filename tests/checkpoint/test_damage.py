"""Damage of every kind: found and named, on every rank, and the last good checkpoint stays."""

import os
import random
import shutil

import pytest
import torch

import fxtrain as fx
from fxtrain.checkpoint.manifest import MANIFEST
from tests._errors import raises_code
from tests.checkpoint import _runs

FIRST, SECOND = "update-0000000001", "update-0000000002"
FILES = ["rank-00000.safetensors", "rank-00001.safetensors"]


def _save_one(ctx, folder):
    model, fns = _runs.start(ctx, "scheduled", _runs.plan_of("scheduled", 2))
    report, _ = _runs.go_on(ctx, _runs.loader_of(ctx, model.plan), fns, 3)
    return fx.save(folder, ctx, model, position=report.position, extra=[torch.ones(3)]).path


@pytest.fixture(scope="module")
def good(pair, tmp_path_factory):
    """A checkpoint of two ranks, in the middle of a window; not to be changed."""
    return pair.run(_save_one, str(tmp_path_factory.mktemp("good")))[0]


@pytest.fixture
def copy(good, tmp_path):
    """One that may be changed."""
    return shutil.copytree(good, tmp_path / "copy")


def _restore(ctx, path):
    model = _runs.start(ctx, "scheduled", _runs.plan_of("scheduled", 2))[0]
    try:
        fx.restore(path, ctx, model)
    except fx.CheckpointError as error:
        return str(error)
    return None


def _told(pair, path):
    """What `restore` says on both ranks, and `verify`."""
    try:
        fx.checkpoint.verify(path)
        found = None
    except fx.CheckpointError as error:
        found = str(error)
    return [*pair.run(_restore, str(path)), found]


def _flip(path, place, bit):
    with open(path, "r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


def test_the_copy_is_good_before_it_is_damaged(pair, copy):
    assert _told(pair, copy) == [None, None, None]


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_flipped_bit_is_found_and_named(pair, copy, name):
    draw = random.Random(name)
    path, size = copy / name, (copy / name).stat().st_size
    for number in range(24):
        place, bit = draw.randrange(size), draw.randrange(8)
        _flip(path, place, bit)
        with pytest.raises(fx.CheckpointError, match=name):
            fx.checkpoint.verify(copy)
        if number % 4 == 0:
            for text in pair.run(_restore, str(copy)):
                assert text is not None, (place, bit)
                assert name in text
        _flip(path, place, bit)
    fx.checkpoint.verify(copy)


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("cut", ["to nothing", "by a byte", "to half", "by the header", "longer"])
def test_a_cut_file_is_found_and_named(pair, copy, name, cut):
    size = (copy / name).stat().st_size
    sizes = {"to nothing": 0, "by a byte": size - 1, "to half": size // 2, "longer": size + 8}
    os.truncate(copy / name, sizes.get(cut, 8))
    for text in _told(pair, copy):
        assert text is not None and name in text


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("what", ["missing", "a folder", "a link", "a pipe"])
def test_a_file_that_is_none_is_found_and_named(pair, copy, name, what, tmp_path):
    os.rename(copy / name, tmp_path / "away")
    if what == "a folder":
        os.mkdir(copy / name)
    elif what == "a link":  # the right bytes, but outside
        os.symlink(tmp_path / "away", copy / name)
    elif what == "a pipe":
        os.mkfifo(copy / name)
    if (what, name) == ("missing", MANIFEST):
        told, name = _told(pair, copy), "No complete checkpoint"
    else:
        told = _told(pair, copy)
    for text in told:
        assert text is not None and name in text


def test_swapped_files_are_found_and_named(pair, copy):
    one, other = (copy / name for name in FILES)
    os.rename(one, copy / "third")
    os.rename(other, one)
    os.rename(copy / "third", other)
    for text in _told(pair, copy):
        assert text is not None and FILES[0] in text


def test_a_file_of_another_checkpoint_is_found_and_named(pair, copy, tmp_path):
    other = pair.run(_save_one, str(tmp_path / "other"))[0]  # of the same sizes
    shutil.copy(os.path.join(other, FILES[1]), copy / FILES[1])
    for text in _told(pair, copy):
        assert text is not None and FILES[1] in text


def test_an_extra_file_is_named_by_verify_and_ignored_by_restore(pair, copy):
    shutil.copy(copy / FILES[0], copy / "rank-00002.safetensors")
    assert pair.run(_restore, str(copy)) == [None, None]
    with raises_code("FX602", "rank-00002.safetensors"):
        fx.checkpoint.verify(copy)


def test_every_damaged_file_is_named_at_once(copy):
    os.remove(copy / FILES[0])
    os.truncate(copy / FILES[1], 99)
    with pytest.raises(fx.CheckpointError) as caught:
        fx.checkpoint.verify(copy)
    assert all(name in str(caught.value) for name in FILES)


@pytest.mark.parametrize("damage", ["no manifest", "bad manifest", "cut file", "link", "file"])
def test_latest_passes_over_what_is_not_whole(good, damage, tmp_path):
    shutil.copytree(good, tmp_path / FIRST)
    there = tmp_path / SECOND
    if damage == "link":
        os.symlink(good, there)
    elif damage == "file":
        there.write_text("")
    else:
        shutil.copytree(good, there)
    if damage == "no manifest":
        os.remove(there / MANIFEST)
    elif damage == "bad manifest":
        _flip(there / MANIFEST, 100, 0)
    elif damage == "cut file":
        os.truncate(there / FILES[0], 999)
    assert fx.latest(tmp_path) == str(tmp_path / FIRST)
    assert fx.checkpoint.verify(tmp_path).path == str(tmp_path / FIRST)
