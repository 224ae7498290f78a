"""Updates on the host: they are those of the loop by hand, for final gradients and parameters."""

import copy
import importlib.util

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.testing import LAWS, Terms
from tests.cluster.test_local import HOLD
from tests.devices._device import STAND_IN
from tests.devices._host_updates import (
    Offloading,
    device_known,
    fused,
    offload,
    same,
    values,
)
from tests.devices._training import loss_of, net, parts, rows

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs fxtrain[quant]"),
    pytest.mark.skipif(STAND_IN == "cpu", reason="torchao updates parameters of accelerators"),
]

TERMS = Terms(exact=False)
CLIPPED = fx.Plan(clip_norm=0.1, accumulate=2)
FP16 = fx.Plan(
    clip_norm=0.1,
    precision=fx.Precision(compute="fp16", scale=fx.LossScale(initial=2.0**20, interval=3)),
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_laws_at_one_rank(one, law):
    law(Offloading(one), fx.Plan(strategy=fx.Single()), terms=TERMS)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_laws_of_replicas(two, law):
    law(Offloading(two), fx.Plan(strategy=fx.DDP()), terms=TERMS)


@pytest.mark.parametrize("law", HOLD, ids=lambda law: law.__name__)
def test_laws_of_replicas_that_average(two, law):
    law(Offloading(two), fx.Plan(local=fx.LocalSGD(every=1)), terms=TERMS)


class _ByHand:
    """A loop whose updates are on the host, with torch only."""

    def __init__(self, module, device):
        self.host = module
        self.module = copy.deepcopy(module).to(device)
        self.optimizer = torch.optim.AdamW(self.host.parameters(), lr=1e-3, fused=True)

    def update(self, batches):
        for batch in batches:
            (loss_of(self.module, batch) / len(batches)).backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 0.1)
        for mine, there in zip(self.host.parameters(), self.module.parameters(), strict=True):
            mine.grad = there.grad.cpu()
        self.optimizer.step()
        self.module.zero_grad()
        self.module.load_state_dict(self.host.state_dict())


def _clipped(ctx):
    """Training with accumulation and clipping, and the same by hand."""
    with device_known(ctx):
        loader, fns = parts(ctx, CLIPPED, optimizer=lambda p: offload(p, minimal_size=0))
    batches = list(loader)
    norms = [fx.step(ctx, batch, fns).grad_norm for batch in batches]
    by_hand = _ByHand(net(), ctx.device)
    for first in range(0, len(batches), 2):
        by_hand.update(batches[first : first + 2])
    clipped = all(float(norm) > 0.1 for norm in norms if norm is not None)
    return values(fns.model.module), values(by_hand.module), clipped


def test_updates_use_final_gradients(one):
    ((found, wanted, clipped),) = one.run(_clipped)
    assert same(found, wanted) and clipped


def _overflowing(ctx, factory):
    """fp16 with a loss scale at which the first gradients overflow."""
    with device_known(ctx):
        loader, fns = parts(ctx, FP16, optimizer=factory)
    applied, after = [], []
    for batch in list(loader) * 3:
        applied.append(fx.step(ctx, batch, fns).applied)
        after.append(values(fns.model.module))
    return applied, after


def test_skipped_updates_leave_nothing_behind(one):
    ((applied, found),) = one.run(_overflowing, offload)
    ((wanted, plain),) = one.run(_overflowing, fused)
    assert applied == wanted and applied[0] is False and any(applied)
    for index, (mine, theirs) in enumerate(zip(found, plain, strict=True)):
        torch.testing.assert_close(mine, theirs)
        assert applied[index] or index == 0 or same(mine, found[index - 1])


class _Counting(torch.optim.SGD):
    """Keeps values in its groups, as some optimizers do."""

    by_gradient = False

    def step(self, closure=None):
        for group in self.param_groups:
            by = float(group["params"][0].grad.norm()) if self.by_gradient else 1
            group["count"] = group.get("count", 0) + by
        return super().step(closure)


class _CountingNorms(_Counting):
    by_gradient = True


def _counted(ctx, kind):
    """The count of each group; the message where parameters of a group differ in it."""
    with device_known(ctx):
        loader, fns = parts(ctx, fx.Plan(), optimizer=lambda p: offload(p, kind, minimal_size=0))
    try:
        for batch in list(loader)[:3]:
            fx.step(ctx, batch, fns)
    except fx.errors.StepError as error:
        return str(error)
    return [group["count"] for group in fns.model.optimizer.param_groups]


def test_options_that_updates_change_are_kept_or_refused(one):
    (counts,), (text,) = one.run(_counted, _Counting), one.run(_counted, _CountingNorms)
    assert counts == [3] and "_CountingNorms changes options of its parameter groups" in text


class _Failing(torch.optim.SGD):
    """Fails once, for large gradients."""

    def step(self, closure=None):
        if any(float(p.grad.norm()) > 1e6 for group in self.param_groups for p in group["params"]):
            raise RuntimeError("too large")
        return super().step(closure)


def _failed(ctx):
    """Changes of two weights, of which the second gets a gradient in an update that fails."""
    with device_known(ctx):
        build = lambda p: offload(p, _Failing, lr=0.5, momentum=0.5, minimal_size=0)  # noqa: E731
        model = fx.wrap(nn.ParameterList([torch.ones(2), torch.ones(2)]), ctx, optimizer=build)
    first, second = model.module
    first.grad, second.grad = torch.ones_like(first), torch.full_like(second, 1e9)
    with pytest.raises(RuntimeError, match="too large"):
        model.optimizer.step()
    second.grad = None
    model.optimizer.step()
    return first.tolist(), second.tolist()


def test_an_update_that_failed_leaves_nothing_behind(one):
    (found,) = one.run(_failed)
    assert found == ([1 - 0.5 - 0.75] * 2, [1.0, 1.0])


def _own_groups(ctx, build):
    """Groups with decay and without, under a schedule for each."""

    def factory(params):
        large = [p for p in params if p.ndim > 1]
        small = [p for p in params if p.ndim == 1]
        return build([{"params": large, "weight_decay": 0.5}, {"params": small}])

    def scheduler(optimizer):
        rates = [lambda update: 0.5**update, lambda update: 0.1**update]
        return torch.optim.lr_scheduler.LambdaLR(optimizer, rates)

    with device_known(ctx):
        model = fx.wrap(net(), ctx, optimizer=factory, scheduler=scheduler)
    fns = fx.StepFns(model=model, loss=loss_of)
    for batch in fx.shard(DataLoader(rows(), batch_size=64), ctx):
        fx.step(ctx, batch, fns)
    groups = [(len(g["params"]), g["weight_decay"], g["lr"]) for g in model.optimizer.param_groups]
    return groups, values(model.module)


def test_groups_and_schedules_are_the_users(one):
    ((groups, found),), ((plain, wanted),) = (
        one.run(_own_groups, build) for build in (offload, fused)
    )
    assert groups == plain and groups[0] == (2, 0.5, 1e-3 / 16)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def _edited(ctx, build):
    """Parameters that the user changes between updates, past autograd."""
    with device_known(ctx):
        loader, fns = parts(ctx, fx.Plan(), optimizer=build)
    for batch in loader:
        fx.step(ctx, batch, fns)
        for parameter in fns.model.module.parameters():
            parameter.data.mul_(0.5)
    return values(fns.model.module)


def test_changes_of_parameters_reach_the_host(one):
    (found,), (wanted,) = one.run(_edited, offload), one.run(_edited, fused)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
