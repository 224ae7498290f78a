"""Contexts with axes, over torch's fake backend: many ranks in one process."""

from datetime import timedelta
from types import SimpleNamespace

import attrs
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fxtrain as fx
from fxtrain import ops
from fxtrain.backends.pipeline.weights import open_shared_groups
from fxtrain.state.mesh import AXES, axis_groups, resolve_mesh
from fxtrain.testing import count_collectives, fake_world
from tests._errors import raises_code


@pytest.mark.parametrize(
    ("rank", "want"),
    [
        (0, {"replicate": 0, "shard": 0, "tensor": 0, "data": 0}),
        (5, {"replicate": 0, "shard": 2, "tensor": 1, "data": 2}),
        (23, {"replicate": 2, "shard": 3, "tensor": 1, "data": 11}),
    ],
)
def test_axes_of_a_mesh(rank, want):
    with fake_world(24, rank=rank, mesh=fx.Mesh(replicate=-1, shard=4, tensor=2)) as ctx:
        assert ctx.mesh == fx.Mesh(replicate=3, shard=4, tensor=2)
        sizes = {"replicate": 3, "shard": 4, "tensor": 2, "data": 12}
        for name, place in want.items():
            axis = ctx.axis(name)
            assert (axis.rank, axis.world_size) == (place, sizes[name])
            assert axis.comm.ranks[axis.rank] == rank
        assert ctx.axis("pipeline").world_size == ctx.axis("context").world_size == 1


def test_groups_of_stages_that_share_parameters_wait_as_long_as_the_context(monkeypatch):
    opens, waits = dist.new_subgroups_by_enumeration, []

    def noted(ranks, **options):
        waits.append(options.get("timeout"))
        return opens(ranks, **options)

    with fake_world(4, mesh=fx.Mesh(pipeline=4)) as ctx:
        monkeypatch.setattr(dist, "new_subgroups_by_enumeration", noted)
        tied = SimpleNamespace(holders=lambda _: (0, 2))
        open_shared_groups(["embed.weight"], tied, ctx)
        assert waits == [timedelta(seconds=ctx.comm.timeout_s)]


def test_data_is_split_over_the_data_axis_only():
    mesh = fx.Mesh(replicate=2, tensor=2)
    rows = {}
    for rank in range(4):
        with fake_world(4, rank=rank, mesh=mesh) as ctx:
            loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2)
            rows[rank] = [batch.data.tolist() for batch in fx.shard(loader, ctx)]
    assert rows[0] == rows[1] == [[0, 1], [4, 5]]
    assert rows[2] == rows[3] == [[2, 3], [6, 7]]


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (fx.Mesh(replicate=3), "8 ranks|has 8"),
        (fx.Mesh(replicate=-1, shard=3), "multiple of 3"),
        (fx.Mesh(replicate=-1, shard=-1), "at most one"),
        (fx.Mesh(replicate=0), "positive"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh, words):
    with pytest.raises(fx.errors.MeshError, match=words):
        resolve_mesh(mesh, 8)


def test_a_mesh_that_does_not_fit_is_refused_before_a_rank_waits_for_another():
    # Nobody answers there.
    env = {"RANK": "1", "WORLD_SIZE": "6", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "9"}
    with raises_code("FX110", "6") as error:
        fx.detect(env, device="cpu", mesh=fx.Mesh(replicate=-1, shard=4))
    assert isinstance(error.value, fx.PlanError) and isinstance(error.value, fx.errors.ContextError)


def test_axis_groups_partition_the_world():
    mesh = fx.Mesh(pipeline=2, replicate=2, shard=3, tensor=2)
    for axis in AXES:
        groups = axis_groups(mesh, (axis,))
        assert sorted(rank for group in groups for rank in group) == list(range(24))
        assert {len(group) for group in groups} == {mesh.sizes[axis]}


def test_ops_run_on_a_thousand_fake_ranks():
    with fake_world(1024, rank=7) as ctx:
        assert ops.gather(torch.ones(2), ctx).shape == (2048,)
        assert ops.any_rank(True, ctx)
        ops.barrier(ctx)
        assert ctx.launcher == "group" and ctx.is_main is False


def test_an_existing_group_is_reused_and_left_open():
    with fake_world(4, rank=1) as ctx:
        again = fx.detect({}, device="cpu")
        assert (again.rank, again.world_size) == (1, 4) and again == attrs.evolve(
            ctx, comm=again.comm
        )
        fx.close(again)
        assert dist.is_initialized()


def test_a_pretended_rank_broadcasts_its_own_values():
    with fake_world(8, rank=3) as ctx:
        tree = {"x": torch.arange(3.0), "name": "a", "large": torch.ones(9000)}
        got = ops.broadcast(tree, ctx)
        assert got["x"].tolist() == [0, 1, 2] and got["name"] == "a" and len(got["large"]) == 9000
        assert ops.broadcast_object("b", ctx, src=5) == "b"


def test_a_pretended_rank_gets_nothing_from_another():
    with fake_world(8, rank=3) as ctx:
        with raises_code("FX300", "scatter"):
            ops.scatter(None, ctx)
        assert ops.scatter([torch.tensor(rank) for rank in range(8)], ctx, src=3) == 3


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
