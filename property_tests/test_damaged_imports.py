"""Checkpoints of other libraries, damaged at random: read, or refused by name, and quickly."""

import enum
import shutil
import sys
import types
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp

import fxtrain as fx
from fxtrain.interop import import_checkpoint, read_checkpoint
from tests._damage import (
    damaged,
    damaged_save,
    misshapen,
    only,
    replaced,
    small_net,
)
from tests._errors import raises_code
from tests._slow import slow_after

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable"),
    # torch says so of pickles that it did not write.
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
]


def _trained():
    net = small_net()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def _save_dcp(state, folder):
    with warnings.catch_warnings():  # torch 2.9 asks tensors for typed storages
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(state, checkpoint_id=folder, no_dist=True)


@pytest.fixture(scope="module")
def distributed(folder):
    """A folder of torch.distributed.checkpoint."""
    net, optimizer = _trained()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    _save_dcp(state, folder / "dcp")
    return folder / "dcp"


def _import(source):
    import_checkpoint(source, source.parent / "imported", module=small_net())


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@given(data=st.data())
def test_a_damaged_folder_of_dcp_is_read_or_refused(distributed, name, data):
    with replaced(distributed / name, lambda raw: data.draw(damaged(raw))):
        only(fx.CheckpointError, read_checkpoint, distributed)


@settings(max_examples=25)  # torch takes a while to write one
@given(data=st.data())
def test_a_misshapen_state_of_dcp_is_imported_or_refused(folder, data):
    net, optimizer = _trained()
    state = {"model": dict(net.state_dict()), "optimizer": optimizer.state_dict()}
    state = data.draw(misshapen(state))
    made = folder / "misshapen-dcp"
    shutil.rmtree(made, ignore_errors=True)
    _save_dcp(state if isinstance(state, dict) else {"x": state}, made)
    only(fx.CheckpointError, _import, made)


def _accelerate():
    net, optimizer = _trained()
    return {
        "pytorch_model.bin": dict(net.state_dict()),
        "optimizer.bin": optimizer.state_dict(),
        "scheduler.bin": {"last_epoch": 1, "_last_lr": [0.1]},
        "scaler.pt": {"scale": 8.0},
    }


@pytest.fixture(scope="module")
def accelerate(folder):
    """A folder as Accelerate leaves it."""
    made = folder / "accelerate"
    made.mkdir()
    for name, data in _accelerate().items():
        torch.save(data, made / name)
    assert only(fx.CheckpointError, _import, made)
    return made


@given(data=st.data(), name=st.sampled_from(sorted(_accelerate())))
def test_a_damaged_folder_of_accelerate_is_read_or_refused(accelerate, data, name):
    contents = _accelerate()[name]
    with replaced(accelerate / name, lambda raw: data.draw(damaged_save(raw, contents))):
        only(fx.CheckpointError, read_checkpoint, accelerate)
        only(fx.CheckpointError, _import, accelerate)


def _deepspeed(stage):
    flat = torch.arange(7.0)
    state = {"state": {0: {"step": torch.tensor(4.0), "exp_avg": flat}}}
    state |= {"param_groups": [{"lr": 0.1, "params": [0]}]}
    model = {
        "module": {"weight": torch.zeros(0), "bias": torch.zeros(0), "count": torch.tensor(3)},
        "buffer_names": ["count"],
        "param_shapes": [{"weight": torch.Size([5, 1]), "bias": torch.Size([2])}],
        "frozen_param_shapes": {"kept": torch.Size([3])},
        "frozen_param_fragments": {"kept": torch.ones(3)},
        "shared_params": {"head": "weight"},
        "lr_scheduler": {"last_epoch": 1},
        "dp_world_size": 1,
        "global_steps": 4,
    }
    optim = {
        "zero_stage": stage,
        "partition_count": 1,
        "optimizer_state_dict": state,
        "fp32_flat_groups": [flat],
    }
    name = "zero_pp_rank_0_mp_rank_00"
    return {
        f"{name}_model_states.pt": model,
        f"{name}_optim_states.pt": {"optimizer_state_dict": optim},
    }


@pytest.fixture(scope="module")
def deepspeed(folder):
    """A folder of DeepSpeed's stage 3 on one rank, and its contents by name."""
    module = types.ModuleType("deepspeed.runtime.zero.config")
    names = [module.__name__.rsplit(".", n)[0] for n in range(3, 0, -1)]
    stage = enum.IntEnum("ZeroStageEnum", {"weights": 3}, module=module.__name__)
    module.ZeroStageEnum = stage
    kept = {name: sys.modules.get(name) for name in [*names, module.__name__]}
    sys.modules.update({name: types.ModuleType(name) for name in names})
    sys.modules[module.__name__] = module
    made = folder / "deepspeed"
    (made / "step4").mkdir(parents=True)
    (made / "latest").write_text("step4")
    contents = _deepspeed(stage(3))
    for name, data in contents.items():
        torch.save(data, made / "step4" / name)
    yield made, contents
    for name, before in kept.items():
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


def test_the_folder_of_deepspeed_is_read(deepspeed):
    assert read_checkpoint(deepspeed[0]).models[0]["weight"].flatten().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", slow_after(1, ["model", "optim"]))
@given(data=st.data())
def test_a_damaged_folder_of_deepspeed_is_read_or_refused(deepspeed, kind, data):
    made, contents = deepspeed
    path = made / "step4" / f"zero_pp_rank_0_mp_rank_00_{kind}_states.pt"
    with replaced(path, lambda raw: data.draw(damaged_save(raw, contents[path.name]))):
        only(fx.CheckpointError, read_checkpoint, made)
        only(fx.CheckpointError, _import, made)


@given(data=st.data())
def test_a_damaged_latest_is_read_or_refused(deepspeed, data):
    with replaced(deepspeed[0] / "latest", lambda raw: data.draw(damaged(raw))):
        only(fx.CheckpointError, read_checkpoint, deepspeed[0])


def test_a_tag_longer_than_a_file_name_is_refused(deepspeed):
    latest = deepspeed[0] / "latest"
    refused = raises_code("FX602", "DeepSpeed")
    with replaced(latest, lambda raw: b"0xf" * 100), refused:
        read_checkpoint(deepspeed[0])
