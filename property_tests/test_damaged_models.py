"""Model files and checkpoints, damaged at random: read, or refused by name, and quickly."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.big.memory_estimates import read_weights
from tests._damage import (
    damaged,
    damaged_inside,
    misshapen,
    only,
    replaced,
    small_net,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable"),
    # torch says so of pickles that it did not write.
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
]


def _bytes(data, path, **how):
    torch.save(data, path, **how)
    return path.read_bytes()


# Models


@pytest.fixture(scope="module")
def models(folder):
    """The bytes of one model in every form."""
    state = small_net().state_dict()
    fx.export(state, folder / "whole")
    fx.export(state, folder / "split", max_shard=60)
    return {
        ".safetensors": (folder / "whole" / "model.safetensors").read_bytes(),
        ".pt": _bytes(state, folder / "m.pt"),
        ".bin": _bytes(state, folder / "m.bin", _use_new_zipfile_serialization=False),
    }


def _load(path):
    return only(fx.CheckpointError, fx.load_model, path, small_net())


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin"])
@given(data=st.data())
def test_a_damaged_model_is_loaded_or_refused(folder, models, suffix, data):
    path = folder / f"damaged{suffix}"
    path.write_bytes(data.draw(damaged(models[suffix])))
    _load(path)


@given(data=st.data())
def test_a_damaged_pickle_of_a_model_is_loaded_or_refused(folder, models, data):
    path = folder / "inside.pt"
    path.write_bytes(data.draw(damaged_inside(models[".pt"])))
    _load(path)


@given(data=st.data())
def test_a_damaged_header_is_loaded_or_refused(folder, models, data):
    """The length fits, so that the header itself is looked at."""
    raw = models[".safetensors"]
    end = 8 + int.from_bytes(raw[:8], "little")
    header = data.draw(damaged(raw[8:end]))
    path = folder / "header.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])
    _load(path)
    only((fx.PlanError, fx.CheckpointError), read_weights, str(path))


@pytest.mark.parametrize("how", [damaged, misshapen])
@given(data=st.data())
def test_a_damaged_index_is_loaded_or_refused(folder, models, how, data):
    path = folder / "split" / "damaged.safetensors.index.json"
    raw = (folder / "split" / "model.safetensors.index.json").read_bytes()
    if how is damaged:
        path.write_bytes(data.draw(damaged(raw)))
    else:
        path.write_text(json.dumps(data.draw(misshapen(json.loads(raw))), default=str))
    _load(path)
    only((fx.PlanError, fx.CheckpointError), read_weights, str(path))


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4,
    "hidden_size": 64, "text_config": {"num_key_value_heads": 2, "head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("how", [damaged, misshapen])
@given(data=st.data())
def test_a_damaged_config_of_a_model_is_read_or_refused(folder, models, how, data):
    path = folder / "whole" / "config.json"
    if how is damaged:
        path.write_bytes(data.draw(damaged(json.dumps(CONFIG).encode())))
    else:
        path.write_text(json.dumps(data.draw(misshapen(CONFIG)), default=str))
    only((fx.PlanError, fx.CheckpointError), read_weights, str(folder / "whole"))


# Checkpoints of fxtrain


@pytest.fixture(scope="module")
def saved(folder):
    """A checkpoint of one rank."""
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(small_net(), ctx, optimizer=torch.optim.AdamW)
        return Path(fx.save(folder / "saved", ctx, model, extra={"a": torch.ones(3)}).path)


def _restore(path):
    with fx.detect(env={}, device="cpu") as ctx:
        fx.restore(path, ctx, fx.wrap(small_net(), ctx, optimizer=torch.optim.AdamW))


@given(data=st.data())
def test_a_damaged_data_file_is_found(saved, data):
    path = next(saved.glob("*.safetensors"))
    whole = path.read_bytes()
    changed = data.draw(damaged(whole))
    with replaced(path, lambda _: changed):
        assert only(fx.CheckpointError, fx.checkpoint.verify, saved) == (changed == whole)
        assert only(fx.CheckpointError, _restore, saved) or changed != whole
