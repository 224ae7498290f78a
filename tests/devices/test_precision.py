"""Quantized weights on GPUs: FSDP splits those of bitsandbytes, and trains as replicas do."""

import pytest
import torch

import fxtrain as fx
from fxtrain.precision.quantizing import stored_tensors
from tests.devices._device import expect_warnings, synchronize
from tests.devices._training import loss_of, net, rows
from tests.precision._records import RECORDS, marked

FORMATS = pytest.mark.parametrize("name", marked(["nf4", "fp4", "bnb8"]))


def _frozen():
    made = net().requires_grad_(False)
    made[2].requires_grad_(True)  # the head, which stays as it is
    return made


def _trained(ctx, plan):
    """Losses, and the bytes of quantized weights that this rank holds."""
    expect_warnings()
    loader = torch.utils.data.DataLoader(rows(), batch_size=32)
    model = fx.wrap(_frozen(), ctx, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    weight = model.module[0].weight
    held = getattr(weight, "_local_tensor", weight).nbytes
    fns = fx.StepFns(model=model, loss=loss_of)
    losses = [float(fx.step(ctx, batch, fns).loss) for batch in fx.shard(loader, ctx, plan)]
    synchronize(ctx)
    whole = sum(one.nbytes for one in stored_tensors(fx.unwrap(model)[0]).values())
    return losses, held, whole


def _as_replicas(ctx, record, replicas):
    plans = [fx.Plan(strategy=one, quantize=record) for one in (replicas, fx.FSDP())]
    return [_trained(ctx, plan) for plan in plans]


@FORMATS
def test_fsdp_at_one_rank_trains_on_quantized_weights(nccl, name):
    ((plain, sharded),) = nccl.run(_as_replicas, RECORDS[name], fx.Single())
    assert sharded[0] == pytest.approx(plain[0], rel=1e-5)
    assert sharded[0][-1] < sharded[0][0] and sharded[2] == plain[2]


@FORMATS
def test_fsdp_over_two_devices_splits_quantized_weights(pair_of_gpus, name):
    for plain, sharded in pair_of_gpus.run(_as_replicas, RECORDS[name], fx.DDP()):
        assert sharded[0] == pytest.approx(plain[0], rel=1e-5)
        assert sharded[1] <= plain[1] / 2 + 64 and sharded[2] == plain[2]
