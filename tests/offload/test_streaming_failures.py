"""Streamed models: files that change, disks that fail, folders that cannot be written."""

import errno
import os

import pytest
import torch

import fxtrain as fx
from fxtrain.backends.offload import mapped_files
from fxtrain.backends.offload.strategy import OFFLOAD
from fxtrain.testing import Transformer
from tests._errors import raises_code
from tests.offload._streamed import BLOCKS, COPIES, TOKENS, streamed


def _truncated(path):
    os.truncate(path, path.stat().st_size - 8)


def _rewritten(path):
    # In place: a thread that reads ahead from a mapped file dies where the file ends earlier.
    os.utime(path, ns=(0, path.stat().st_mtime_ns))
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))


def _replaced(path):
    fx.export(Transformer(seed=1), path.parent)


CHANGED = "the file was changed or replaced since it was opened"
DAMAGES = {
    "truncated": (_truncated, CHANGED),
    "rewritten": (_rewritten, CHANGED),
    "replaced": (_replaced, CHANGED),
    "deleted": (os.remove, "No such file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("row", [OFFLOAD, COPIES], ids=["in place", "copied"])
def test_a_file_that_changes_is_an_error_with_tensor_and_offset(ctx, folder, damage, row):
    model = streamed(ctx, folder, row=row)
    model(TOKENS)
    act, words = DAMAGES[damage]
    act(folder / "model.safetensors")
    with pytest.raises(fx.CheckpointError, match=words) as error:
        model(TOKENS)
    assert "model.safetensors: the tensor 'blocks." in str(error.value)
    assert "at offset" in str(error.value)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_disk_that_fails_is_an_error_with_tensor_and_offset(
    ctx, folder, monkeypatch, failing, prefetch
):
    model = streamed(ctx, folder, prefetch=prefetch)
    monkeypatch.setattr(mapped_files, "_populate", lambda *_: False)
    assert torch.equal(model(TOKENS), Transformer()(TOKENS))  # read by way of a buffer
    for unit in model.strategy_state.units:
        unit.in_memory = False
    failing(os, "pread", errno.EIO)
    with raises_code("FX600", "Input/output"):
        model(TOKENS)
    monkeypatch.setattr(os, "pread", lambda *_: b"short")
    with raises_code("FX600", "5 of "):
        model(TOKENS)


def test_a_full_disk_leaves_nothing_behind(ctx, tmp_path, failing, threads):
    failing(os, "fsync", errno.ENOSPC)
    config = fx.Offload(placement=BLOCKS, offload_folder=str(tmp_path / "offload"))
    net = Transformer()
    with raises_code("FX600", "No space left on device"):
        fx.wrap(net, ctx, fx.Plan(strategy=config))
    assert not (tmp_path / "offload").exists() and not threads()
    assert torch.equal(net(TOKENS), Transformer()(TOKENS))
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_a_folder_that_cannot_be_written(ctx, tmp_path):
    (tmp_path / "file").write_text("")
    config = fx.Offload(placement=BLOCKS, offload_folder=str(tmp_path / "file" / "offload"))
    with raises_code("FX600", "folder"):
        fx.wrap(Transformer(), ctx, fx.Plan(strategy=config))


def test_half_a_checkpoint_and_a_wrong_model(ctx, folder, tmp_path, threads):
    state = Transformer().state_dict()
    fx.export({name: state[name] for name in list(state)[:9]}, tmp_path / "half")
    for source in (tmp_path / "half", tmp_path / "none"):
        with pytest.raises(fx.CheckpointError):
            streamed(ctx, source)
    assert not threads()


def test_what_killed_processes_have_left_is_removed(ctx, tmp_path):
    """Not what another one may be writing."""
    killed, begun = (tmp_path / f".{name}.part" for name in ("killed", "begun"))
    for path in (killed, begun):
        path.write_bytes(bytes(100))
    os.utime(killed, (0, 0))
    config = fx.Offload(placement=BLOCKS, offload_folder=str(tmp_path))
    model = fx.wrap(Transformer(), ctx, fx.Plan(strategy=config))
    assert torch.equal(model(TOKENS), Transformer()(TOKENS))
    assert [path.name for path in tmp_path.glob(".*")] == [".begun.part"]


def test_a_file_that_another_rank_has_mapped_is_not_replaced(tmp_path, monkeypatch):
    """Both write the same tensor, and one of them is done just before the other."""
    link, found = os.link, []

    def late(source, path):
        monkeypatch.setattr(os, "link", link)
        other, _ = mapped_files.write_tensor(tmp_path, "0.weight", torch.ones(3))
        found.append(mapped_files.map_file(other))
        link(source, path)

    monkeypatch.setattr(os, "link", late)
    path, stored = mapped_files.write_tensor(tmp_path, "0.weight", torch.ones(3))
    (file,) = found
    assert file.path == path
    mapped_files.check_mapping(file, "0.weight", stored.start)


def test_a_file_system_without_links_holds_offloaded_tensors(tmp_path, failing):
    failing(os, "link", errno.EPERM)
    for _ in range(2):
        path, stored = mapped_files.write_tensor(tmp_path, "0.weight", torch.ones(3))
        assert mapped_files.mapped(mapped_files.map_file(path), stored).tolist() == [1.0] * 3
    assert [*tmp_path.iterdir()] == [path]
