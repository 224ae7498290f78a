"""Updates on the host by torchao, refused where there is no accelerator; see tests/devices."""

import importlib
import importlib.util

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.backends.core.optimizers import make_optimizers
from fxtrain.backends.deepspeed.strategy import DEEPSPEED_STRATEGY
from fxtrain.backends.xla.strategy import XLA_STRATEGY
from tests._errors import raises_code

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs fxtrain[quant]"
)


def _net():
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def _offload(params):
    library = importlib.import_module("torchao.optim")
    return library.CPUOffloadOptimizer(params, torch.optim.AdamW, lr=0.01)


class _Offloaded:
    """What torchao's class has, without the accelerator that its constructor needs."""

    def __new__(cls, params, device="cpu"):
        library = importlib.import_module("torchao.optim")
        made = library.CPUOffloadOptimizer.__new__(library.CPUOffloadOptimizer)
        made.device, made.d_opt, made.d_param_groups = device, None, []
        made.param_d2h_map = {one: one.detach().clone() for one in params}
        made.optim_dict = {one: torch.optim.SGD([host]) for one, host in made.param_d2h_map.items()}
        return made


PLANS = {
    "FSDP": fx.Plan(strategy=fx.FSDP()),
    "PP": fx.Plan(strategy=fx.PP()),
    "Offload": fx.Plan(strategy=fx.Offload(memory={"cpu": "1GiB"})),
}


@pytest.mark.parametrize("name", PLANS)
def test_updates_on_the_host_are_refused_by_other_strategies(ctx, name):
    net = _net()
    if name == "Offload":
        net.requires_grad_(False)[0].requires_grad_()
    with raises_code("FX200", name, "torchao"):
        fx.wrap(net, ctx, PLANS[name], optimizer=_Offloaded)


@pytest.mark.parametrize("strategy", [DEEPSPEED_STRATEGY, XLA_STRATEGY], ids=lambda one: one.name)
def test_updates_on_the_host_are_refused_by_engines(ctx, strategy):
    with raises_code("FX200", strategy.name, "torchao"):
        make_optimizers(_Offloaded, _net(), ctx, strategy)


def test_another_version_of_torchao_is_refused(ctx):
    with raises_code("FX200", "0.18"):
        fx.wrap(_net(), ctx, optimizer=_Offloaded)
