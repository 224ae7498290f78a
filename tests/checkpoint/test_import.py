"""Checkpoints of torch.distributed.checkpoint are read, without running code from them."""

import datetime
import io
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import fxtrain as fx
from fxtrain.interop import read_checkpoint
from tests._errors import raises_code
from tests._slow import slow_after
from tests.checkpoint._imports import Attribute, Bomb, by_name, trained
from tests.checkpoint._ranks import ready

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)


def _save_dcp(folder):
    net, optimizer = trained()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"epoch": 3, "note": {"a": [1, "x", None]}, "half": torch.ones(2, 3).bfloat16()}
    state |= {
        "scalar": torch.tensor(2.0),
        "empty": torch.empty(0, 4),
        "turned": torch.rand(3, 2).t(),
    }
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return state


def test_a_dcp_folder_is_read_whole(tmp_path):
    state = _save_dcp(tmp_path)
    found = read_checkpoint(tmp_path)
    for name, tensor in state["model"].items():
        assert torch.equal(found.models[0][name], tensor)
    for name in ("half", "scalar", "empty", "turned"):
        assert torch.equal(found.others[name], state[name])
        assert found.others[name].dtype == state[name].dtype
    moment = state["optimizer"]["state"][0]["exp_avg"]
    assert torch.equal(found.optimizers[0]["state"]["0"]["exp_avg"], moment)
    assert found.others["epoch"] == 3 and found.others["note"] == {"a": [1, "x", None]}
    assert found.optimizers[0]["param_groups"][0]["lr"] == 0.1
    part = read_checkpoint(tmp_path, optimizer=False)
    assert part.models[0].keys() == state["model"].keys()
    assert part.optimizers == () and "epoch" not in part.others


def test_a_value_that_torch_refuses_is_named_or_left_out(tmp_path):
    state = {"w": torch.ones(2), "when": datetime.date(2020, 1, 1)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with raises_code("FX600", "datetime.date"):
        read_checkpoint(tmp_path)
    assert list(read_checkpoint(tmp_path, optimizer=False).models[0]) == ["w"]


def _dcp_of_ranks(ctx, folder, shape):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", shape)
    ways = [Shard(0), Shard(1), Replicate()]
    whole = {f"w{i}": torch.arange(7.0 * 5).reshape(7, 5) * (i + 1) for i in range(4)}
    layouts = [[ways[(i + d) % 3] for d in range(len(shape))] for i in range(4)]
    state = {
        name: distribute_tensor(tensor, mesh, layout)
        for (name, tensor), layout in zip(whole.items(), layouts, strict=True)
    }
    # torch 2.9 stores tensors of its own checkpoints through a class that it deprecates.
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
    dcp.save({**state, "rank": 1}, checkpoint_id=folder)
    return whole


@pytest.mark.parametrize("shape", slow_after(1, map(pytest.param, [(2,), (4,), (2, 2)])))
def test_tensors_of_several_ranks_are_put_together(clusters, tmp_path, shape):
    ranks = clusters[4 if shape != (2,) else 2]
    whole = ready(ranks).run(_dcp_of_ranks, tmp_path, shape)[0]
    found = read_checkpoint(tmp_path)
    assert found.models[0].keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(found.models[0][name], tensor)


class _Setter:
    """Asks the pickle to change a class."""

    def __reduce__(self):
        return TensorProperties, (), (None, {"__setstate__": 1})


@pytest.mark.parametrize("what", ["call", "getattr", "nothing", "cut", "list", "text", "record"])
def test_a_hostile_index_runs_nothing(tmp_path, what):
    target = tmp_path / "made"
    raw = {
        "call": pickle.dumps(Bomb(str(target))),
        "getattr": pickle.dumps(getattr),
        "nothing": b"",
        "cut": pickle.dumps(Metadata(state_dict_metadata={}, storage_data={}))[:-5],
        "list": pickle.dumps([1, 2]),
        "text": b"not a pickle",
        "record": pickle.dumps(BytesStorageMetadata()),
    }[what]
    (tmp_path / ".metadata").write_bytes(raw)
    with raises_code("FX602"):
        read_checkpoint(tmp_path)
    assert not target.exists()


def test_an_index_that_an_older_python_wrote_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    state = _save_dcp(tmp_path)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    found = read_checkpoint(tmp_path)
    assert all(torch.equal(found.models[0][k], v) for k, v in state["model"].items())


def test_an_attribute_of_anything_else_is_refused(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attribute("text", "join")))
    with raises_code("FX602", "builtins.getattr"):
        read_checkpoint(tmp_path)


def test_a_hostile_index_changes_no_class(tmp_path):
    before = TensorProperties.__setstate__
    metadata = Metadata(state_dict_metadata={}, storage_data={}, planner_data=[_Setter()])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    found = read_checkpoint(tmp_path)
    assert found.models == ({},)
    assert TensorProperties.__setstate__ is before


def test_a_hostile_value_runs_nothing(tmp_path):
    folder, target = tmp_path / "dcp", tmp_path / "made"
    dcp.save({"w": torch.ones(1), "bad": Bomb(str(target))}, checkpoint_id=folder, no_dist=True)
    with raises_code("FX600", "bad: "):
        read_checkpoint(folder)
    assert not target.exists()


def _index(folder, *, size=(4,), chunks=(((0,), (4,)),), file="__0_0.distcp", **changes):
    """An index over one tensor of four numbers, and its file."""
    data = io.BytesIO()
    torch.save(torch.arange(4.0), data)
    Path(folder, "__0_0.distcp").write_bytes(data.getvalue())
    told = TensorStorageMetadata(
        properties=TensorProperties(dtype=changes.get("dtype", torch.float32)),
        size=torch.Size(size),
        chunks=[ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks],
    )
    told.size = size
    for part, (offsets, sizes) in zip(told.chunks, chunks, strict=True):
        part.offsets, part.sizes = offsets, sizes
    where = _StorageInfo(
        relative_path=file,
        offset=changes.get("offset", 0),
        length=changes.get("length", len(data.getvalue())),
        transform_descriptors=changes.get("transforms"),
    )
    storage = {MetadataIndex("w", o): where for o, _ in changes.get("held", chunks)}
    metadata = Metadata(state_dict_metadata={"w": told}, storage_data=storage)
    Path(folder, ".metadata").write_bytes(pickle.dumps(metadata))


def test_the_index_of_these_tests_is_read(tmp_path):
    _index(tmp_path)
    assert read_checkpoint(tmp_path).models[0]["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"file": "../out"}, "outside the folder"),
        ({"file": "/etc/passwd"}, "outside the folder"),
        ({"file": "link"}, "outside the folder"),
        ({"file": "absent"}, "absent' does not exist"),
        ({"offset": -1}, "is not inside __0_0.distcp"),
        ({"offset": 10**9}, "is not inside __0_0.distcp"),
        ({"length": 10**12}, "is not inside __0_0.distcp"),
        ({"length": "4"}, "does not have the layout"),
        ({"size": (-4,)}, "do not fill"),
        ({"size": (10**12,)}, "do not fill"),
        ({"size": (10**12,), "chunks": (((0,), (10**12,)),)}, "does not match the index"),
        ({"size": (3,), "chunks": (((0,), (3,)),)}, "does not match the index"),
        ({"dtype": torch.int32}, "does not match the index"),
        ({"chunks": (((1,), (4,)),)}, "do not fill"),
        ({"size": (6,), "chunks": (((0,), (4,)), ((2,), (2,)))}, "does not match the index"),
        ({"held": ()}, "does not have the layout"),
        ({"chunks": (((0,), (2, 2)),)}, "does not match the index"),
        ({"transforms": ["zstd"]}, "only torch can undo"),
    ],
)
def test_an_index_that_lies_is_an_error(tmp_path, changes, words):
    (tmp_path / "out").write_bytes(b"x" * 9999)
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "out")
    _index(folder, **changes)
    with pytest.raises(fx.CheckpointError, match=words):
        read_checkpoint(folder)


def test_a_folder_that_was_never_finished_is_named(tmp_path):
    with raises_code("FX601"):
        read_checkpoint(tmp_path)
