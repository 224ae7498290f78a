"""Saving where it cannot be done, and ranks that die: all hear of it, and what was saved stays."""

import errno
import os
import resource
import tempfile
from contextlib import contextmanager

import pytest
from torch import nn

import fxtrain as fx
from fxtrain.checkpoint import background as background_saves
from fxtrain.checkpoint.manifest import MANIFEST
from fxtrain.checkpoint.storage import LocalStorage
from tests._slow import slow_after

FIRST = "update-0000000001"

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
    kept = LocalStorage.create

    @contextmanager
    def create(self, name):
        with kept(self, name) as write:
            blocks = []

            def write_one(data):
                if blocks:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                blocks.append(data)
                write(data)

            yield write_one

    LocalStorage.create = create
    try:
        yield
    finally:
        LocalStorage.create = kept


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
    kept = background_saves._buffer

    def fail(ctx, size):
        raise MemoryError(f"no {size} bytes")

    background_saves._buffer = fail
    try:
        yield
    finally:
        background_saves._buffer = kept


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
    assert fx.checkpoint.verify(tmp_path).position.updates == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_no_memory_for_the_copy_on_one_rank(pair, rank, tmp_path):
    for text, left in pair.run(_hindered, str(tmp_path), "memory", rank, True):
        assert text is not None and f"rank {rank}: MemoryError" in text
        assert left == [FIRST]
    assert fx.checkpoint.verify(tmp_path).position.updates == 3


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
        fx.checkpoint.verify(folder)


# A rank that dies


def _die(ctx, folder, rank, where, background):
    model = _small(ctx)
    fx.save(folder, ctx, model, position=fx.Position(updates=1))
    if where == "first" and ctx.rank == rank:
        os._exit(9)
    if ctx.rank == rank:
        kept = LocalStorage.create

        @contextmanager
        def create(self, name):
            with kept(self, name) as write:

                def write_and_die(data):
                    if where == "before":
                        os._exit(9)
                    write(data)
                    if where != "manifest" or name == MANIFEST:
                        os._exit(9)

                yield write_and_die

        LocalStorage.create = create
    saving = fx.save(folder, ctx, model, position=fx.Position(updates=2), background=background)
    saving.result()


# `python -m benchmarks.faults` kills at 200 moments; each costs the start of new processes.
@pytest.mark.parametrize(
    "rank, where, background",
    slow_after(1, [(0, "manifest", False), (1, "file", True), (1, "before", True)]),
)
def test_a_rank_that_dies_while_it_writes(pair, rank, where, background, tmp_path):
    found = pair.outcomes(_die, str(tmp_path), rank, where, background)
    assert isinstance(found[1 - rank], fx.CheckpointError)
    assert fx.latest(tmp_path) == str(tmp_path / FIRST)
    fx.checkpoint.verify(tmp_path)
    # What it left is no checkpoint, and the next save removes it.
    with fx.detect(env={}, device="cpu") as ctx:
        _plainly(ctx, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [f"{FIRST}.1"]
    fx.checkpoint.verify(tmp_path)


@pytest.mark.slow
def test_one_of_four_ranks_is_gone_before_a_save(clusters, tmp_path):
    found = clusters[4].outcomes(_die, str(tmp_path), 2, "first", False)
    assert all(isinstance(found[rank], fx.CheckpointError) for rank in (0, 1, 3))
    assert fx.checkpoint.verify(tmp_path).path == str(tmp_path / FIRST)
