"""Norms of any kind, over all or some of the parameters, however they are sharded."""

import math

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain import ops
from fxtrain.testing.training import on_mesh
from tests._errors import raises_code

TENSOR = fx.TP(
    styles=(fx.Style(modules="0", style="colwise"), fx.Style(modules="1", style="rowwise"))
)
FP16 = fx.Precision(compute="fp16", scale=fx.LossScale(initial=64.0))
PLANS = {
    "ddp": (fx.Plan(), fx.Mesh()),
    "fsdp": (fx.Plan(strategy=fx.FSDP(min_params=1)), fx.Mesh()),
    "tensor": (fx.Plan(strategy=fx.FSDP(mode="none", tensor=TENSOR)), fx.Mesh(tensor=2)),
}


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 3)).double()


def _rows():
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _clipped(ctx, plan, mesh, p, part):
    with on_mesh(ctx, mesh) as placed:
        model = fx.wrap(_net(), placed, plan)
        with ops.sync(model, enabled=True):
            ops.backward(model(_rows()).square().sum(), model)
        chosen = None if part is None else model.module[part].parameters()
        norm = ops.clip_norm(model, 0.5, norm_type=p, parameters=chosen)
        return float(_full(norm)), [_full(one.grad).clone() for one in model.module.parameters()]


@pytest.mark.parametrize("part", [None, 1])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("name", list(PLANS))
def test_norms_are_those_of_torch_on_one_process(pair, name, p, part):
    net = _net()
    net(_rows()).square().sum().backward()
    chosen = net.parameters() if part is None else net[part].parameters()
    norm = nn.utils.clip_grad_norm_(chosen, 0.5, p)
    plan, mesh = PLANS[name]
    for mine, grads in pair.run(_clipped, plan, mesh, p, part):
        assert mine == pytest.approx(float(norm), rel=1e-9)
        for grad, parameter in zip(grads, net.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-6, atol=1e-9)


def _norms_of_updates(ctx, plan):
    """Norms of three updates, by an optimizer of the last layer."""
    last = lambda params: torch.optim.SGD([p for n, p in params.named() if n[0] == "2"], lr=0.01)  # noqa: E731
    model = fx.wrap(_net().float(), ctx, plan, optimizer=last)
    fns = fx.StepFns(model, lambda model, batch: model(batch.data).square().sum())
    batch = fx.batch(_rows().float(), ctx, plan)
    return [fx.step(ctx, batch, fns).grad_norm.item() for _ in range(3)]


@pytest.mark.parametrize("precision", [fx.Precision(), FP16])
@pytest.mark.parametrize("strategy", [fx.DDP(), fx.FSDP()])
def test_gradients_that_no_optimizer_takes_do_not_add_up_over_updates(pair, strategy, precision):
    net, wanted = _net().float(), []
    optimizer = torch.optim.SGD(net[2].parameters(), lr=0.01)
    for _ in range(3):
        net.zero_grad()
        net(_rows().float()).square().sum().backward()
        wanted.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
        optimizer.step()
    plan = fx.Plan(strategy=strategy, precision=precision, clip_norm=0.5)
    for norms in pair.run(_norms_of_updates, plan):
        assert norms == pytest.approx(wanted, rel=1e-2 if precision == FP16 else 1e-5)


def test_parameters_of_another_model_and_norms_that_are_none_are_refused():
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(_net(), ctx)
        with raises_code("FX500", "2 of these 2"):
            ops.clip_norm(model, 1.0, parameters=_net()[0].parameters())
        with raises_code("FX500", "norm_type"):
            ops.clip_norm(model, 1.0, norm_type=0)


def test_an_infinite_bound_measures_the_norm_and_clips_nothing(pair):
    for norm, weights in pair.run(_updated, fx.Plan(clip_norm=math.inf)):
        none = _updated(fx.DistContext(), fx.Plan())
        assert norm > 0 and none[0] is None
        torch.testing.assert_close(weights, none[1], rtol=0, atol=0)


def _updated(ctx, plan):
    """The norm of an update, and the weights after it."""
    model = fx.wrap(_net(), ctx, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    report = fx.update(ctx, fx.batch(_rows(), ctx), model, model(_rows()).square().mean())
    norm = None if report.grad_norm is None else float(report.grad_norm)
    return norm, [one.detach().clone() for one in model.module.parameters()]


@pytest.mark.parametrize("form", ["json", "toml", "yaml"])
def test_files_hold_an_infinite_bound(form):
    plan = fx.Plan(clip_norm=math.inf, clip_value=math.inf)
    assert fx.state.loads(fx.state.dumps(plan, form), fx.Plan, form) == plan
    assert (
        fx.given_plan(env={"FXTRAIN_PLAN": '{"clip_norm": Infinity}'}).clip_norm == plan.clip_norm
    )
