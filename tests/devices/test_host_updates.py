"""Updates on the host: they are those of the loop by hand, for final gradients and parameters."""

import copy
import gc
import importlib.util
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.testing import LAWS, Terms
from tests.cluster.test_local import HOLD
from tests.devices._device import STAND_IN
from tests.devices._host_updates import Offloading, device_known, offload
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


def _values(module):
    return [parameter.detach().cpu().clone() for parameter in module.parameters()]


def _states(model):
    found = {}
    for name, parameter in model.module.named_parameters():
        for key, value in model.optimizer.state[parameter].items():
            found[f"{name}.{key}"] = value.detach().cpu().clone()
    return found


def _same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(map(torch.equal, one, other))


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
    return _values(fns.model.module), _values(by_hand.module), clipped


def test_updates_use_final_gradients(one):
    ((found, wanted, clipped),) = one.run(_clipped)
    assert _same(found, wanted) and clipped


def _overflowing(ctx, factory):
    """fp16 with a loss scale at which the first gradients overflow."""
    with device_known(ctx):
        loader, fns = parts(ctx, FP16, optimizer=factory)
    applied, values = [], []
    for batch in list(loader) * 3:
        applied.append(fx.step(ctx, batch, fns).applied)
        values.append(_values(fns.model.module))
    return applied, values


def test_skipped_updates_leave_nothing_behind(one):
    ((applied, found),) = one.run(_overflowing, offload)
    ((wanted, values),) = one.run(_overflowing, _fused)
    assert applied == wanted and applied[0] is False and any(applied)
    for index, (mine, theirs) in enumerate(zip(found, values, strict=True)):
        torch.testing.assert_close(mine, theirs)
        assert applied[index] or index == 0 or _same(mine, found[index - 1])


def _fused(params, **settings):
    return torch.optim.AdamW(params, lr=1e-3, fused=True, **settings)


def _resumed(ctx, folder, first, then, *, background=False):
    """States, values and losses of a run, and of one that resumes in its middle."""
    with device_known(ctx):
        loader, fns = parts(ctx, fx.Plan(clip_norm=0.1), optimizer=first)
        _, again = parts(ctx, fx.Plan(clip_norm=0.1), optimizer=then)
    batches = list(loader)
    for batch in batches[:3]:
        fx.step(ctx, batch, fns)
    states, values = _states(fns.model), _values(fns.model.module)
    saving = fx.save(folder, ctx, fns.model, background=background)
    wanted = [float(fx.step(ctx, batch, fns).loss) for batch in batches[3:]]
    if background:
        saving.result()
    for batch in batches[:2]:
        fx.step(ctx, batch, again)
    fx.restore(fx.latest(folder) or folder, ctx, again.model)
    restored = _states(again.model), _values(again.model.module)
    found = [float(fx.step(ctx, batch, again).loss) for batch in batches[3:]]
    ends = _values(fns.model.module), _values(again.model.module)
    return (states, values), restored, (wanted, found), ends


@pytest.mark.parametrize("background", [False, True])
def test_resumes_bit_for_bit(one, tmp_path, background):
    call = (str(tmp_path), offload, offload)
    ((saved, restored, losses, ends),) = one.run(_in_background if background else _resumed, *call)
    assert len(saved[0]) == 12 and all(map(_same, saved, restored))
    assert losses[0] == losses[1] and _same(*ends)


def _in_background(ctx, *args):
    return _resumed(ctx, *args, background=True)


@pytest.mark.parametrize("pair", [(offload, _fused), (_fused, offload)], ids=["to", "from"])
def test_checkpoints_are_those_of_the_optimizer_itself(one, tmp_path, pair):
    ((saved, restored, losses, _),) = one.run(_resumed, str(tmp_path), *pair)
    assert all(map(_same, saved, restored))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def _loaded(ctx, folder):
    """Where states are after `fx.restore`, and after torch's own loading and an update."""
    with device_known(ctx):
        loader, fns = parts(ctx, fx.Plan(), optimizer=offload)
    batches, model = list(loader), fns.model
    weight = model.module[0].weight
    fx.step(ctx, batches[0], fns)
    fx.save(folder, ctx, model)
    before = model.optimizer.state[weight]["exp_avg"].data_ptr()
    fx.step(ctx, batches[1], fns)
    wanted = _values(model.module)
    fx.restore(folder, ctx, model)
    restored = model.optimizer.state[weight]["exp_avg"]
    kinds = [restored.device.type]
    model.optimizer.load_state_dict(model.optimizer.state_dict())
    fx.step(ctx, batches[1], fns)
    kinds.append(model.optimizer.state[weight]["exp_avg"].device.type)
    return kinds, restored.data_ptr() == before, _same(_values(model.module), wanted)


def test_states_stay_on_the_host_when_they_are_loaded(one, tmp_path):
    ((kinds, in_place, same),) = one.run(_loaded, str(tmp_path))
    assert kinds == ["cpu", "cpu"] and in_place and same


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
    except fx.StepError as error:
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
    return groups, _values(model.module)


def test_groups_and_schedules_are_the_users(one):
    ((groups, found),), ((plain, wanted),) = (
        one.run(_own_groups, build) for build in (offload, _fused)
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
    return _values(fns.model.module)


def test_changes_of_parameters_reach_the_host(one):
    (found,), (wanted,) = one.run(_edited, offload), one.run(_edited, _fused)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def _searched(ctx):
    """Values and states before a search for a learning rate, and after it."""
    with device_known(ctx):
        loader, fns = parts(ctx, fx.Plan(), optimizer=offload)
    fx.step(ctx, next(iter(loader)), fns)
    before = _values(fns.model.module), _states(fns.model)
    curve = fx.find_lr(ctx, fns, loader, start=1e-4, stop=1.0, updates=10)
    after = _values(fns.model.module), _states(fns.model)
    fx.step(ctx, next(iter(loader)), fns)
    return before, after, len(curve.rates), fns.model.optimizer.param_groups[0]["lr"]


def test_a_search_for_a_rate_changes_nothing(one):
    ((before, after, count, rate),) = one.run(_searched)
    assert all(map(_same, before, after)) and count > 2 and rate == 1e-3


def _host_memory(ctx):
    """Where states are; whether a module that was unwrapped, and one released, let go of it."""
    kinds, freed = [], []
    for end in (fx.release, fx.unwrap):
        with device_known(ctx):
            loader, fns = parts(ctx, fx.Plan(), optimizer=offload)
        fx.step(ctx, next(iter(loader)), fns)
        model = fns.model
        weight, bias = model.module[0].weight, model.module[0].bias
        kinds.append([model.optimizer.state[one]["exp_avg"].device.type for one in (weight, bias)])
        held = weakref.ref(model.optimizer.state[weight]["exp_avg"])
        module = end(model)
        if end is fx.unwrap:
            model = fns = None
            gc.collect()
            module[0].weight.sum().backward()  # calls its hooks
        freed.append(held() is None)
    return kinds, freed


def test_memory_of_the_host_is_freed(one):
    ((kinds, freed),) = one.run(_host_memory)
    assert all(host == "cpu" != device for host, device in kinds) and freed == [True, True]


def _refused(ctx, cases):
    """Messages, and whether a hook is left on a parameter."""
    found = []
    for plan, settings in cases:
        module = net()
        with device_known(ctx):
            try:
                fx.wrap(module, ctx, plan, optimizer=lambda p, s=settings: offload(p, **s))
            except fx.PlanError as error:
                found.append(str(error))
        assert not any(one._post_accumulate_grad_hooks for one in module.parameters())
    return found


ONE_RANK = {
    "offload_gradients=True, which frees": (fx.Plan(), {"offload_gradients": True}),
    "under FSDP, which does not support it": (fx.Plan(strategy=fx.FSDP()), {}),
    "under PP, which does not support it": (fx.Plan(strategy=fx.PP()), {}),
}
SEVERAL = {
    "under FSDP, which does not support it. Use it with Single() or DDP(), or let FSDP(offload": (
        fx.Plan(strategy=fx.FSDP()), {},
    ),
    "and for DDP(shard_optimizer=True), which": (
        fx.Plan(strategy=fx.DDP(shard_optimizer=True)), {},
    ),
}  # fmt: skip


def _check_refused(pool, cases):
    for found in pool.run(_refused, list(cases.values())):
        assert len(found) == len(cases)
        for text, part in zip(found, cases, strict=True):
            assert part in text


def test_what_one_rank_does_not_support_is_refused_by_name(one):
    _check_refused(one, ONE_RANK)


def test_what_ranks_do_not_support_is_refused_by_name(two):
    _check_refused(two, SEVERAL)


def _later(ctx):
    """Messages about a group that is added, and about an optimizer that is ready-made."""
    found = []
    with device_known(ctx):
        model = fx.wrap(net(), ctx, optimizer=offload)
        module = net().to(ctx.device)
        ready = offload(module.parameters())
    another = nn.Parameter(torch.ones(2, device=ctx.device))
    try:
        model.optimizer.add_param_group({"params": [another]})
    except fx.StepError as error:
        found.append(str(error))
    for optimizer in (ready, model.optimizer):
        try:
            fx.wrap(module, ctx, optimizer=optimizer)
        except fx.PlanError as error:
            found.append(str(error))
    return found


def test_groups_and_optimizers_of_elsewhere_are_refused(one):
    ((group, ready, used),) = one.run(_later)
    assert "add_param_group: torchao's CPUOffloadOptimizer trains the parameters" in group
    assert "Pass a factory that builds it" in ready and ready == used


def _simulated(ctx):
    def train(fake):
        fx.wrap(net(), fake, optimizer=offload)

    with device_known(ctx):
        return [(one.text, one.fatal) for one in fx.dry_run(train, world=1).problems]


def test_a_dry_run_refuses_it(one):
    (((text, fatal), *_),) = one.run(_simulated)
    assert "PlanError" in text and "these are on cpu" in text and fatal
