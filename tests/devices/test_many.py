"""All GPUs of a machine, with NCCL between them: meshes, strategies, groups of the script's own."""

import pytest
import torch

import fxtrain as fx
from fxtrain import ops
from fxtrain.testing import Terms, all_at_once
from tests.cluster.test_laws import CUTS
from tests.devices._device import WHERE, many_ranks
from tests.devices.test_programs import PROGRAM, launch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TERMS = Terms(exact=False)
HALF = many_ranks() // 2
MESHES = {
    "none": None,
    "shard": fx.Mesh(shard=HALF),
    "shard and tensor": fx.Mesh(shard=HALF, tensor=2),
    "pipeline and shard": fx.Mesh(pipeline=2, shard=HALF),
    "context": fx.Mesh(context=HALF),
}
AXES = ("data", "loss", "replicate", "shard", "context", "tensor", "pipeline")
PLANS = {
    "ddp": (fx.Plan(strategy=fx.DDP(), clip_norm=1.0), None),
    "ddp, unused": (fx.Plan(strategy=fx.DDP(unused_parameters=True)), None),
    "zero1": (fx.Plan(strategy=fx.DDP(shard_optimizer=True)), None),
    "fsdp": (fx.Plan(strategy=fx.FSDP(), clip_norm=1.0), None),
    "hybrid": (fx.Plan(strategy=fx.FSDP(), clip_norm=1.0), fx.Mesh(shard=HALF)),
    "hybrid, offloaded": (
        fx.Plan(strategy=fx.FSDP(offload=True)),
        fx.Mesh(shard=HALF),
    ),
    "tensor": (
        fx.Plan(strategy=fx.FSDP(tensor=fx.TP(styles=CUTS))),
        fx.Mesh(shard=HALF, tensor=2),
    ),
}


@pytest.fixture(autouse=True)
def enough_devices():
    if many_ranks() < 4:
        pytest.skip("torch sees fewer than four CUDA devices")


def _sums(ctx, mesh):
    """For each axis its size, and the sum of a one on each of its ranks."""
    with fx.detect({}, device=ctx.device, mesh=mesh, timeout_s=ctx.comm.timeout_s) as inner:
        axes = [inner.axis(name) for name in AXES]
        one = torch.ones((), device=ctx.device)
        return [(axis.world_size, float(ops.reduce(one, axis, op="sum"))) for axis in axes]


@pytest.mark.parametrize("name", MESHES)
def test_axes_of_a_mesh_have_groups(many, name):
    sums = many.run(_sums, MESHES[name])
    assert all(size == total for of_rank in sums for size, total in of_rank)
    assert {row[0][0] for row in sums} <= {many_ranks(), HALF, 2}


@pytest.mark.parametrize("name", PLANS)
def test_strategies_train_as_one_process_does(many, name):
    plan, mesh = PLANS[name]
    all_at_once(many, plan, mesh, terms=TERMS)


@pytest.mark.parametrize("how", ["device_id", "set_device"])
def test_a_group_that_the_script_opened_keeps_its_devices(how):
    """On the GPUs in reverse order."""
    ended = launch(PROGRAM, "existing", WHERE, how, ranks=many_ranks())
    assert ended.code == 0, ended.err
    assert ended.out.count("the device is kept, and the loss is finite") == many_ranks()


def test_an_error_of_one_rank_ends_all():
    ended = launch(PROGRAM, "raises", WHERE, ranks=many_ranks())
    assert ended.code == 1
    assert "ValueError: a bad row" in ended.err
