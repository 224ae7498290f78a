"""The dtype of parameters under mixed precision, for models that were loaded in half precision."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.backends.core.optimizers import local_optimizer
from fxtrain.state import Unit
from fxtrain.testing.training import on_mesh
from tests._errors import raises_code
from tests._slow import slow_after
from tests.cluster._models import PIPELINES
from tests.profiling._dry_runs import DRY_DDP

HALF, FULL = torch.bfloat16, torch.float32
TENSOR = fx.TP(
    styles=(fx.Style(modules="1", style="colwise"), fx.Style(modules="2", style="rowwise"))
)
RESIDENT = fx.state.Placement(units=(Unit(name="", device="cpu"),))
ROWS = TensorDataset(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)))
PLANS = {
    "single": (1, fx.Plan(precision="bf16"), fx.Mesh()),
    "ddp": (2, fx.Plan(precision="bf16"), fx.Mesh()),
    "sharded optimizer": (
        2,
        fx.Plan(precision="bf16", strategy=fx.DDP(shard_optimizer=True)),
        fx.Mesh(),
    ),
    "fsdp": (2, fx.Plan(precision="bf16", strategy=fx.FSDP(min_params=1)), fx.Mesh()),
    "fsdp's own dtype": (2, fx.Plan(strategy=fx.FSDP(param_dtype="bf16")), fx.Mesh()),
    "tensor": (
        2,
        fx.Plan(precision="bf16", strategy=fx.FSDP(mode="none", tensor=TENSOR)),
        fx.Mesh(tensor=2),
    ),
    "pipeline": (
        2,
        fx.Plan(precision="bf16", strategy=fx.PP(split=("2",)), accumulate=2),
        fx.Mesh(pipeline=2),
    ),
    "offload": (1, fx.Plan(precision="bf16", strategy=fx.Offload(placement=RESIDENT)), fx.Mesh()),
}
CASES = [pytest.param(name, marks=PIPELINES if name == "pipeline" else ()) for name in PLANS]


def _net(dtype=HALF):
    """Two layers with one weight, two more, and a frozen one."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    net[4].weight = net[0].weight
    net[3].requires_grad_(False)
    return net.to(dtype)


def _adam(params):
    return torch.optim.Adam(params, lr=3e-3)


def _loss(model, batch):
    (rows,) = batch
    return (model(rows).float() - rows).square().mean()


def _train(model, ctx, plan, epochs=1):
    loader = fx.shard(DataLoader(ROWS, batch_size=2), ctx, plan)
    fns = fx.StepFns(model=model, loss=_loss)
    for epoch in loader.epochs(epochs):
        for batch in epoch:
            report = fx.step(ctx, batch, fns)
    return report.position


def _dtypes(tensors):
    return {name: tensor.dtype for name, tensor in tensors}


def _on(ctx, mesh, fn, *args):
    with on_mesh(ctx, mesh) as placed:
        return fn(placed, *args)


def _outcome(ctx, plan, folder):
    """What a model in bf16 consists of while it trains, in files, and afterwards."""
    net = _net()
    tied = net[0].weight is net[4].weight
    model = fx.wrap(net, ctx, plan, optimizer=_adam)
    position = _train(model, ctx, plan)
    found = {
        "live": _dtypes(model.module.named_parameters()),
        "states": {
            value.dtype
            for optimizer in model.optimizers
            for state in local_optimizer(optimizer).state.values()
            for value in state.values()
            if torch.is_tensor(value)
        },
        "weights": _dtypes(fx.weights(model, device="cpu")),
    }
    fx.save(f"{folder}/run", ctx, model, position=position)
    fx.export(model, f"{folder}/out")
    fx.load_model(f"{folder}/out", model)  # of the model's own dtype, without a cast
    with fx.gathered(model) as whole:
        found["gathered"] = _dtypes(whole.named_parameters())
    net = fx.unwrap(model)
    found["unwrapped"] = _dtypes(net.named_parameters())
    found["tied"] = (tied, net[0].weight is net[4].weight)
    return found


@pytest.mark.parametrize("name", slow_after(4, CASES))
def test_trained_parameters_are_fp32_under_mixed_precision(clusters, name, tmp_path):
    ranks, plan, mesh = PLANS[name]
    for found in clusters[ranks].run(_on, mesh, _outcome, plan, str(tmp_path)):
        assert found["states"] == {FULL}
        for tensor, dtype in found["live"].items():
            assert dtype == (HALF if tensor.startswith("3.") else FULL), tensor
        for where in ("weights", "gathered", "unwrapped"):
            assert found[where]
            assert set(found[where].values()) == {HALF}, where
        assert found["tied"] == (True, True)
    with fx.checkpoint.saved_weights(tmp_path / "run").open() as saved:
        kinds = {tensor: entry.dtype for tensor, entry in saved.entries.items()}
    assert {kinds["1.weight"], kinds["3.weight"]} == {FULL, HALF}


def _values_after(ctx, plan, dtype):
    model = fx.wrap(_net(dtype), ctx, plan, optimizer=_adam)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(HALF))
    _train(model, ctx, plan, epochs=2)
    return [parameter.detach().float() for parameter in model.parameters()]


def test_a_model_in_bf16_trains_as_one_in_fp32_with_its_values():
    plan = fx.Plan(precision="bf16")
    with fx.detect(env={}, device="cpu") as ctx:
        loaded, plain = (_values_after(ctx, plan, dtype) for dtype in (HALF, FULL))
        kept = _values_after(ctx, fx.Plan(precision=KEEP), HALF)
    for mine, other in zip(loaded, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-2)
    assert any(not torch.equal(mine, other) for mine, other in zip(loaded, kept, strict=True))


KEEP = fx.Precision(compute="bf16", params="keep")


def _wrapped_dtypes(net, plan, **how):
    with fx.detect(env={}, device="cpu") as ctx:
        return _dtypes(fx.wrap(net, ctx, plan, **how).module.named_parameters())


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        (fx.Plan(precision=KEEP), {"optimizer": _adam}),
        (fx.Plan(), {"optimizer": _adam}),
        (fx.Plan(precision="bf16"), {}),
    ],
    ids=["kept", "no mixed precision", "not trained"],
)
def test_parameters_keep_their_dtype_where_nothing_asks_for_another(plan, how):
    assert set(_wrapped_dtypes(_net(), plan, **how).values()) == {HALF}


def test_one_log_line_says_what_became_fp32(caplog):
    with caplog.at_level(logging.INFO, "fxtrain.plan"):
        _wrapped_dtypes(_net(), fx.Plan(precision="bf16"), optimizer=_adam)
        _wrapped_dtypes(_net(FULL), fx.Plan(precision="bf16"), optimizer=_adam)
    (line,) = caplog.messages
    assert "7 trained parameters" in line and "params='keep'" in line


def test_statistics_of_a_normalization_follow_its_parameters():
    net = nn.Sequential(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4)).to(HALF)
    plan = fx.Plan(precision="bf16")
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(net, ctx, plan, optimizer=_adam)
        model(torch.ones(3, 2, 5))
        assert net[1].running_mean.dtype == FULL
        fx.unwrap(model)
    assert net[1].running_mean.dtype == HALF


@pytest.mark.parametrize("steps", [0, 1])
def test_an_optimizer_that_exists_already_updates_in_fp32(steps):
    net = _net()
    optimizer = _adam(net.parameters())
    plan = fx.Plan(precision="bf16")
    for _ in range(steps):
        (net(ROWS.tensors[0].to(HALF)).float().square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(net, ctx, plan, optimizer=optimizer)
        _train(model, ctx, plan)
    states = [state["exp_avg"].dtype for state in optimizer.state.values()]
    assert states and set(states) == {FULL}


def test_a_failed_wrap_gives_the_dtypes_back():
    net = _net()

    def fails(params):
        raise RuntimeError("no optimizer today")

    with fx.detect(env={}, device="cpu") as ctx, pytest.raises(RuntimeError, match="today"):
        fx.wrap(net, ctx, fx.Plan(precision="bf16"), optimizer=fails)
    assert set(_dtypes(net.named_parameters()).values()) == {HALF}


def test_a_checkpoint_of_parameters_that_were_kept_says_how_to_restore_it(tmp_path):
    with fx.detect(env={}, device="cpu") as ctx:
        fx.save(tmp_path, ctx, fx.wrap(_net(), ctx, fx.Plan(precision=KEEP), optimizer=_adam))
        model = fx.wrap(_net(), ctx, fx.Plan(precision="bf16"), optimizer=_adam)
        with raises_code("FX603", "params='keep'"):
            fx.restore(tmp_path, ctx, model)


def test_weights_of_a_checkpoint_fill_fp32_parameters_without_a_cast(tmp_path):
    plan = fx.Plan(precision="bf16")
    with fx.detect(env={}, device="cpu") as ctx:
        saved = fx.wrap(_net(), ctx, plan, optimizer=_adam)
        position = _train(saved, ctx, plan)
        fx.save(tmp_path, ctx, saved, position=position)
        model = fx.wrap(_net(), ctx, plan, optimizer=_adam)
        fx.load_model(fx.checkpoint.saved_weights(tmp_path), model)
        for mine, other in zip(model.parameters(), saved.parameters(), strict=True):
            assert torch.equal(mine, other)


def _loop_in_bf16(ctx):
    plan = fx.Plan(precision="bf16")
    _train(fx.wrap(_net(), ctx, plan, optimizer=_adam), ctx, plan)


@DRY_DDP
def test_a_dry_run_counts_fp32_parameters_and_states():
    memory = fx.dry_run(_loop_in_bf16, world=2).memory
    trained, frozen = 224, 72
    assert memory.parameters == 4 * trained + 2 * frozen
    assert memory.gradients == 4 * trained
    assert memory.optimizer >= 8 * trained
