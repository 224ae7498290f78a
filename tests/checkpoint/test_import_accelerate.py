"""Folders that Accelerate wrote are read, without running code from them."""

import subprocess
import sys
import zipfile

import pytest
import torch
from torch.distributed import checkpoint as dcp

import fxtrain as fx
from fxtrain.interop import read_checkpoint
from tests._errors import raises_code
from tests.checkpoint._imports import Bomb, trained

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)

SAVE = """
import sys, torch
from torch import nn
from accelerate import Accelerator
folder, safe = sys.argv[1], sys.argv[2] == "safe"
torch.manual_seed(0)
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
accelerator.save_state(folder, safe_serialization=safe)
torch.save({"nets": [n.state_dict() for n in nets], "opts": [o.state_dict() for o in opts],
            "sched": sched.state_dict()}, folder + "/wanted.pth")
"""


@pytest.mark.slow
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
    found = read_checkpoint(tmp_path)
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
    assert found.scaler["scale"] == 8.0
    assert found.others == {}
    assert set(torch.serialization.get_safe_globals()) == set(allowed)  # nothing stays allowed


def _accelerate_folder(folder):
    folder.mkdir(exist_ok=True)
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")


def test_what_accelerate_spread_over_ranks_is_read(tmp_path):
    net, optimizer = trained()
    dcp.save(
        {"model": net.state_dict()}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True
    )
    state = {"optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
    found = read_checkpoint(tmp_path)
    assert found.models[0].keys() == net.state_dict().keys()
    assert torch.equal(found.models[0]["0.weight"], net[0].weight)
    groups = found.optimizers[0]["param_groups"]
    assert groups[0]["lr"] == 0.1 and groups[0]["params"] == [0, 1, 2, 3]
    assert sorted(found.optimizers[0]["state"], key=int)[0] in (0, "0")


def test_a_pickle_that_torch_refuses_is_refused(tmp_path):
    target = tmp_path / "made"
    for name in ("optimizer.bin", "scaler.pt", "scheduler.bin"):
        folder = tmp_path / name
        _accelerate_folder(folder)
        torch.save(Bomb(str(target)), folder / name)
        with raises_code("FX600", f"{name}: "):
            read_checkpoint(folder)
    assert not target.exists()


def test_gaps_and_twins_in_a_folder_of_accelerate_are_named(tmp_path):
    with raises_code("FX601"):
        read_checkpoint(tmp_path)
    _accelerate_folder(tmp_path / "gap")
    torch.save({}, tmp_path / "gap" / "optimizer_2.bin")
    with raises_code("FX600", "[2]"):
        read_checkpoint(tmp_path / "gap")
    _accelerate_folder(tmp_path / "twin")
    fx.export({"w": torch.ones(2)}, tmp_path / "twin")
    with raises_code("FX600", "0 twice"):
        read_checkpoint(tmp_path / "twin")
    _accelerate_folder(tmp_path / "link")
    (tmp_path / "link" / "optimizer.bin").symlink_to(tmp_path / "gap" / "optimizer_2.bin")
    with raises_code("FX600", "outside the folder"):
        read_checkpoint(tmp_path / "link")


def test_a_cut_file_is_named(tmp_path):
    _accelerate_folder(tmp_path)
    torch.save({"state": {}}, tmp_path / "optimizer.bin")
    whole = (tmp_path / "optimizer.bin").read_bytes()
    assert zipfile.is_zipfile(tmp_path / "optimizer.bin")
    (tmp_path / "optimizer.bin").write_bytes(whole[: len(whole) // 2])
    with raises_code("FX600", "optimizer.bin"):
        read_checkpoint(tmp_path)
