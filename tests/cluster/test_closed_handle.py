"""A handle after `unwrap`: what it says, and what was open."""

import pytest
import torch

import fxtrain as fx
from tests.cluster._handles import FSDP, adam, new_handle, sequential

CALLS = {
    "step": lambda ctx, model, fns, batch, folder: fx.step(ctx, batch, fns),
    "calling the model": lambda ctx, model, fns, batch, folder: model(batch[0]),
    "train": lambda ctx, model, fns, batch, folder: model.train(),
    "eval": lambda ctx, model, fns, batch, folder: model.eval(),
    "parameters": lambda ctx, model, fns, batch, folder: model.parameters(),
    "save": lambda ctx, model, fns, batch, folder: fx.save(
        folder, ctx, model, position=fx.Position()
    ),
    "restore": lambda ctx, model, fns, batch, folder: fx.restore(folder, ctx, model),
    "export": lambda ctx, model, fns, batch, folder: fx.export(model, folder),
    "load_model": lambda ctx, model, fns, batch, folder: fx.load_model({}, model),
    "weights": lambda ctx, model, fns, batch, folder: fx.weights(model),
    "gathered": lambda ctx, model, fns, batch, folder: fx.gathered(model).__enter__(),
    "unwrap": lambda ctx, model, fns, batch, folder: fx.unwrap(model),
    "ops.sync": lambda ctx, model, fns, batch, folder: fx.ops.sync(model),
    "ops.backward": lambda ctx, model, fns, batch, folder: fx.ops.backward(
        torch.ones((), requires_grad=True), model
    ),
    "ops.clip_norm": lambda ctx, model, fns, batch, folder: fx.ops.clip_norm(model, 1.0),
    "ops.clip_value": lambda ctx, model, fns, batch, folder: fx.ops.clip_value(model, 1.0),
    "ops.scale_grads": lambda ctx, model, fns, batch, folder: fx.ops.scale_grads(model, 1.0),
    "ops.apply": lambda ctx, model, fns, batch, folder: fx.ops.apply(model),
    "ops.average": lambda ctx, model, fns, batch, folder: fx.ops.average(model),
}


def _refusals(*given):
    """What each call says of the handle; None where it is silent."""
    found = {}
    for name, call in CALLS.items():
        try:
            call(*given)
            found[name] = None
        except fx.FxError as error:
            found[name] = str(error)
    return found


def _closed(ctx, strategy, folder):
    model, fns, loader = new_handle(ctx, strategy)
    batch = next(iter(loader))
    fx.step(ctx, batch, fns)
    with fx.gathered(model):
        lent = _refusals(ctx, model, fns, batch, folder)
    fx.step(ctx, batch, fns)
    fx.unwrap(model)
    return lent, _refusals(ctx, model, fns, batch, folder)


@pytest.mark.parametrize(
    ("n", "strategy"),
    [(1, fx.Single()), (1, FSDP), (2, fx.DDP()), (2, fx.DDP(shard_optimizer=True)), (2, FSDP)],
    ids=lambda one: type(one).__name__ if not isinstance(one, int) else str(one),
)
def test_a_closed_handle_says_what_to_do(clusters, tmp_path, n, strategy):
    for lent, spent in clusters[n].run(_closed, strategy, str(tmp_path / "a")):
        for name in CALLS:
            assert "inside fx.gathered, which puts full weights" in lent[name], (name, lent[name])
            assert "this model was unwrapped" in spent[name], (name, spent[name])
            assert "fx.weights(model)" in spent[name]
            assert name.split(".")[-1] in spent[name].split(":")[0]
    assert not (tmp_path / "a").exists()


def _copy_of_handle(ctx):
    import attrs

    model, _, _ = new_handle(ctx, fx.Single())
    other = attrs.evolve(model, scheduler=None)
    fx.unwrap(model)
    other(torch.ones(2, 8))


def test_a_copy_of_the_handle_is_closed_too(clusters):
    with pytest.raises(fx.errors.StepError, match=r"this model was unwrapped"):
        clusters[1].run(_copy_of_handle)


def _unwrapped_in_a_window(ctx, strategy):
    model, fns, loader = new_handle(ctx, strategy, accumulate=2)
    applied = fx.step(ctx, next(iter(loader)), fns).applied
    wanted = dict(fx.weights(model))
    net = fx.unwrap(model)
    grads = [parameter.grad for parameter in net.parameters()]
    same = all(torch.equal(value, wanted[name]) for name, value in net.state_dict().items())
    return applied, same or ctx.rank, grads


@pytest.mark.parametrize("strategy", [fx.DDP(), FSDP], ids=["DDP", "FSDP"])
@pytest.mark.parametrize("n", [1, 2])
def test_unwrap_drops_an_open_window(clusters, n, strategy):
    for applied, same, grads in clusters[n].run(_unwrapped_in_a_window, strategy):
        assert not applied
        assert same
        assert grads == [None] * len(grads)


def _wrapped_twice(ctx, strategy):
    net = sequential()
    plan = fx.Plan(strategy=strategy)
    model = fx.wrap(net, ctx, plan, optimizer=adam)
    with pytest.raises(fx.PlanError, match=r"Sequential is wrapped already, .* fx\.unwrap"):
        fx.wrap(net, ctx, plan, optimizer=adam)
    again = fx.wrap(fx.unwrap(model), ctx, plan, optimizer=adam)
    return again(torch.ones(2, 8)).shape


@pytest.mark.parametrize("strategy", [fx.DDP(), FSDP], ids=["DDP", "FSDP"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_module_has_one_open_handle(clusters, n, strategy):
    assert clusters[n].run(_wrapped_twice, strategy) == [(2, 1)] * n


def _dropped(ctx, strategy):
    net = sequential()
    fx.wrap(net, ctx, fx.Plan(strategy=strategy), optimizer=adam)
    return type(fx.wrap(net, ctx, fx.Plan(strategy=strategy), optimizer=adam)).__name__


def test_a_handle_that_was_dropped_is_not_in_the_way(clusters):
    assert clusters[1].run(_dropped, fx.DDP()) == ["Wrapped"]
