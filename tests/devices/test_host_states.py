"""States on the host: in checkpoints, in memory, and where they are refused."""

import gc
import importlib.util
import weakref

import pytest

import fxtrain as fx
from tests.devices._device import STAND_IN
from tests.devices._host_updates import device_known, fused, offload, same, states, values
from tests.devices._training import net, parts

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs fxtrain[quant]"),
    pytest.mark.skipif(STAND_IN == "cpu", reason="torchao updates parameters of accelerators"),
]


def _resumed(ctx, folder, first, then, *, background=False):
    """States, values and losses of a run, and of one that resumes in its middle."""
    with device_known(ctx):
        loader, fns = parts(ctx, fx.Plan(clip_norm=0.1), optimizer=first)
        _, again = parts(ctx, fx.Plan(clip_norm=0.1), optimizer=then)
    batches = list(loader)
    for batch in batches[:3]:
        fx.step(ctx, batch, fns)
    saved = states(fns.model), values(fns.model.module)
    saving = fx.save(folder, ctx, fns.model, position=fx.Position(), background=background)
    wanted = [float(fx.step(ctx, batch, fns).loss) for batch in batches[3:]]
    if background:
        saving.result()
    for batch in batches[:2]:
        fx.step(ctx, batch, again)
    fx.restore(folder, ctx, again.model)
    restored = states(again.model), values(again.model.module)
    found = [float(fx.step(ctx, batch, again).loss) for batch in batches[3:]]
    ends = values(fns.model.module), values(again.model.module)
    return saved, restored, (wanted, found), ends


@pytest.mark.parametrize("background", [False, True])
def test_resumes_bit_for_bit(one, tmp_path, background):
    call = (str(tmp_path), offload, offload)
    ((saved, restored, losses, ends),) = one.run(_in_background if background else _resumed, *call)
    assert len(saved[0]) == 12 and all(map(same, saved, restored))
    assert losses[0] == losses[1] and same(*ends)


def _in_background(ctx, *args):
    return _resumed(ctx, *args, background=True)


@pytest.mark.parametrize("pair", [(offload, fused), (fused, offload)], ids=["to", "from"])
def test_checkpoints_are_those_of_the_optimizer_itself(one, tmp_path, pair):
    ((saved, restored, losses, _),) = one.run(_resumed, str(tmp_path), *pair)
    assert all(map(same, saved, restored))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def _loaded(ctx, folder):
    """Where states are after `fx.restore`, and after torch's own loading and an update."""
    with device_known(ctx):
        loader, fns = parts(ctx, fx.Plan(), optimizer=offload)
    batches, model = list(loader), fns.model
    weight = model.module[0].weight
    fx.step(ctx, batches[0], fns)
    fx.save(folder, ctx, model, position=fx.Position())
    before = model.optimizer.state[weight]["exp_avg"].data_ptr()
    fx.step(ctx, batches[1], fns)
    wanted = values(model.module)
    fx.restore(folder, ctx, model)
    restored = model.optimizer.state[weight]["exp_avg"]
    kinds = [restored.device.type]
    model.optimizer.load_state_dict(model.optimizer.state_dict())
    fx.step(ctx, batches[1], fns)
    kinds.append(model.optimizer.state[weight]["exp_avg"].device.type)
    return kinds, restored.data_ptr() == before, same(values(model.module), wanted)


def test_states_stay_on_the_host_when_they_are_loaded(one, tmp_path):
    ((kinds, in_place, trained_alike),) = one.run(_loaded, str(tmp_path))
    assert kinds == ["cpu", "cpu"] and in_place and trained_alike


def _searched(ctx):
    """Values and states before a search for a learning rate, and after it."""
    with device_known(ctx):
        loader, fns = parts(ctx, fx.Plan(), optimizer=offload)
    fx.step(ctx, next(iter(loader)), fns)
    before = values(fns.model.module), states(fns.model)
    curve = fx.tuning.find_lr(ctx, fns, loader, start=1e-4, stop=1.0, updates=10)
    after = values(fns.model.module), states(fns.model)
    fx.step(ctx, next(iter(loader)), fns)
    return before, after, len(curve.rates), fns.model.optimizer.param_groups[0]["lr"]


def test_a_search_for_a_rate_changes_nothing(one):
    ((before, after, count, rate),) = one.run(_searched)
    assert all(map(same, before, after)) and count > 2 and rate == 1e-3


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
    "offload_gradients=False: gradients": (fx.Plan(), {"offload_gradients": True}),
    "FSDP does not support torchao's": (fx.Plan(strategy=fx.FSDP()), {}),
    "PP does not support torchao's": (fx.Plan(strategy=fx.PP()), {}),
}
SEVERAL = {
    "FSDP does not support torchao's": (fx.Plan(strategy=fx.FSDP()), {}),
    "DDP does not support torchao's": (fx.Plan(strategy=fx.DDP(shard_optimizer=True)), {}),
}


def _check_refused(pool, cases):
    for found in pool.run(_refused, list(cases.values())):
        assert len(found) == len(cases)
        for text, part in zip(found, cases, strict=True):
            assert part in text


def test_what_one_rank_does_not_support_is_refused_by_name(one):
    _check_refused(one, ONE_RANK)


def test_what_ranks_do_not_support_is_refused_by_name(two):
    _check_refused(two, SEVERAL)
