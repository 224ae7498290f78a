"""Conversion to layers of Transformer Engine and back, over a stand-in: it needs a GPU."""

import sys

import attrs
import pytest
import torch
from torch import nn

import fxtrain as fx
from tests._errors import raises_code
from tests.cluster._float8 import batches, kinds, net, plan_of, train, wrapped
from tests.precision._engine import install

PLAN = plan_of(fx.TE(history=4, margin=1), fx.Single())


def test_layers_and_norms_are_converted_and_back(ctx, monkeypatch):
    install(monkeypatch)
    module = net()
    parts, names = [id(one) for one in module.modules()], list(module.state_dict())
    before = {name: type(part) for name, part in module.named_modules()}
    model = fx.wrap(module, ctx, PLAN)
    block = module.blocks[0]
    changed = (block.up, block.down, block.attention.q, block.norm_1, module.norm)
    assert all(type(one).__mro__[1].__module__ == "tests.precision._engine" for one in changed)
    assert type(module.head).__name__ == "Head" and list(module.state_dict()) == names
    fx.unwrap(model)
    assert before == {name: type(part) for name, part in module.named_modules()}
    assert parts == [id(one) for one in module.modules()] and kinds(module) == kinds(net())
    assert "forward" not in vars(module)


def test_the_region_is_entered_in_training_only(ctx, monkeypatch):
    entered = install(monkeypatch)
    model = wrapped(ctx, PLAN)
    rows = torch.zeros(2, 8, dtype=torch.int64)
    model(rows)
    model.eval()(rows)
    (first, recipe, group), (second, *_) = entered
    assert (first, second, group) == (True, False, None)
    assert type(recipe).__name__ == "DelayedScaling"
    assert recipe.fields["amax_history_len"] == 4 and recipe.fields["margin"] == 1
    assert recipe.fields["fp8_format"].name == "HYBRID"


def test_scales_are_restored_bit_for_bit(ctx, monkeypatch, tmp_path):
    install(monkeypatch)
    model, some = wrapped(ctx, PLAN), list(batches(ctx, PLAN, 5))
    train(ctx, model, some[:3])
    fx.save(tmp_path / "a", ctx, model, position=fx.Position())
    rest = train(ctx, model, some[3:])
    other = wrapped(ctx, PLAN, seed=5)
    fx.restore(tmp_path / "a", ctx, other)
    kept = other.module.blocks[1].up.fp8_meta["scaling_fwd"]
    assert kept.amax_history.count_nonzero() == 6 and kept.scale.gt(1).all()
    assert train(ctx, other, some[3:]) == rest
    forgetful = wrapped(ctx, PLAN, seed=5)
    fx.restore(tmp_path / "a", ctx, forgetful)
    for part in forgetful.module.modules():
        if hasattr(part, "fp8_meta"):
            part.init_fp8_meta_tensors(part.fp8_meta["recipe"])
    assert train(ctx, forgetful, some[3:]) != rest
    fx.restore(
        tmp_path / "a", ctx, wrapped(ctx, plan_of(None, fx.Single()))
    )  # without layers of it


def test_a_checkpoint_without_scales_is_restored(ctx, monkeypatch, tmp_path):
    install(monkeypatch)
    fx.save(tmp_path / "a", ctx, wrapped(ctx, plan_of(None, fx.Single())))
    model = wrapped(ctx, PLAN, seed=5)
    fx.restore(tmp_path / "a", ctx, model)
    wanted = net().state_dict()
    assert all(torch.equal(value, wanted[key]) for key, value in model.module.state_dict().items())


def test_a_device_without_the_format_is_named(ctx, monkeypatch):
    install(monkeypatch, available=(False, "Device compute capability 9.0 required."))
    module = net()
    with raises_code("FX200", "CUDA", "9.0"):
        fx.wrap(module, ctx, plan_of(fx.TE(scaling="block"), fx.Single()))
    assert kinds(module) == kinds(net()) and type(module.norm) is nn.LayerNorm


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch reads it
def test_blocks_compile_inside_the_region(ctx, monkeypatch):
    entered = install(monkeypatch)
    plan = attrs.evolve(PLAN, compile=fx.Compile(blocks=["Block"], backend="eager"))
    model, some = wrapped(ctx, plan), list(batches(ctx, plan, 2))
    assert train(ctx, model, some) == train(ctx, wrapped(ctx, PLAN), some)
    assert [enabled for enabled, *_ in entered] == [True] * 4


def test_a_missing_package_names_its_pip_command(ctx, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with raises_code("FX800", "'fxtrain[te]'"):
        fx.wrap(net(), ctx, PLAN)
