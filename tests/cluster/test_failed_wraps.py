"""A wrap that fails leaves the module as it was."""

import pytest
import torch
from torch import nn

import fxtrain as fx


def _net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))


def _attributes(net):
    return [
        (type(part), sorted(vars(part)), len(part._forward_pre_hooks)) for part in net.modules()
    ]


def _failed(ctx, plan, fails):
    """What `wrap` raises where the optimizer factory fails on some ranks, and the module after."""
    net = _net()
    before = _attributes(net)

    def factory(params):
        if ctx.rank in fails:
            raise ValueError("no such optimizer")
        return torch.optim.SGD(params, lr=0.1)

    words = ""
    try:
        fx.wrap(net, ctx, plan, optimizer=factory)
    except (ValueError, fx.CollectiveError) as error:
        words = f"{type(error).__name__}: {error}"
    values = {name: p.tolist() for name, p in net.named_parameters() if type(p) is nn.Parameter}
    again = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    restored = _attributes(fx.unwrap(again)) == before
    return words, values, restored


@pytest.mark.parametrize("fails", [(0, 1), (1,)])
def test_a_failed_factory_leaves_no_shards(pair, fails):
    plan = fx.Plan(strategy=fx.FSDP(wrap=("Linear",)), recompute=("Linear",))
    wanted = {name: p.tolist() for name, p in _net().named_parameters()}
    for rank, (words, values, restored) in enumerate(pair.run(_failed, plan, fails)):
        if rank in fails:
            assert words == "ValueError: no such optimizer"
        else:
            assert "Another rank failed" in words
            assert "no such optimizer" in words
        assert values == wanted
        assert restored


@pytest.mark.parametrize("strategy", [fx.Single(), fx.DDP()], ids=["Single", "DDP"])
def test_a_failed_factory_leaves_no_changes_of_the_plan(clusters, strategy):
    plan = fx.Plan(strategy=strategy, recompute=("Linear",))
    for words, values, restored in clusters[1].run(_failed, plan, (0,)):
        assert words == "ValueError: no such optimizer"
        assert values == {name: p.tolist() for name, p in _net().named_parameters()}
        assert restored
