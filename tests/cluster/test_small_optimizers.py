"""Optimizers whose states take eight or four bits: they resume bit for bit."""

import importlib
import importlib.util
import itertools

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.precision.packed_states import unpack_value
from tests._errors import raises_code
from tests._slow import slow_after

OPTIMIZERS = {
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit", {"min_8bit_size": 4096}),
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit", {}),
    "torchao AdamW4bit": ("torchao.optim", "AdamW4bit", {}),
    "torchao AdamWFp8": ("torchao.optim", "AdamWFp8", {}),
}
INSTALLED = all(map(importlib.util.find_spec, ("bitsandbytes", "torchao")))
pytestmark = pytest.mark.skipif(not INSTALLED, reason="needs fxtrain[quant]")


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def _factory(name):
    home, kind, options = OPTIMIZERS[name]
    return lambda params: getattr(importlib.import_module(home), kind)(params, lr=0.01, **options)


def _batches(ctx, plan):
    rows = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    return fx.shard(torch.utils.data.DataLoader(rows, batch_size=2), ctx, plan)


def _loss(model, batch):
    return (model(batch.data) - batch.data).square().mean()


def _train(ctx, model, batches):
    # torchao compiles its update, for ten seconds; the same code runs without.
    with torch.compiler.set_stance("force_eager"):
        fns = fx.StepFns(model=model, loss=_loss)
        return [fx.step(ctx, batch, fns).loss.item() for batch in batches]


def _weights(model):
    return [parameter.detach().clone() for parameter in model.module.parameters()]


def _dequantized(model):
    """Every state, torchao's as plain values."""
    states = [
        value
        for state in model.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return [one.dequantize() if hasattr(one, "tensor_attrs") else one.clone() for one in states]


def _resumed(ctx, name, folder):
    """Losses and weights of a run, and of another that resumes in its middle."""
    plan = fx.Plan(strategy=fx.DDP() if ctx.world_size > 1 else fx.Single())
    model = fx.wrap(_net(), ctx, plan, optimizer=_factory(name))
    first = _train(ctx, model, itertools.islice(_batches(ctx, plan), 3))
    fx.save(folder, ctx, model, position=fx.Position())
    saved = _dequantized(model)
    rest = list(_batches(ctx, plan))[3:6]
    wanted = _train(ctx, model, rest), _weights(model)
    other = fx.wrap(_net(), ctx, plan, optimizer=_factory(name))
    fx.restore(folder, ctx, other)
    restored = _dequantized(other)
    got = _train(ctx, other, rest), _weights(other)
    return first, wanted, got, saved, restored


def _check(found):
    first, wanted, got, saved, restored = found
    assert wanted[0] == got[0] and wanted[0][-1] < first[0]
    assert all(map(torch.equal, wanted[1], got[1]))
    assert len(saved) == len(restored) and all(map(torch.equal, saved, restored))


@pytest.mark.parametrize("name", slow_after(2, OPTIMIZERS))
def test_one_rank_resumes_bit_for_bit(ctx, name, tmp_path):
    _check(_resumed(ctx, name, str(tmp_path)))


def _all_resumed(ctx, folder):
    return {name: _resumed(ctx, name, f"{folder}/{name}") for name in OPTIMIZERS}


@pytest.mark.slow
def test_replicas_resume_bit_for_bit(pair, ctx, tmp_path):
    one, other = pair.run(_all_resumed, str(tmp_path))
    for name in OPTIMIZERS:
        _check(one[name])
        _check(other[name])
        assert all(map(torch.equal, one[name][1][1], other[name][1][1]))
        alone = fx.wrap(_net(), ctx, optimizer=_factory(name))
        fx.restore(f"{tmp_path}/{name}", ctx, alone)
        assert all(map(torch.equal, _dequantized(alone), one[name][3]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_small(ctx, name):
    model = fx.wrap(_net(), ctx, optimizer=_factory(name))
    _train(ctx, model, itertools.islice(_batches(ctx, model.plan), 1))
    state = model.optimizer.state[model.module[0].weight]
    held = [value for value in state.values() if isinstance(value, torch.Tensor)]
    if "torchao" in name:
        held = [getattr(one, key) for one in held if hasattr(one, "tensor_attrs")
                for key in one.tensor_attrs]  # fmt: skip
    size = sum(one.numel() * one.element_size() for one in held)
    assert size < 0.6 * 2 * 4 * model.module[0].weight.numel()


SHARDED = [name for name in OPTIMIZERS if "torchao" in name]


def _full_states(model):
    """Every state as full, plain values, by parameter and key."""
    found = {}
    for name, parameter in model.module.named_parameters():
        for key, value in model.optimizer.state[parameter].items():
            local = getattr(value, "_local_tensor", value)
            plain = local.dequantize() if hasattr(local, "tensor_attrs") else local.clone()
            if hasattr(value, "device_mesh"):
                like = {"shape": value.shape, "stride": value.stride(), "run_check": False}
                plain = (
                    type(value)
                    .from_local(plain.contiguous(), value.device_mesh, value.placements, **like)
                    .full_tensor()
                )
            found[f"{name}.{key}"] = plain
    return found


def _resharded(ctx, name, folder, act):
    """Save under FSDP, or restore what others saved; states, and losses of two more updates."""
    plan = fx.Plan(strategy=fx.FSDP() if ctx.world_size > 1 else fx.Single())
    model = fx.wrap(_net(), ctx, plan, optimizer=_factory(name))
    batches = list(_batches(ctx, plan))
    if act == "save":
        _train(ctx, model, batches[:3])
        fx.save(folder, ctx, model, position=fx.Position())
    else:
        fx.restore(folder, ctx, model)
    kinds = {
        type(getattr(value, "_local_tensor", value)).__name__
        for state in model.optimizer.state.values() for value in state.values()
    }  # fmt: skip
    states = _full_states(model)
    return states, kinds, _train(ctx, model, batches[3:5]), _full_states(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_after(1, SHARDED))
def test_sharded_states_resume_and_reshard_bit_for_bit(pair, ctx, name, tmp_path):
    folder = str(tmp_path / "two")
    (states, kinds, losses, after), _ = pair.run(_resharded, name, folder, "save")
    assert any(kind.startswith("OptimState") for kind in kinds)
    again, _ = pair.run(_resharded, name, folder, "restore")
    assert again[2] == losses
    alone = _resharded(ctx, name, folder, "restore")
    for other, wanted in ((again[0], states), (again[3], after), (alone[0], states)):
        assert other.keys() == wanted.keys()
        assert all(torch.equal(other[key], wanted[key]) for key in wanted)
    assert alone[1] == kinds
    whole = str(tmp_path / "one")
    states = _resharded(ctx, name, whole, "save")[0]
    spread, _ = pair.run(_resharded, name, whole, "restore")
    assert all(torch.equal(spread[0][key], states[key]) for key in states)


def _caches(ctx):
    """torch's setting in an update, after it, and after one that failed and another."""
    model = fx.wrap(
        _net(), ctx, fx.Plan(strategy=fx.FSDP()), optimizer=_factory("torchao AdamW8bit")
    )
    seen = []

    def look(*_):
        seen.append(torch.compiler.config.force_disable_caches)
        if len(seen) == 3:
            raise ValueError("an update that fails")

    before = torch.compiler.config.force_disable_caches
    model.optimizer.register_step_pre_hook(look)
    batches = list(_batches(ctx, model.plan))
    _train(ctx, model, batches[:1])
    seen.append(torch.compiler.config.force_disable_caches)
    with pytest.raises(ValueError, match="fails"):
        _train(ctx, model, batches[1:2])
    seen.append(torch.compiler.config.force_disable_caches)
    _train(ctx, model, batches[2:3])
    seen.append(torch.compiler.config.force_disable_caches)
    return before, seen


def test_updates_of_shards_are_compiled_without_the_cache_of_graphs(pair):
    """It would take the states of one optimizer for those of another."""
    for before, seen in pair.run(_caches):
        assert before is False
        assert seen == [True, False, True, False, True, False]


def _rounded(ctx, folder):
    """A run of a model in bf16 with stochastic rounding, and one that resumes in its middle."""
    home = importlib.import_module("torchao.optim")

    def factory(params):
        return home._AdamW(params, lr=0.01, bf16_stochastic_round=True)

    def loss(model, batch):
        x = batch.data.bfloat16()
        return (model(x) - x).float().square().mean()

    found = []
    plan = fx.Plan(strategy=fx.FSDP() if ctx.world_size > 1 else fx.Single(), seed=1)
    for act in ("save", "restore"):
        model = fx.wrap(_net().bfloat16(), ctx, plan, optimizer=factory)
        fns = fx.StepFns(model=model, loss=loss)
        batches = list(_batches(ctx, plan))
        with torch.compiler.set_stance("force_eager"):
            if act == "save":
                for batch in batches[:2]:
                    fx.step(ctx, batch, fns)
                fx.save(folder, ctx, model, position=fx.Position())
            else:
                fx.restore(folder, ctx, model)
            losses = [fx.step(ctx, batch, fns).loss.item() for batch in batches[2:4]]
        full = [getattr(one, "full_tensor", one.clone)() for one in model.module.parameters()]
        found.append((losses, [one.detach() for one in full]))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_stochastic_rounding_resumes_bit_for_bit(pair, ctx, ranks, tmp_path):
    runs = pair.run(_rounded, str(tmp_path)) if ranks == 2 else [_rounded(ctx, str(tmp_path))]
    for (wanted, weights), (losses, found) in runs:
        assert losses == wanted
        assert all(map(torch.equal, weights, found))
        assert weights[0].dtype == torch.bfloat16


def _refused_in_shards(ctx):
    found = []
    nets = [
        ("bitsandbytes AdamW8bit", _net()),
        ("torchao AdamW4bit", nn.Linear(128, 65)),
        ("torchao AdamW8bit", _net().bfloat16()),
    ]
    for name, net in nets:
        try:
            fx.wrap(net, ctx, fx.Plan(strategy=fx.FSDP()), optimizer=_factory(name))
        except fx.PlanError as error:
            found.append(str(error))
    return found


def test_shards_that_cannot_be_resharded_are_refused_before_training(pair):
    one, other = pair.run(_refused_in_shards)
    assert one == other
    assert "bitsandbytes's AdamW8bit keeps states in blocks, but a parameter is sharded" in one[0]
    assert "AdamW4bit keeps states" in one[1]
    assert "has 65 rows, which 2 shards do not divide" in one[1]
    assert "is in bfloat16, of which torchao updates no shards" in one[2]
    assert all("Single or DDP" in text for text in one)


def test_a_state_of_an_unknown_class_is_refused():
    facts = {"class": "system", "tensors": [], "attributes": []}
    with raises_code("FX600", "'system'", "OptimState4bit"):
        unpack_value(facts, torch.zeros)
