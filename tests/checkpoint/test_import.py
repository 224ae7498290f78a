"""Reading checkpoints of torch.distributed.checkpoint and of Accelerate."""

import datetime
import io
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import fxtrain as fx
from fxtrain.interop import read_accelerate, read_dcp
from tests.checkpoint._ranks import ready

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)


def _trained(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def _save_dcp(folder):
    net, optimizer = _trained()
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
    found = read_dcp(tmp_path)
    for name, tensor in state["model"].items():
        assert torch.equal(found.tensors[f"model.{name}"], tensor)
    for name in ("half", "scalar", "empty", "turned"):
        assert torch.equal(found.tensors[name], state[name])
        assert found.tensors[name].dtype == state[name].dtype
    moment = state["optimizer"]["state"][0]["exp_avg"]
    assert torch.equal(found.tensors["optimizer.state.0.exp_avg"], moment)
    assert found.values["epoch"] == 3 and found.values["note.a"] == [1, "x", None]
    assert found.values["optimizer.param_groups.0.lr"] == 0.1
    assert found.paths["optimizer.param_groups.0.lr"] == ("optimizer", "param_groups", 0, "lr")
    assert found.refused == {}
    part = read_dcp(tmp_path, only=lambda name: name.startswith("model."))
    assert sorted(part.tensors) == [f"model.{name}" for name in sorted(state["model"])]
    assert part.values == {} and set(part.paths) == set(part.tensors)


def test_a_value_that_torch_refuses_is_named_or_left_out(tmp_path):
    state = {"w": torch.ones(2), "when": datetime.date(2020, 1, 1)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(fx.CheckpointError, match=r"1 values.*\n  when: .*datetime\.date"):
        read_dcp(tmp_path)
    found = read_dcp(tmp_path, strict=False)
    assert list(found.tensors) == ["w"] and list(found.refused) == ["when"]


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
    dcp.save({**state, "rank": 1}, checkpoint_id=folder)
    return whole


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
def test_tensors_of_several_ranks_are_put_together(clusters, tmp_path, shape):
    ranks = clusters[4 if shape != (2,) else 2]
    whole = ready(ranks).run(_dcp_of_ranks, tmp_path, shape)[0]
    found = read_dcp(tmp_path)
    assert found.tensors.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(found.tensors[name], tensor)


class _Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


class _Setter:
    """Asks the pickle to change a class."""

    def __reduce__(self):
        return TensorProperties, (), (None, {"__setstate__": 1})


@pytest.mark.parametrize("what", ["call", "getattr", "nothing", "cut", "list", "text", "record"])
def test_a_hostile_index_runs_nothing(tmp_path, what):
    target = tmp_path / "made"
    raw = {
        "call": pickle.dumps(_Bomb(str(target))),
        "getattr": pickle.dumps(getattr),
        "nothing": b"",
        "cut": pickle.dumps(Metadata(state_dict_metadata={}, storage_data={}))[:-5],
        "list": pickle.dumps([1, 2]),
        "text": b"not a pickle",
        "record": pickle.dumps(BytesStorageMetadata()),
    }[what]
    (tmp_path / ".metadata").write_bytes(raw)
    with pytest.raises(fx.CheckpointError, match="not a valid checkpoint"):
        read_dcp(tmp_path)
    assert not target.exists()


def test_a_hostile_index_changes_no_class(tmp_path):
    before = TensorProperties.__setstate__
    metadata = Metadata(state_dict_metadata={}, storage_data={}, planner_data=[_Setter()])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    found = read_dcp(tmp_path)
    assert found.tensors == {} and found.paths == {}
    assert TensorProperties.__setstate__ is before


def test_a_hostile_value_runs_nothing(tmp_path):
    folder, target = tmp_path / "dcp", tmp_path / "made"
    dcp.save({"w": torch.ones(1), "bad": _Bomb(str(target))}, checkpoint_id=folder, no_dist=True)
    with pytest.raises(fx.CheckpointError, match=r"bad: .*rejects"):
        read_dcp(folder)
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
    assert read_dcp(tmp_path).tensors["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"file": "../out"}, "outside the folder"),
        ({"file": "/etc/passwd"}, "outside the folder"),
        ({"file": "link"}, "outside the folder"),
        ({"file": "absent"}, "absent' does not exist"),
        ({"offset": -1}, "no valid location"),
        ({"offset": 10**9}, "past the end"),
        ({"length": 10**12}, "past the end"),
        ({"length": True}, "no valid location"),
        ({"size": (-4,)}, "does not describe"),
        ({"size": (10**12,)}, "do not fill"),
        ({"size": (10**12,), "chunks": (((0,), (10**12,)),)}, "larger in the index"),
        ({"size": (3,), "chunks": (((0,), (3,)),)}, "does not match the index"),
        ({"dtype": torch.int32}, "does not match the index"),
        ({"chunks": (((1,), (4,)),)}, "do not fill"),
        ({"size": (8,), "chunks": (((0,), (4,)), ((2,), (4,)))}, "do not fill"),
        ({"size": (6,), "chunks": (((0,), (4,)), ((2,), (2,)))}, "do not fill"),
        ({"held": ()}, "do not fill"),
        ({"chunks": (((0,), (2, 2)),)}, "has no valid offsets"),
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
        read_dcp(folder)


def test_a_folder_that_was_never_finished_is_named(tmp_path):
    with pytest.raises(fx.CheckpointError, match="is incomplete"):
        read_dcp(tmp_path)


# ---------------------------------------------------------------- Accelerate

SAVE = """
import sys, random, torch, numpy
from torch import nn
from accelerate import Accelerator
folder, safe = sys.argv[1], sys.argv[2] == "safe"
torch.manual_seed(0)
numpy.random.seed(1)
random.seed(2)
accelerator = Accelerator(cpu=True)
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, x):
        return self.head(self.embed(x))
nets = [Tied(), nn.Linear(2, 2)]
opts = [torch.optim.AdamW(n.parameters(), lr=0.1) for n in nets]
sched = torch.optim.lr_scheduler.StepLR(opts[0], 3)
class Mine:
    def state_dict(self):
        return {"count": 7, "table": torch.arange(3)}
    def load_state_dict(self, state):
        pass
mine = Mine()
nets[0], nets[1], opts[0], opts[1], sched = accelerator.prepare(*nets, *opts, sched)
accelerator.register_for_checkpointing(mine)
for net, opt, x in ((nets[0], opts[0], torch.tensor([1])), (nets[1], opts[1], torch.ones(1, 2))):
    accelerator.backward(net(x).sum())
    opt.step()
sched.step()
accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
accelerator.step = 5
accelerator.save_state(folder, safe_serialization=safe)
torch.save({"nets": [n.state_dict() for n in nets], "opts": [o.state_dict() for o in opts],
            "sched": sched.state_dict(), "torch": torch.get_rng_state(),
            "numpy": torch.tensor(numpy.random.get_state()[1].tolist()),
            "python": random.getstate()}, folder + "/wanted.pth")
"""


@pytest.mark.parametrize("kind", ["safe", "pickle"])
def test_a_folder_of_accelerate_is_read(tmp_path, kind):
    pytest.importorskip("accelerate", reason="needs the package accelerate (extra bench)")
    done = subprocess.run(
        [sys.executable, "-c", SAVE, str(tmp_path), kind],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wanted = torch.load(tmp_path / "wanted.pth")
    allowed = torch.serialization.get_safe_globals()
    found = read_accelerate(tmp_path)
    assert len(found.models) == len(found.optimizers) == 2
    for model, state in zip(found.models, wanted["nets"], strict=True):
        # Of tied tensors, Accelerate's safetensors keep one name and do not tell the others.
        assert state.keys() - model.keys() <= ({"head.weight"} if kind == "safe" else set())
        assert all(torch.equal(model[name], state[name]) for name in model)
    for optimizer, state in zip(found.optimizers, wanted["opts"], strict=True):
        assert optimizer["param_groups"] == state["param_groups"]
        for place, moments in state["state"].items():
            assert torch.equal(optimizer["state"][place]["exp_avg"], moments["exp_avg"])
    assert found.schedulers == (wanted["sched"],)
    assert found.scaler["scale"] == 8.0 and found.step == 5
    assert found.custom[0]["count"] == 7 and found.custom[0]["table"].tolist() == [0, 1, 2]
    (random,) = found.random.values()
    assert torch.equal(random["torch_manual_seed"], wanted["torch"])
    assert torch.equal(random["numpy_random_seed"][1].long(), wanted["numpy"])
    assert random["random_state"] == wanted["python"]
    assert set(torch.serialization.get_safe_globals()) == set(allowed)  # nothing stays allowed


def _accelerate_folder(folder):
    folder.mkdir(exist_ok=True)
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")


def test_what_accelerate_spread_over_ranks_is_read(tmp_path):
    net, optimizer = _trained()
    dcp.save(
        {"model": net.state_dict()}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True
    )
    state = {"optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
    found = read_accelerate(tmp_path)
    assert found.models[0].keys() == net.state_dict().keys()
    assert torch.equal(found.models[0]["0.weight"], net[0].weight)
    groups = found.optimizers[0]["param_groups"]
    assert groups[0]["lr"] == 0.1 and groups[0]["params"] == [0, 1, 2, 3]
    assert sorted(found.optimizers[0]["state"], key=int)[0] in (0, "0")


def test_a_pickle_that_torch_refuses_is_refused(tmp_path):
    target = tmp_path / "made"
    for name in ("optimizer.bin", "scaler.pt", "random_states_0.pkl", "custom_checkpoint_0.pkl"):
        folder = tmp_path / name
        _accelerate_folder(folder)
        torch.save(_Bomb(str(target)), folder / name)
        with pytest.raises(fx.CheckpointError, match=f"{name}: .* rejects it"):
            read_accelerate(folder)
    assert not target.exists()


def test_gaps_and_twins_in_a_folder_of_accelerate_are_named(tmp_path):
    with pytest.raises(fx.CheckpointError, match="contains no model of Accelerate"):
        read_accelerate(tmp_path)
    _accelerate_folder(tmp_path / "gap")
    torch.save({}, tmp_path / "gap" / "optimizer_2.bin")
    with pytest.raises(fx.CheckpointError, match=r"optimizer \[2\]"):
        read_accelerate(tmp_path / "gap")
    _accelerate_folder(tmp_path / "twin")
    fx.export({"w": torch.ones(2)}, tmp_path / "twin")
    with pytest.raises(fx.CheckpointError, match="model 0 twice"):
        read_accelerate(tmp_path / "twin")
    _accelerate_folder(tmp_path / "link")
    (tmp_path / "link" / "optimizer.bin").symlink_to(tmp_path / "gap" / "optimizer_2.bin")
    with pytest.raises(fx.CheckpointError, match="outside the folder"):
        read_accelerate(tmp_path / "link")


def test_arrays_of_numpy_become_tensors(tmp_path):
    _accelerate_folder(tmp_path)
    arrays = {"numpy_random_seed": ("MT19937", numpy.arange(4, dtype=numpy.uint32), 3)}
    torch.save({"step": 2, **arrays}, tmp_path / "random_states_0.pkl")
    torch.save({"step": 2}, tmp_path / "random_states_1.pkl")
    found = read_accelerate(tmp_path)
    word, values, place = found.random[0]["numpy_random_seed"]
    assert (word, place, values.dtype, values.tolist()) == (
        "MT19937",
        3,
        torch.uint32,
        [0, 1, 2, 3],
    )
    assert found.step == 2 and found.random[1] == {}


def test_a_cut_file_is_named(tmp_path):
    _accelerate_folder(tmp_path)
    torch.save({"state": {}}, tmp_path / "optimizer.bin")
    whole = (tmp_path / "optimizer.bin").read_bytes()
    assert zipfile.is_zipfile(tmp_path / "optimizer.bin")
    (tmp_path / "optimizer.bin").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(fx.CheckpointError, match=r"optimizer\.bin: .* rejects it"):
        read_accelerate(tmp_path)
