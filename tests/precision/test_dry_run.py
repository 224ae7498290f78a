"""Dry runs predict what training takes with quantized weights and with layers in float8."""

import functools
import json

import pytest
import torch

import fxtrain as fx
from fxtrain.cli import Exit, main
from fxtrain.precision.quantizing import quantize_layers, stored_tensors
from fxtrain.precision.recipe_layers import recipe_targets
from fxtrain.profiling.rehearsal import axis_namer, figures
from fxtrain.profiling.watching import LoopRecorder, StepsConverged
from fxtrain.state.mesh import resolve_mesh
from tests._slow import slow_after
from tests.cluster._float8 import RECIPES, loss, net, plan_of
from tests.cluster.test_small_optimizers import OPTIMIZERS, _factory, _net
from tests.precision._records import RECORDS, TRAINABLE, frozen_mlp, marked, mlp
from tests.profiling._real import recording_real


def _adapters(plan, ctx):
    model = fx.wrap(frozen_mlp(), ctx, plan, optimizer=torch.optim.AdamW)
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
    loader = torch.utils.data.DataLoader(torch.ones(64, 64), batch_size=4)
    for batch in fx.shard(loader, ctx, plan):
        fx.step(ctx, batch, fns)


def _transformer(plan, ctx):
    model = fx.wrap(net(), ctx, plan, optimizer=torch.optim.AdamW)
    tokens = torch.zeros(320, 8, dtype=torch.int64)
    for batch in fx.shard(torch.utils.data.DataLoader(tokens, batch_size=16), ctx, plan):
        fx.step(ctx, batch, fx.StepFns(model=model, loss=loss))


def _small_states(name, ctx):
    model = fx.wrap(_net(), ctx, optimizer=_factory(name))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
    loader = torch.utils.data.DataLoader(torch.ones(64, 64), batch_size=4)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its update for ten seconds
        for batch in fx.shard(loader, ctx):
            fx.step(ctx, batch, fns)


def _measured(loop):
    """What one real rank takes."""
    watch = LoopRecorder(most=4)
    with (
        fx.detect(env={}, device="cpu") as ctx,
        recording_real(watch),
        pytest.raises(StepsConverged),
    ):
        loop(ctx)
    return figures(watch, axis_namer(resolve_mesh(fx.Mesh(), 1), 0))


@pytest.mark.parametrize("name", slow_after(4, marked(TRAINABLE)))
def test_quantized_weights_take_what_was_predicted(name):
    quantize_layers(mlp(), RECORDS[name], torch.device("cpu"))  # tables that the libraries keep
    loop = functools.partial(_adapters, fx.Plan(quantize=RECORDS[name]))
    told, got = fx.dry_run(loop, world=1), _measured(loop)
    assert told.problems == ()
    assert told.memory == got["memory"] and told.peak == got["peak"]
    wrapped = frozen_mlp()
    quantize_layers(wrapped, RECORDS[name], torch.device("cpu"))
    assert told.memory.parameters == sum(one.nbytes for one in stored_tensors(wrapped).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_after(1, ["rowwise", "tensorwise", "mxfp8"]))
def test_layers_in_float8_take_what_was_predicted(name):
    pytest.importorskip("torchao", reason="needs fxtrain[quant]")
    loop = functools.partial(_transformer, plan_of(RECIPES[name], fx.Single()))
    told, got = fx.dry_run(loop, world=1), _measured(loop)
    assert told.problems == ()
    assert told.memory == got["memory"] and told.peak == got["peak"]


def test_a_dry_run_keeps_the_tables_of_bitsandbytes(monkeypatch):
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs fxtrain[quant]")
    monkeypatch.setattr(functional, "name2qmap", {})
    fx.dry_run(functools.partial(_adapters, fx.Plan(quantize=fx.Bnb4())), world=1)
    real = mlp()
    quantize_layers(real, fx.Bnb4(), torch.device("cpu"))
    plain = (torch.Tensor, torch.nn.Parameter)
    assert all(type(one) in plain for one in stored_tensors(real).values())


@pytest.mark.parametrize("name", slow_after(2, OPTIMIZERS))
def test_a_dry_run_of_small_states_leaves_no_trace(name):
    """Libraries keep tables, which must not be those without values."""
    pytest.importorskip("bitsandbytes", reason="needs fxtrain[quant]")
    homes = ("torchao.optim.subclass_4bit", "torchao.optim.subclass_8bit")
    modules = [pytest.importorskip(home, reason="needs fxtrain[quant]") for home in homes]
    tables = [one for m in modules for one in (m.get_qmap_signed, m.get_qmap_unsigned)]
    for table in tables:
        table.cache_clear()
    loop = functools.partial(_small_states, name)
    told, got = fx.dry_run(loop, world=1), _measured(loop)
    assert told.problems == ()
    assert told.memory.optimizer == got["memory"].optimizer
    assert [table()[-1] for table in tables] == [1.0] * 4


@pytest.mark.parametrize("name", marked([name for name in RECORDS if name != "int8 dynamic"]))
def test_estimates_are_the_bytes_that_are_held(name, tmp_path, capsys):
    fx.state.write_plan(fx.Plan(quantize=RECORDS[name]), tmp_path / "plan.toml")
    words = ["estimate-memory", "tests.precision._records:mlp", "--json", "--optimizer", "sgd"]
    assert main([*words, "--plan", str(tmp_path / "plan.toml")]) == Exit.WELL
    told = json.loads(capsys.readouterr().out)
    real = mlp()
    quantize_layers(real, RECORDS[name], torch.device("cpu"))
    held = {id(one): one.nbytes for one in stored_tensors(real).values()}
    assert told["inference_bytes"]["weights"] == told["stored_bytes"] == sum(held.values())
    assert told["parameters"] == sum(one.numel() for one in mlp().parameters())
    plain = sum(one.nbytes for one in real.parameters() if one.requires_grad)
    sizes = told["training_bytes"]
    assert sizes["gradients"] == plain and sizes["parameters"] + sizes["buffers"] == sum(
        held.values()
    )


def test_an_estimate_knows_layers_in_float8(tmp_path, capsys):
    pytest.importorskip("torchao", reason="needs fxtrain[quant]")
    found = {}
    for name, recipe in {"bf16": None, "fp8": fx.Float8()}.items():
        fx.state.write_plan(plan_of(recipe), tmp_path / "plan.toml")
        words = ["estimate-memory", "tests.cluster._float8:net", "--json", "--plan"]
        assert main([*words, str(tmp_path / "plan.toml")]) == Exit.WELL
        found[name] = json.loads(capsys.readouterr().out)["training_bytes"]
    names = recipe_targets(net(), fx.Float8())[0]
    linears = [net().get_submodule(name).weight.numel() for name in names]
    saved = found["bf16"]["working"] - found["fp8"]["working"]
    assert saved == 2 * sum(linears) - max(linears)
    assert main([*words, str(tmp_path / "plan.toml"), "--precision", "bf16"]) == Exit.WRONG
    assert "--plan and --precision were passed" in capsys.readouterr().err
