"""Parameters that are frozen or unfrozen after `fx.wrap`: as in one process, or refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxtrain as fx
from tests._slow import slow_after
from tests.cluster._frozen import adamw, by_hand, data, net, on_ranks
from tests.cluster._models import PIPELINES
from tests.cluster._timeouts import shortened

PLANS = {
    "ddp": {"strategy": fx.DDP()},
    "ddp, windows": {"strategy": fx.DDP(), "accumulate": 2},
    "ddp, clipped": {"strategy": fx.DDP(bucket_view=False), "clip_norm": 1e6},
    "ddp, unused": {"strategy": fx.DDP(unused_parameters=True)},
    "ddp, optimizer sharded": {"strategy": fx.DDP(shard_optimizer=True)},
    "fsdp": {"strategy": fx.FSDP()},
    "fsdp, blocks": {"strategy": fx.FSDP(min_params=1), "accumulate": 2},
}
CHANGES = {"unfrozen": (False, True), "both": (True, False, True)}


@pytest.mark.parametrize("change", slow_after(1, [*CHANGES][::-1]))
@pytest.mark.parametrize("name", slow_after(3, PLANS))
@pytest.mark.filterwarnings("ignore:ZeroRedundancyOptimizer detected")
def test_a_layer_that_is_frozen_for_a_while_trains_as_in_one_process(pair, name, change):
    truth = by_hand(CHANGES[change])
    for found in pair.run(_on_ranks, PLANS[name], CHANGES[change]):
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-5)


def _on_ranks(ctx, options, trained):
    return on_ranks(ctx, trained=trained, **options)


def _tied():
    module = net()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        module.insert(2, nn.Linear(6, 8))
        module.insert(3, nn.Linear(8, 6))
    module[2].weight = nn.Parameter(module[0].weight.detach().T.clone())
    module[3].weight = module[0].weight
    return module


def _in_stages(ctx, trained, schedule, split):
    """A run whose stages share a weight that is frozen for a while."""
    mesh = fx.Mesh(pipeline=ctx.world_size)
    strategy = fx.PP(split=split, schedule=schedule) if ctx.world_size > 1 else fx.Single()
    plan = fx.Plan(strategy=strategy, batch="global")
    module = _tied()
    module[0].weight.requires_grad_(trained[0])
    with fx.detect({}, device="cpu", timeout_s=20, mesh=mesh) as ctx:
        model = fx.wrap(module, ctx, plan, optimizer=adamw(module.parameters()))
        fns = fx.StepFns(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]))
        for epoch, is_trained in zip(
            fx.shard(data(), ctx, plan).epochs(len(trained)), trained, strict=True
        ):
            for part in (model.module[0], model.module[3]):
                if part.weight is not None:  # of this rank's stage
                    part.weight.requires_grad_(is_trained)
            for batch in epoch:
                fx.step(ctx, batch, fns)
        return dict(fx.weights(model))


@pytest.mark.slow
@PIPELINES
@pytest.mark.parametrize(
    ("schedule", "split"),
    slow_after(1, [("1f1b", ("3",)), ("interleaved_zero_bubble", ("3", "4", "6"))]),
)
def test_a_weight_that_stages_share_is_frozen_for_a_while(pair, clusters, schedule, split):
    (truth,) = clusters[1].run(_in_stages, (False, True, False), schedule, split)
    for found in pair.run(_in_stages, (False, True, False), schedule, split):
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-5)


def test_a_communication_hook_reduces_what_was_unfrozen(pair):
    strategy = fx.DDP(hook=fx.CommHook(name="fp16"))
    truth = by_hand(CHANGES["both"])
    for found in pair.run(_on_ranks, {"strategy": strategy}, CHANGES["both"]):
        torch.testing.assert_close(found, truth, rtol=0, atol=2e-2)
    assert torch.equal(*pair.run(_on_ranks, {"strategy": strategy}, CHANGES["both"]))


def _refused(ctx, options, change):
    """The error of a run in which `change(model, batch)` is called before each step."""
    plan = fx.Plan(batch="global", **options)
    module = net()
    module[0].requires_grad_(False)
    model = fx.wrap(module, ctx, plan, optimizer=adamw)
    fns = fx.StepFns(model, lambda m, b: m(b[0]).square().mean())
    with pytest.raises(fx.FxError) as caught:
        for epoch in fx.shard(data(), ctx, plan).epochs(2):
            for batch in epoch:
                change(model, batch)
                fx.step(ctx, batch, fns)
    return type(caught.value), str(caught.value)


def _unfreeze(model, _):
    model.module[0].requires_grad_(True)


def _freeze_the_last(model, batch):
    if batch.position.micro == 0:
        model.module[4].requires_grad_(False)


def _append_a_head(model, batch):
    if batch.position.updates == 2:
        head = nn.Linear(2, 2)
        model.module.append(head)
        model.optimizer.add_param_group({"params": list(head.parameters())})


REFUSED = {
    "static graph": (
        {"strategy": fx.DDP(static_graph=True)},
        _unfreeze,
        "requires_grad of 0.weight, 0.bias changed after fx.wrap, and DDP(static_graph=True)",
    ),
    "inside a window": (
        {"strategy": fx.DDP(), "accumulate": 2},
        _freeze_the_last,
        "requires_grad_(False) on 4.weight, 4.bias inside an accumulation window",
    ),
    "local updates": (
        {"local": fx.LocalSGD(every=2)},
        _unfreeze,
        "Plan(local=...) averages the parameters that required a gradient in fx.wrap, "
        "and 0.weight, 0.bias require one only now",
    ),
    "a new head under DDP": (
        {"strategy": fx.DDP()},
        _append_a_head,
        "AdamW.add_param_group: parameters that were not in the module",
    ),
    "a new head under FSDP": (
        {"strategy": fx.FSDP()},
        _append_a_head,
        "AdamW.add_param_group: parameters that were not",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_that_a_strategy_cannot_follow_is_refused(pair, name):
    options, change, words = REFUSED[name]
    for kind, told in pair.run(_refused, options, change):
        assert kind is fx.errors.StepError and told.startswith(words) and told.endswith("[FX505]")


def _unfreeze_on_rank_1(ctx):
    plan = fx.Plan(batch="global")
    module = net()
    module[0].requires_grad_(False)
    model = fx.wrap(module, ctx, plan, optimizer=adamw(module.parameters()))
    fns = fx.StepFns(model, lambda m, b: m(b[0]).square().mean())
    model.module[0].requires_grad_(ctx.rank == 1)
    with pytest.raises(fx.CollectiveError) as caught:
        for batch in fx.shard(data(), ctx, plan):
            with shortened(ctx):
                fx.step(ctx, batch, fns)
    return str(caught.value)


def test_ranks_that_unfreeze_different_parameters_hear_of_it(pair):
    assert any(
        "requires_grad changed: 0.weight, 0.bias" in one for one in pair.run(_unfreeze_on_rank_1)
    )
