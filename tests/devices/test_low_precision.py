"""Quantized weights and recipes of float8 on a GPU: what its kernels compute, files, sizes."""

import importlib.util

import attrs
import pytest
import torch

import fxtrain as fx
from fxtrain.precision.quantizing import stored_tensors
from tests.cluster._float8 import batches, plan_of, train, wrapped
from tests.devices._device import STAND_IN, expect_warnings, is_gpu
from tests.precision._records import RECORDS, frozen_mlp, marked

pytestmark = pytest.mark.timeout(300)

# Formats that no CPU computes.
ON_GPUS = {
    "float8 dynamic": fx.Torchao(weights="float8", activations="float8"),
    "int4 128": fx.Torchao(weights="int4", group=128),
}
ERRORS = {"nf4": 0.2, "fp4": 0.2, "int4": 0.2, "int4 128": 0.2}
X = torch.randn(32, 128, generator=torch.Generator().manual_seed(2))
RECIPES = {
    "tensorwise": (fx.Float8(), (8, 9)),
    "rowwise": (fx.Float8(scaling="rowwise"), (8, 9)),
    "rowwise_with_gw_hp": (fx.Float8(scaling="rowwise_with_gw_hp"), (8, 9)),
    "mxfp8": (fx.MX(), (10, 0)),
    "nvfp4": (fx.MX(format="nvfp4"), (10, 0)),
}


def _net(device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        layers = [torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128)]
        return torch.nn.Sequential(*layers, torch.nn.Linear(128, 8)).to(torch.bfloat16).eval()


def _quantized(ctx, record, folder):
    """The error of the outputs, tensors off the device, and differences of files and estimates."""
    expect_warnings()
    x = X.to(ctx.device, torch.bfloat16)
    plan = fx.Plan(quantize=record)
    with torch.no_grad():
        wanted = _net().to(ctx.device)(x).float()
        model = fx.wrap(_net(), ctx, plan)
        found = model(x).float()
        held = stored_tensors(model.module)
        elsewhere = [name for name, one in held.items() if one.device.type != ctx.device.type]
        fx.export(model, folder)
        empty = _net("meta")
        fx.load_model(folder, empty)
        other = fx.wrap(empty, ctx, plan)
        again = stored_tensors(other.module)
        differ = [name for name, one in held.items() if not torch.equal(one, again[name])]
        repeated = torch.equal(other(x).float(), found)
    sizes = sum(one.nbytes for one in held.values())
    expected = fx.big.sizes(_net("meta"), quantize=record).bytes
    error = float((found - wanted).norm() / wanted.norm())
    return error, elsewhere, differ, repeated, sizes, expected


def _formats():
    return [*marked(RECORDS), *(pytest.param(name) for name in ON_GPUS)]


@pytest.mark.parametrize("name", _formats())
def test_quantized_weights_on_the_device(gpu, name, tmp_path):
    if name in ON_GPUS:
        if STAND_IN:
            pytest.skip("a format of GPUs")
        if importlib.util.find_spec("torchao") is None:
            pytest.skip("needs fxtrain[quant]")
    if "int4" in name and not STAND_IN and importlib.util.find_spec("mslk") is None:
        pytest.skip("torchao's kernels for int4 on GPUs need mslk")
    record = {**RECORDS, **ON_GPUS}[name]
    ((error, elsewhere, differ, repeated, sizes, expected),) = gpu.run(
        _quantized, record, str(tmp_path)
    )
    assert 0 < error < ERRORS.get(name, 0.08)
    assert not elsewhere and not differ and repeated
    assert sizes == expected


def _adapted(ctx, record):
    """Losses of a head over frozen quantized layers, on the device and on the CPU."""
    expect_warnings()
    found = []
    with fx.detect({}, device="cpu") as host:
        for where in (host, ctx):
            model = fx.wrap(
                frozen_mlp(), where, fx.Plan(quantize=record),
                optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            )  # fmt: skip
            x = torch.linspace(-1, 1, 320).view(5, 64)
            loader = torch.utils.data.DataLoader(x.repeat(6, 1), batch_size=5)
            fns = fx.StepFns(model=model, loss=lambda m, b: m(b.data).square().mean())
            steps = fx.shard(loader, where, fx.Plan())
            found.append([float(fx.step(where, batch, fns).loss) for batch in steps])
            fx.unwrap(model)
    return found


@pytest.mark.parametrize("name", marked(["nf4", "bnb8", "int8", "float8"]))
def test_a_head_trains_over_quantized_layers(gpu, name):
    ((wanted, found),) = gpu.run(_adapted, RECORDS[name])
    assert found == pytest.approx(wanted, rel=0.05)
    assert found[-1] < found[0]


def _regression(ctx, plan):
    """Losses of layers whose sizes 128 divides, which nvfp4 needs, in a model in bf16."""
    model = fx.wrap(
        _net().train(), ctx, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
    )
    loader = torch.utils.data.DataLoader(X.bfloat16().repeat(8, 1), batch_size=128)
    fns = fx.StepFns(model=model, loss=lambda m, b: (m(b.data).float() - 1).square().mean())
    return [float(fx.step(ctx, batch, fns).loss) for batch in fx.shard(loader, ctx, plan)]


def _tokens(ctx, plan):
    return train(ctx, wrapped(ctx, plan), batches(ctx, plan))


def _recipe(ctx, recipe, needs):
    """Losses in bf16 and by the recipe, or the error of a GPU that lacks the format."""
    expect_warnings()
    plans = [plan_of(None, fx.Single()), plan_of(recipe, fx.Single())]
    run = _regression if getattr(recipe, "format", "") == "nvfp4" else _tokens
    if is_gpu(ctx) and torch.cuda.get_device_capability(ctx.device) < needs:
        with pytest.raises(fx.PlanError) as caught:
            run(ctx, plans[1])
        return str(caught.value)
    return [run(ctx, plan) for plan in plans]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_train_as_bf16(gpu, name):
    pytest.importorskip("torchao", reason="needs fxtrain[quant]")
    recipe, needs = RECIPES[name]
    if STAND_IN and name == "nvfp4":
        pytest.skip("torchao cannot emulate nvfp4")
    if STAND_IN:
        recipe = attrs.evolve(recipe, emulate=True)
    (found,) = gpu.run(_recipe, recipe, needs)
    if isinstance(found, str):
        assert "needs a GPU with" in found and "CUDA" in found
        return
    wanted, losses = found
    assert losses != wanted and wanted[-1] < 0.9 * wanted[0]
    assert losses == pytest.approx(wanted, rel=0.1 if name == "nvfp4" else 0.03)
