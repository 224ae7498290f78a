"""What DeepSpeed itself saved: read whole, gone on from at other ranks, and its own converters."""

import argparse

import pytest
import torch
import torch.nn.functional as F

import fxtrain as fx
from fxtrain.interop import import_checkpoint, read_checkpoint
from fxtrain.testing import Transformer
from tests.deepspeed._ranks import grouped, on_rank, whole_state

pytestmark = pytest.mark.deepspeed


class Net(Transformer):
    """Tied, partly frozen, with a buffer that is no float."""

    def __init__(self):
        super().__init__(dtype=torch.float32, frozen=True)
        self.register_buffer("count", torch.tensor([3, 1]))
        for block in self.blocks:
            # Its gradient is zero but for rounding, of which Adam makes whole steps.
            block.attention.k.bias.requires_grad_(False)


def _train(ctx, model, updates):
    """Some of the updates of one run, whatever the number of ranks."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, Net.VOCABULARY, (5, 8, Net.LENGTH + 1), generator=generator)
    for update in updates:
        mine = tokens[update, ctx.rank :: ctx.world_size]
        logits = model(mine[:, :-1]).float().flatten(0, 1)
        fx.ops.backward(F.cross_entropy(logits, mine[:, 1:].flatten()), model)
        fx.ops.apply(model, fx.state.UpdateSpec())


def _values(model):
    return {n: p.detach().clone() for n, p in fx.unwrap(model).named_parameters()}


@on_rank
def _saved(ctx, plan, folder):
    """Save after three updates; the state then, what zero_to_fp32 reads, and the end."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    model = fx.wrap(Net(), ctx, plan, optimizer=grouped)
    _train(ctx, model, range(3))
    model.engine.save_checkpoint(folder, tag="three")
    if plan.strategy.gather_16bit_weights:
        model.engine.save_16bit_model(f"{folder}/half")
    tensors, facts = whole_state(ctx, model)
    theirs = None
    if ctx.is_main and plan.strategy.stage:
        theirs = get_fp32_state_dict_from_zero_checkpoint(folder)
    _train(ctx, model, range(3, 5))
    return tensors, facts["optimizers"][0], theirs, _values(model)


@on_rank
def _resumed(ctx, plan, folder):
    model = fx.wrap(Net(), ctx, plan, optimizer=grouped)
    assert fx.restore(folder, ctx, model).position.updates == 3
    _train(ctx, model, range(3, 5))
    return _values(model)


CASES = {
    "stage 0": (fx.DeepSpeed(stage=0), "fp32", fx.DDP(), 1),
    "stage 1": (fx.DeepSpeed(stage=1), "fp32", fx.DeepSpeed(stage=3), 4),
    "stage 2, bf16": (fx.DeepSpeed(stage=2), "bf16", fx.DeepSpeed(stage=2), 2),
    "stage 3": (fx.DeepSpeed(stage=3), "fp32", fx.DeepSpeed(stage=2), 1),
    "stage 3, bf16": (
        fx.DeepSpeed(stage=3, gather_16bit_weights=True),
        "bf16",
        fx.DeepSpeed(stage=3),
        2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_engine_saved_is_read_whole_and_gone_on_from(pair, clusters, tmp_path, name):
    strategy, precision, other, ranks = CASES[name]
    plan = fx.Plan(strategy=strategy, precision=precision)
    tensors, facts, theirs, end = pair.run(_saved, plan, str(tmp_path / "theirs"))[0]
    found = read_checkpoint(tmp_path / "theirs")
    assert found.updates == 3
    names = {name.removeprefix("module.") for name in tensors if name.startswith("module.")}
    assert found.models[0].keys() | found.tied.keys() == names
    for key, value in found.models[0].items():
        wanted = tensors[f"module.{key}"]
        assert torch.equal(value, wanted if value.dtype == wanted.dtype else wanted.to(value.dtype))
    for key, value in (theirs or {}).items():  # at stage 1 without frozen ones
        assert torch.equal(value.float(), found.models[0][found.tied.get(key, key)].float())
    if strategy.stage:
        assert [group["params"] for group in found.optimizers[0]["param_groups"]] == [
            group["params"] for group in facts["groups"]
        ]
        for key, parts in found.optimizers[0]["state"].items():
            for part, value in parts.items():
                assert torch.equal(value, tensors[f"optimizer.0.{key}.{part}"])
    if strategy.gather_16bit_weights:
        half = torch.load(tmp_path / "theirs" / "half" / "pytorch_model.bin", weights_only=True)
        assert all(torch.equal(half[n], t.to(half[n].dtype)) for n, t in found.models[0].items())
        assert half["gain"].dtype == torch.bfloat16
    import_checkpoint(
        tmp_path / "theirs", tmp_path / "ours", module=Net(), position=fx.Position(updates=3)
    )
    plan = fx.Plan(strategy=other, precision=precision)
    for got in clusters[ranks].run(_resumed, plan, str(tmp_path / "ours")):
        for key, value in end.items():
            torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-5)


@on_rank
def _by_universal_format(ctx, plan, folder):
    """Convert what was saved as DeepSpeed's documentation says, and let the engine load it."""
    from deepspeed.checkpoint import ds_to_universal

    options = argparse.Namespace(
        input_folder=f"{folder}/three",
        output_folder=f"{folder}/three_universal",
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with fx.ops.main_first(ctx):
        if ctx.is_main:
            ds_to_universal.main(options)
    model = fx.wrap(Net(), ctx, plan, optimizer=grouped)
    model.engine.load_checkpoint(folder, tag="three_universal")
    _train(ctx, model, range(3, 5))
    return _values(model)


# Stage 3 is not among them: with two parameter groups the engine went on a little otherwise.
def test_the_engine_goes_on_at_other_ranks_through_the_universal_format(pair, clusters, tmp_path):
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=2))
    end = pair.run(_saved, plan, str(tmp_path))[0][-1]
    loading = fx.DeepSpeed(stage=2, config={"checkpoint": {"load_universal": True}})
    for got in clusters[4].run(_by_universal_format, fx.Plan(strategy=loading), str(tmp_path)):
        for key, value in end.items():
            torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-5)
