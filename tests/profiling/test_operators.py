"""The operators of a dry run: their FLOPs and bytes, against sizes and torch's own counter."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import fxtrain as fx
from tests.profiling._dry_runs import DRY_DDP, dry_linear


def _by_name(run):
    return {(row.name, row.phase): row for row in run.operators}


@DRY_DDP
def test_products_of_a_layer_have_the_flops_and_bytes_of_their_shapes():
    rows = _by_name(dry_linear(width=100))
    product, tensors = 2 * 4 * 100 * 100, 4 * (4 * 100 + 100 * 100 + 4 * 100)
    for phase in ("forward", "backward"):
        row = rows["mm", phase]
        assert (row.flops, row.bytes, row.count, row.dtype) == (product, tensors, 1, "fp32")
    # Adam reads and writes the state of all parameters.
    updates = [row for (_, phase), row in rows.items() if phase == "update"]
    assert sum(row.bytes * row.count for row in updates) > 4 * 100 * 100 * 4
    assert not any(row.flops for row in updates)


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.qkv = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 24)

    def forward(self, x_BTD):
        x_BTD = self.conv(x_BTD.transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(x_BTD).unsqueeze(1).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v)


def _train(ctx, plan):
    model = fx.wrap(_Net(), ctx, plan, optimizer=torch.optim.AdamW)
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    for batch in fx.shard(DataLoader(torch.ones(9999, 16, 8), batch_size=2), ctx, plan):
        fx.step(ctx, batch, fns)


def _flops(plan):
    run = fx.dry_run(functools.partial(_train, plan=plan), world=1)
    return {
        phase: sum(row.flops * row.count for row in run.operators if row.phase == phase)
        for phase in ("forward", "backward", "update")
    }


def test_flops_are_those_of_torchs_counter():
    plan = fx.Plan(strategy=fx.Single())
    x = torch.ones(2, 16, 8)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = _Net()(x).square().mean()
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    told = _flops(plan)
    assert told["forward"] == forward.get_total_flops() > 0
    # torch's kernel computes the scores again in backward.
    scores = 2 * 2 * 16 * 16 * 8
    assert told["backward"] == backward.get_total_flops() + scores
    assert told["update"] == 0


def test_recomputed_operators_count_as_forward():
    plain, again = (
        _flops(fx.Plan(strategy=fx.Single(), recompute=names)) for names in ((), ("_Net",))
    )
    assert again["forward"] == 2 * plain["forward"] and again["backward"] == plain["backward"]


def test_micro_batches_multiply_operators_but_not_those_of_an_update():
    one, two = (
        fx.dry_run(
            functools.partial(_train, plan=fx.Plan(strategy=fx.Single(), accumulate=count)), world=1
        )
        for count in (1, 2)
    )
    counts = [
        {(row.name, row.bytes): row.count for row in run.operators if row.phase == "update"}
        for run in (one, two)
    ]
    assert counts[0] == counts[1]
    products = [sum(row.count for row in run.operators if row.flops) for run in (one, two)]
    assert products[1] == 2 * products[0]
