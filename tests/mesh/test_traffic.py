"""Counting on fake ranks: with real tensors and with fake ones, which hold no data."""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fxtrain.testing import count_collectives, fake_world


@pytest.mark.parametrize("n", [2, 64])
def test_the_traffic_of_a_rank_shrinks_with_the_world_but_not_its_calls(n):
    with fake_world(n):
        mesh = init_device_mesh("cpu", (n,))
        with FakeTensorMode():
            model = fully_shard(nn.Linear(256, 256, bias=False), mesh=mesh)
            with count_collectives() as traffic:
                model(torch.ones(2, 256)).sum().backward()
    weight = 4 * 256 * 256
    assert traffic.counts == {"all_gather": 1, "reduce_scatter": 1}
    assert traffic.bytes == {"all_gather": weight // n, "reduce_scatter": weight}


def test_fake_tensors_are_counted_once_in_functional_collectives():
    with fake_world(4), FakeTensorMode(), count_collectives() as traffic:
        all_reduce(torch.ones(6), "sum", dist.group.WORLD) + 1
        dist.all_reduce(torch.ones(3))
    assert [(call.kind, call.bytes) for call in traffic.calls] == [
        ("all_reduce", 24),
        ("all_reduce", 12),
    ]
