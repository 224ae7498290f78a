"""What carries out a strategy: torch's engines on two ranks, the module itself on one.

One GPU has NCCL at one rank only, where `fx.wrap` adds no engine. So engines are built here over a
group of one.
"""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

import fxtrain as fx
from fxtrain.backends import ddp
from fxtrain.backends.core.gradient_buckets import Reduced, StableBucketsDDP
from fxtrain.backends.fsdp.apply_fully_shard import shard_parts, units
from tests.devices._device import expect_warnings, is_gpu
from tests.devices._training import adam, net

pytestmark = pytest.mark.timeout(300)

PLANS = {
    "ddp": (fx.Plan(strategy=fx.DDP()), StableBucketsDDP),
    "fsdp": (fx.Plan(strategy=fx.FSDP(min_params=1)), FSDPModule),
}


def _engine(ctx, plan, kind):
    model = fx.wrap(net(), ctx, plan, optimizer=adam)
    return isinstance(model.engine, kind), model.engine is model.module


@pytest.mark.parametrize("name", PLANS)
def test_two_ranks_have_an_engine(two, name):
    in_place = name == "fsdp"  # which changes the module
    assert two.run(_engine, *PLANS[name]) == [(True, in_place)] * 2


@pytest.mark.parametrize("name", PLANS)
def test_one_rank_has_none(one, name):
    assert one.run(_engine, *PLANS[name]) == [(False, True)]


def _losses(module, forward, device):
    """Three updates by hand; the loss of each."""
    optimizer, out = torch.optim.SGD(module.parameters(), lr=0.1), []
    x = torch.linspace(-1, 1, 8 * 64, device=device).view(8, 64)
    for _ in range(3):
        loss = forward(x)
        optimizer.step()
        optimizer.zero_grad()
        out.append(float(loss.detach()))
    return out


def _by_hand(ctx):
    module = net().to(ctx.device)

    def forward(x):
        loss = module(x).float().square().mean()
        loss.backward()
        return loss

    return _losses(module, forward, ctx.device)


def _replicated(ctx, hook):
    expect_warnings()
    module = net().to(ctx.device)
    config = fx.DDP(hook=fx.CommHook(name=hook, power_sgd=fx.PowerSGD(start_iter=2)))
    engine = ddp._replicate(module, ctx, ctx, config)

    def forward(x):
        with Reduced(engine):
            loss = engine(x).square().mean()
            engine.before_backward(loss)
            loss.backward()
        return loss

    return _by_hand(ctx), _losses(module, forward, ctx.device), is_gpu(ctx)


@pytest.mark.parametrize("hook", ["none", "fp16", "bf16", "power_sgd"])
def test_ddp_over_a_group_of_one(nccl, hook):
    if hook == "bf16" and not torch.cuda.is_available():
        pytest.skip("torch compresses to bf16 over NCCL and XCCL only")
    ((expected, got, _),) = nccl.run(_replicated, hook)
    assert got == pytest.approx(expected, rel=1e-5 if hook == "none" else 0.05)


def _sharded(ctx):
    expect_warnings()
    module, config = net().to(ctx.device), fx.FSDP(min_params=1)
    mesh = DeviceMesh.from_group(ctx.comm.group, ctx.device.type, mesh_dim_names=("shard",))
    plan = fx.Plan(strategy=config)
    shard_parts(module, units(module, config), set(), mesh, ctx, plan)
    assert isinstance(module, FSDPModule)

    def forward(x):
        loss = module(x).float().square().mean()
        loss.backward()
        return loss

    return _by_hand(ctx), _losses(module, forward, ctx.device)


def test_fsdp_over_a_group_of_one(nccl):
    ((expected, got),) = nccl.run(_sharded)
    assert got == pytest.approx(expected, rel=1e-5)
