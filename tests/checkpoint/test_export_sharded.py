"""Sharded modules (FSDP2, tensor parallelism, ZeRO) as model files, and back."""

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.models import export, load_model
from tests._errors import raises_code
from tests._slow import slow_after
from tests.checkpoint._exports import (
    Tied,
    as_the_ecosystem_reads,
    assert_same,
)
from tests.checkpoint._ranks import ready


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def _sharded_net(ctx, seed, *, meta=False, tensor=1):
    """Blocks under FSDP2, and tensor parallelism inside it where asked."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(
        "cpu", (ctx.world_size // tensor, tensor), mesh_dim_names=("shard", "tensor")
    )
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        net = nn.Sequential(*[_Block() for _ in range(3)])
    for block in net:
        if tensor > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["shard"])
    return fully_shard(net, mesh=mesh["shard"])


def _export_sharded(ctx, folder, tensor):
    net = _sharded_net(ctx, 3, tensor=tensor)
    net(torch.ones(2, 6))  # a forward leaves the root's own parameters whole
    export(net, folder, 600, ctx=ctx)


def _load_sharded(ctx, folder, tensor, meta):
    net = _sharded_net(ctx, 4, meta=meta, tensor=tensor)
    load_model(folder, net, ctx=ctx)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = net(torch.ones(2, 6))
    again = {name: value.full_tensor() for name, value in net.state_dict().items()}
    net(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return before.detach(), again, net(torch.ones(2, 6)).detach()


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (4, 1), (4, 2)])
def test_fsdp2_modules_round_trip(clusters, tmp_path, ranks, tensor):
    torch.manual_seed(3)
    net = nn.Sequential(*[_Block() for _ in range(3)])
    ready(clusters[ranks]).run(_export_sharded, tmp_path, tensor)
    assert_same(as_the_ecosystem_reads(tmp_path), net.state_dict())
    for meta in (False, True):
        for before, again, after in ready(clusters[ranks]).run(
            _load_sharded, tmp_path, tensor, meta
        ):
            torch.testing.assert_close(before, net(torch.ones(2, 6)))
            assert_same(again, net.state_dict())
            assert not torch.equal(before, after)


def _tied_under_fsdp2(ctx, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ctx.world_size,))
    torch.manual_seed(0)
    export(fully_shard(Tied(), mesh=mesh), folder, ctx=ctx)
    nets = [fully_shard(Tied(), mesh=mesh), fully_shard(Tied(device="meta"), mesh=mesh)]
    by_hand = Tied(device="meta")
    by_hand.body.weight = nn.Parameter(distribute_tensor(by_hand.body.weight, mesh, [Shard(0)]))
    for net in (*nets, by_hand):
        load_model(folder, net, ctx=ctx)
        assert net.head.weight is net.embed.weight
        net(torch.tensor([1])) if net is not by_hand else None
    states = [net.state_dict() for net in (*nets, by_hand)]
    return [
        {k: v.full_tensor() if hasattr(v, "placements") else v for k, v in state.items()}
        for state in states
    ]


def test_tied_weights_stay_tied_under_fsdp2(pair, tmp_path):
    torch.manual_seed(0)
    net = Tied()
    for states in ready(pair).run(_tied_under_fsdp2, tmp_path):
        assert len(states) == 3
        for state in states:
            assert_same(state, net.state_dict())
    assert sorted(as_the_ecosystem_reads(tmp_path)) == ["body.bias", "body.weight", "embed.weight"]


def test_what_deepspeed_has_partitioned_is_named(tmp_path):
    net = nn.Linear(2, 2)
    export(net, tmp_path)
    net.weight.ds_id = 0  # as DeepSpeed marks the parameters that it has taken apart
    with raises_code("FX600", "DeepSpeed"):
        export(net, tmp_path)
    with raises_code("FX603", "DeepSpeed"):
        load_model(tmp_path, net)


def _plan(mode, shard):
    strategy = fx.FSDP(mode=mode, shard=shard, wrap=("_Block",), ignore=("2.down.*",))
    return fx.Plan(strategy=strategy, precision="bf16")


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def _train_and_export(ctx, folder, mode, shard):
    torch.manual_seed(3)
    net = nn.Sequential(*[_Block() for _ in range(3)])
    model = fx.wrap(net, ctx, _plan(mode, shard), optimizer=_sgd)
    fns = fx.StepFns(model=model, loss=lambda m, batch: m(batch[0]).square().mean())
    loader = fx.shard(torch.utils.data.DataLoader([(torch.ones(6),)] * 8, batch_size=2), ctx)
    for batch in loader:
        fx.step(ctx, batch, fns)
    export(model, folder, 600)
    with torch.no_grad():
        return model(torch.ones(2, 6))


def _load_and_run(ctx, folder, mode, shard):
    torch.manual_seed(4)
    net = nn.Sequential(*[_Block() for _ in range(3)])
    model = fx.wrap(net, ctx, _plan(mode, shard), optimizer=_sgd)
    with torch.no_grad():
        model(torch.ones(2, 6))  # leaves parameters whole where the mode says so
        load_model(folder, model)
        return model(torch.ones(2, 6))


@pytest.mark.parametrize(
    ("ranks", "mode", "shard"),
    slow_after(1, [(2, "grads_and_optimizer", None), (2, "none", None), (4, "full", 2)]),
)
def test_a_wrapped_sharded_model_goes_to_any_other(clusters, tmp_path, ranks, mode, shard):
    wanted = ready(clusters[ranks]).run(_train_and_export, tmp_path, mode, shard)
    for other, again, part in ((2, "grads_and_optimizer", None), (4, "full", 2)):
        for found in ready(clusters[other]).run(_load_and_run, tmp_path, again, part):
            torch.testing.assert_close(found, wanted[0], rtol=0.02, atol=0.02)
    net = nn.Sequential(*[_Block() for _ in range(3)])
    start = net(torch.ones(2, 6))
    load_model(tmp_path, net)
    assert all(parameter.dtype is torch.float32 for parameter in net.parameters())
    torch.testing.assert_close(net(torch.ones(2, 6)), wanted[0].float(), rtol=0.05, atol=0.05)
    assert not torch.allclose(start, wanted[0].float(), rtol=0.05, atol=0.05)
