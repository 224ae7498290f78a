"""Exporting over an earlier export: nothing of it remains, and no kill leaves half of each."""

import contextlib
import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

import fxtrain as fx
from fxtrain.models import export, load_model
from fxtrain.models.folder import INDEX
from tests.checkpoint._exports import (
    Holder,
    as_the_ecosystem_reads,
    assert_same,
    full_disk,
    loaded,
    names_in,
    some_state,
)


def test_nothing_of_an_earlier_export_remains_and_other_files_do(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "model-card.safetensors").write_text("mine too")
    for limit, weights in [(1, 5), (130, 3), ("5GB", 1), (130, 3), (130, 3), (1, 5), ("5GB", 1)]:
        state = some_state(seed=weights)
        export(state, tmp_path, limit)
        index = [INDEX] if weights > 1 else []
        found = names_in(tmp_path)
        assert len(found) == weights + len(index) + 2, found
        assert {"README.md", "model-card.safetensors", *index} <= set(found)
        assert_same(as_the_ecosystem_reads(tmp_path), state)
        assert_same(loaded(tmp_path, state), state)


class _Killed(BaseException):
    """Stands for the end of the process: nothing after it reaches the disk."""


CHANGES = ["replace", "link", "unlink", "rmdir", "mkdir"]


def _dying_after(patch, steps):
    """Let so many changes to the disk through; from then on every one fails."""
    left = [steps]

    def guard(real):
        def call(*args, **kwargs):
            if left[0] <= 0:
                raise _Killed
            left[0] -= 1
            return real(*args, **kwargs)

        return call

    for name in CHANGES:
        patch.setattr(os, name, guard(getattr(os, name)))
    return left


@pytest.mark.parametrize(
    ("before", "after"),
    [("5GB", "5GB"), ("5GB", 130), (130, "5GB"), (130, 130), (130, 1), (1, 130)],
)
def test_a_kill_at_any_moment_leaves_one_export_whole(tmp_path, monkeypatch, before, after):
    old, new = some_state(seed=1), some_state(seed=2)
    seen = []
    for step in range(200):
        folder = tmp_path / str(step)
        export(old, folder, before)
        with monkeypatch.context() as patch:
            left = _dying_after(patch, step)
            with contextlib.suppress(_Killed):
                export(new, folder, after)
        for read in (as_the_ecosystem_reads, lambda folder: dict(loaded(folder, old))):
            found = read(folder)
            is_new = torch.equal(found["w0"], new["w0"])
            assert_same(found, new if is_new else old)
        seen.append(is_new)
        # The next export finishes and cleans up, whatever was left.
        export(new, folder, after)
        count = 1 if after == "5GB" else {130: 3, 1: 5}[after] + 1
        assert len(names_in(folder)) == count, names_in(folder)
        assert_same(as_the_ecosystem_reads(folder), new)
        shutil.rmtree(folder)
        if left[0] > 0:
            break
    assert step > 3 and seen[0] is False and seen[-1] is True
    assert seen == sorted(seen)  # one switch, never back


def test_a_first_export_that_is_killed_leaves_no_model(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        _dying_after(patch, 4)
        with pytest.raises(_Killed):
            export(some_state(), tmp_path / "new", 130)
    with pytest.raises(fx.CheckpointError, match="contains no model"):
        load_model(tmp_path / "new", Holder(some_state()))


def test_a_file_system_without_links_gets_copies(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    for seed in (1, 2):
        export(some_state(seed), tmp_path, 130)
        assert_same(as_the_ecosystem_reads(tmp_path), some_state(seed))
    assert len(names_in(tmp_path)) == 4


def test_a_full_disk_leaves_the_earlier_export(tmp_path, monkeypatch):
    export(some_state(1), tmp_path, 130)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full_disk("00002", 200))
        with pytest.raises(fx.CheckpointError, match="No space left"):
            export(some_state(2), tmp_path, 130)
    assert_same(as_the_ecosystem_reads(tmp_path), some_state(1))
    assert len(names_in(tmp_path)) == 4  # and nothing lies about
