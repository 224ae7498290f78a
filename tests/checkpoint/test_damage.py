"""Damage of every kind: found and named, on every rank, and the last good checkpoint stays."""

import errno
import json
import os
import random
import resource
import shutil
import subprocess
import tempfile
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.checkpoint import _place, _staging
from fxtrain.checkpoint._manifest import MANIFEST
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
        fx.verify(path)
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
            fx.verify(copy)
        if number % 4 == 0:
            for text in pair.run(_restore, str(copy)):
                assert text is not None, (place, bit)
                assert name in text
        _flip(path, place, bit)
    fx.verify(copy)


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
        told, name = _told(pair, copy), "no whole checkpoint"
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
    with pytest.raises(fx.CheckpointError, match=r"rank-00002\.safetensors does not belong"):
        fx.verify(copy)


def test_every_damaged_file_is_named_at_once(copy):
    os.remove(copy / FILES[0])
    os.truncate(copy / FILES[1], 99)
    with pytest.raises(fx.CheckpointError) as caught:
        fx.verify(copy)
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
    assert fx.verify(tmp_path).path == str(tmp_path / FIRST)


# Saving where it cannot be done


@contextmanager
def _no_room():
    """The operating system refuses files of more than 4 KiB, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def _full():
    """Writing the second block fails as on a full disk."""
    kept = _place._Whole.write

    def write(self, data):
        if self.file.tell():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        kept(self, data)

    _place._Whole.write = write
    try:
        yield
    finally:
        _place._Whole.write = kept


@contextmanager
def _no_sync():
    """The disk fails when the bytes are to be made durable."""
    kept = os.fsync

    def fail(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    os.fsync = fail
    try:
        yield
    finally:
        os.fsync = kept


@contextmanager
def _no_memory():
    """There is no room for the copy of a save in the background."""
    kept = _staging._buffer

    def fail(ctx, size):
        raise MemoryError(f"no {size} bytes")

    _staging._buffer = fail
    try:
        yield
    finally:
        _staging._buffer = kept


OBSTACLES = {"limit": _no_room, "full": _full, "sync": _no_sync, "memory": _no_memory}


def _small(ctx):
    return fx.wrap(nn.Linear(64, 64), ctx)


def _hindered(ctx, folder, obstacle, rank, background):
    """Save twice, with an obstacle the second time on one rank; then a third time."""
    model = _small(ctx)
    fx.save(folder, ctx, model, position=fx.Position(updates=1))
    saving, text = None, None
    try:
        if ctx.rank == rank:
            with OBSTACLES[obstacle]():
                saving = fx.save(
                    folder, ctx, model, position=fx.Position(updates=2), background=background
                )
                saving.result()
        else:
            fx.save(
                folder, ctx, model, position=fx.Position(updates=2), background=background
            ).result()
    except fx.CheckpointError as error:
        text = str(error)
    ctx.comm.ledger.tasks.clear()  # its error was seen
    left = sorted(os.listdir(folder))
    fx.ops.barrier(ctx)
    fx.save(folder, ctx, model, position=fx.Position(updates=3))
    return text, left


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "obstacle, word",
    [("limit", "File too large"), ("full", "No space left"), ("sync", "Input/output error")],
)
def test_a_disk_that_fails_on_one_rank(pair, obstacle, word, rank, background, tmp_path):
    found = pair.run(_hindered, str(tmp_path), obstacle, rank, background)
    for text, left in found:
        assert text is not None and f"rank {rank}: OSError" in text and word in text
        assert left == [FIRST]
    assert fx.verify(tmp_path).position.updates == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_no_memory_for_the_copy_on_one_rank(pair, rank, tmp_path):
    for text, left in pair.run(_hindered, str(tmp_path), "memory", rank, True):
        assert text is not None and f"rank {rank}: MemoryError" in text
        assert left == [FIRST]
    assert fx.verify(tmp_path).position.updates == 3


@pytest.fixture
def tiny_disk():
    """A file system of 256 KiB."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True
        )
        if mounted.returncode:
            pytest.skip("mounting a small file system needs root")
        try:
            yield folder
        finally:
            subprocess.run(["umount", folder], check=True)


def _fill_up(ctx, folder):
    model = fx.wrap(nn.Linear(192, 192), ctx)  # 148 kB, and 30 kB of generators
    texts = []
    for update in (1, 2, 3):
        try:
            fx.save(folder, ctx, model, position=fx.Position(updates=update))
            texts.append(None)
        except fx.CheckpointError as error:
            texts.append(str(error))
    return texts


def test_a_disk_that_is_full(pair, tiny_disk):
    for texts in pair.run(_fill_up, tiny_disk):
        assert texts[0] is None
        assert "No space left on device" in texts[1] and "No space left on device" in texts[2]
    assert os.listdir(tiny_disk) == [FIRST]
    assert fx.latest(tiny_disk) == os.path.join(tiny_disk, FIRST)
    fx.verify(tiny_disk)


def _as_nobody(ctx, folder):
    model = _small(ctx)
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)  # root may write anywhere
    try:
        fx.save(folder, ctx, model, position=fx.Position(updates=2))
    except fx.CheckpointError as error:
        return str(error)
    finally:
        if was == 0:
            os.seteuid(0)
    return None


def _plainly(ctx, folder):
    fx.save(folder, ctx, _small(ctx), position=fx.Position(updates=1))


def test_a_folder_that_is_read_only(pair):
    with tempfile.TemporaryDirectory() as outside:
        os.chmod(outside, 0o755)
        folder = os.path.join(outside, "run")
        pair.run(_plainly, folder)
        os.chmod(folder, 0o555)
        for text in pair.run(_as_nobody, folder):
            assert text is not None and "PermissionError" in text
        os.chmod(folder, 0o755)
        assert os.listdir(folder) == [FIRST]
        fx.verify(folder)


# A rank that dies


def _die(ctx, folder, rank, where, background):
    model = _small(ctx)
    fx.save(folder, ctx, model, position=fx.Position(updates=1))
    if where == "first" and ctx.rank == rank:
        os._exit(9)
    if ctx.rank == rank:
        kept = _place._Whole.write

        def write(self, data):
            if where == "before":
                os._exit(9)
            kept(self, data)
            if where == "manifest" and not self.file.name.endswith(MANIFEST):
                return
            os._exit(9)

        _place._Whole.write = write
    saving = fx.save(folder, ctx, model, position=fx.Position(updates=2), background=background)
    saving.result()


# `python -m benchmarks.faults` kills at 200 moments; each costs the start of new processes.
@pytest.mark.parametrize(
    "rank, where, background", [(0, "manifest", False), (1, "file", True), (1, "before", True)]
)
def test_a_rank_that_dies_while_it_writes(pair, rank, where, background, tmp_path):
    found = pair.outcomes(_die, str(tmp_path), rank, where, background)
    assert isinstance(found[1 - rank], fx.CheckpointError)
    assert fx.latest(tmp_path) == str(tmp_path / FIRST)
    fx.verify(tmp_path)
    # What it left is no checkpoint, and the next save removes it.
    with fx.detect(env={}, device="cpu") as ctx:
        _plainly(ctx, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [f"{FIRST}.1"]
    fx.verify(tmp_path)


def test_one_of_four_ranks_is_gone_before_a_save(clusters, tmp_path):
    found = clusters[4].outcomes(_die, str(tmp_path), 2, "first", False)
    assert all(isinstance(found[rank], fx.CheckpointError) for rank in (0, 1, 3))
    assert fx.verify(tmp_path).path == str(tmp_path / FIRST)


def test_the_header_must_be_that_of_the_manifest(copy):
    """Other tools read the header: it may not say something else, whoever wrote it."""
    from fxtrain.checkpoint._manifest import digest_of

    raw = (copy / FILES[0]).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + size])
    name = max(table, key=lambda key: table[key]["data_offsets"])
    table[name]["data_offsets"][1] -= 4
    header = json.dumps(table, separators=(",", ":")).encode()
    assert len(header) <= size
    header = raw[:8] + header.ljust(size)
    (copy / FILES[0]).write_bytes(header + raw[8 + size :])
    body = json.loads((copy / MANIFEST).read_bytes())["manifest"]
    body["files"][FILES[0]]["digest"] = digest_of(header)
    text = json.dumps(body, separators=(",", ":")).encode()
    (copy / MANIFEST).write_bytes(
        b'{"digest":"' + digest_of(text).encode() + b'","manifest":' + text + b"}\n"
    )
    with pytest.raises(fx.CheckpointError, match="is not where the header of rank-00000"):
        fx.verify(copy)
