"""Folders of DeepSpeed, made by hand: what is put together, and what is refused.

`tests/deepspeed/test_import.py` reads those that the library itself wrote.
"""

import enum
import os
import sys
import types

import pytest
import torch

import fxtrain as fx
from fxtrain.interop import import_checkpoint, read_checkpoint
from tests.checkpoint._imports import Attribute, by_name

# A matrix of five numbers and one of two, over two ranks: three and one each, padded.
WEIGHT = torch.arange(5.0).reshape(5, 1)
BIAS = torch.tensor([7.0, 8.0])


def _optim(config, rank, scale=1.0):
    weight = torch.cat([WEIGHT.flatten(), torch.zeros(1)])[rank * 3 : rank * 3 + 3]
    flat = torch.cat([weight, BIAS[rank : rank + 1]])
    state = {0: {"step": torch.tensor(4.0), "exp_avg": flat * scale}}
    return {
        "optimizer_state_dict": {
            "zero_stage": config.ZeroStageEnum(3),
            "partition_count": 2,
            "optimizer_state_dict": {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]},
            "fp32_flat_groups": [flat],
        }
    }


def _model(rank):
    return {
        "module": {"weight": torch.zeros(0), "bias": torch.zeros(0), "count": torch.tensor(3)},
        "buffer_names": ["count"],
        "param_shapes": [{"weight": WEIGHT.shape, "bias": BIAS.shape}],
        "frozen_param_shapes": {"kept": torch.Size([3])},
        "frozen_param_fragments": {"kept": torch.tensor([[1.0, 2.0], [3.0, 0.0]][rank])},
        "shared_params": {"head": "weight"},
        "lr_scheduler": None,
        "global_steps": 4,
    }


@pytest.fixture(params=["by value", "by name"])
def folder(tmp_path, monkeypatch, request):
    """A folder of stage 3, with the classes that DeepSpeed's pickles name."""
    names = [".".join(["deepspeed", "runtime", "zero", "config"][:n]) for n in range(1, 5)]
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    config = sys.modules[names[-1]]
    config.ZeroStageEnum = enum.IntEnum("ZeroStageEnum", {"weights": 3}, module=names[-1])
    if request.param == "by name":
        monkeypatch.setattr(config.ZeroStageEnum, "__reduce_ex__", by_name)
    (tmp_path / "ds" / "step4").mkdir(parents=True)
    (tmp_path / "ds" / "latest").write_text("step4")
    for rank in range(2):
        start = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save(_model(rank), tmp_path / "ds" / "step4" / f"{start}_model_states.pt")
        optim = _optim(config, rank, scale=0.5)
        torch.save(optim, tmp_path / "ds" / "step4" / f"bf16_{start}_optim_states.pt")
    for name in names:  # nothing of them is needed to read
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "ds"


def test_parts_of_every_rank_are_put_together(folder):
    found = read_checkpoint(folder)
    assert found.updates == 4
    wanted = {"weight": WEIGHT, "bias": BIAS, "kept": torch.tensor([1.0, 2.0, 3.0])}
    assert found.models[0].keys() == {*wanted, "count"} and found.tied == {"head": "weight"}
    for name, tensor in wanted.items():
        assert torch.equal(found.models[0][name], tensor)
    assert torch.equal(found.optimizers[0]["state"]["weight"]["exp_avg"], WEIGHT * 0.5)
    assert list(found.optimizers[0]["state"]["bias"]) == ["step", "exp_avg"]
    assert found.optimizers[0]["param_groups"] == [{"lr": 0.1, "params": ["weight", "bias"]}]
    assert read_checkpoint(folder / "step4", optimizer=False).optimizers == ()
    assert fx.checkpoint.verify(import_checkpoint(folder, folder.parent / "fx")).tensors


class _Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile",)


def _cut(folder):
    data = _model(1) | {"frozen_param_fragments": {"kept": torch.ones(0)}}
    torch.save(data, next(folder.glob("step4/*rank_1_*model*")))


BROKEN = {
    "a rank is missing": (
        lambda f: next(f.glob("step4/*rank_1_*optim*")).unlink(),
        "partitioned over 2 ranks, but there are 1",
    ),
    "the first rank is missing": (
        lambda f: next(f.glob("step4/*rank_0_*optim*")).unlink(),
        r"contains optim \[1\]",
    ),
    "a part is cut": (_cut, "kept have 2 elements, but its shape .3. needs 3"),
    "an entry is missing": (
        lambda f: torch.save({}, next(f.glob("step4/*rank_0_*model*"))),
        "does not have the layout of DeepSpeed",
    ),
    "code": (
        lambda f: torch.save(_Hostile(), next(f.glob("step4/*rank_1_*model*"))),
        "weights_only=True. rejects it",
    ),
    "damage": (
        lambda f: next(f.glob("step4/*rank_1_*model*")).write_bytes(b"PK"),
        "weights_only=True. rejects it",
    ),
    "tensor parallel": (
        lambda f: torch.save({}, f / "step4" / "mp_rank_01_model_states.pt"),
        "tensor, pipeline or expert parallelism",
    ),
    "an attribute of anything else": (
        lambda f: torch.save(Attribute("text", "join"), next(f.glob("step4/*rank_1_*model*"))),
        "weights_only=True. rejects it",
    ),
    "latest leads out": (lambda f: (f / "latest").write_text("../ds"), "is not a folder in"),
    "nothing": (lambda f: (f / "latest").unlink(), "is not a DeepSpeed checkpoint"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_or_hostile_is_refused(folder, name, monkeypatch):
    monkeypatch.chdir(folder.parent)
    change, words = BROKEN[name]
    change(folder)
    with pytest.raises(fx.CheckpointError, match=words):
        read_checkpoint(folder)
    assert not os.path.exists("hostile")
