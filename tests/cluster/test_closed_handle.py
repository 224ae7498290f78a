"""A closed context and a closed handle refuse every use, instead of running over what is left."""

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import ops
from tests._errors import raises_code
from tests._slow import slow_after
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
    slow_after(
        4,
        [(1, fx.Single()), (1, FSDP), (2, fx.DDP()), (2, fx.DDP(shard_optimizer=True)), (2, FSDP)],
    ),
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
    with raises_code("FX500", "unwrapped"):
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
    with raises_code("FX200", "fx.unwrap"):
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


CLOSED = "this context is closed; call fx.detect"


def _uses(ctx, folder):
    """By name, what uses a context; everything they need is made while it is open."""
    model = fx.wrap(torch.nn.Linear(1, 1), ctx, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
    loader = DataLoader(torch.ones(8, 1), batch_size=2)
    sharded = fx.shard(loader, ctx)
    batch = next(iter(sharded))
    copy, axis = ops.duplicate(ctx), ctx.axis("tensor")
    return {
        "gather": lambda: ops.gather(torch.zeros(2), ctx),
        "barrier": lambda: ops.barrier(ctx),
        "any_rank": lambda: ops.any_rank(False, ctx),
        "on a duplicate": lambda: ops.gather_objects(1, copy),
        "on an axis": lambda: ops.reduce(1, axis),
        "on an axis found later": lambda: ops.reduce(1, ctx.axis("tensor")),
        "duplicate": lambda: ops.duplicate(ctx),
        "step": lambda: fx.step(ctx, batch, fns),
        "shard": lambda: fx.shard(loader, ctx),
        "iterating": lambda: next(iter(sharded)),
        "wrap": lambda: fx.wrap(torch.nn.Linear(1, 1), ctx),
        "save": lambda: fx.save(folder, ctx, model),
        "restore": lambda: fx.restore(folder, ctx, model),
    }


def _after_closing(ctx, folder, mesh):
    mine = fx.detect({}, device="cpu", timeout_s=5, mesh=mesh)
    uses = _uses(mine, folder)
    fx.close(mine)
    fx.close(mine)
    found = {}
    for name, use in uses.items():
        try:
            use()
        except fx.errors.ContextError as error:
            found[name] = str(error)
        else:
            found[name] = "no error"
    return found, ops.reduce(1, ctx, op="sum")


@pytest.mark.parametrize("mesh", [None, fx.Mesh(replicate=1, shard=2), fx.Mesh(replicate=2)])
def test_a_closed_context_refuses_every_use(pair, tmp_path, mesh):
    for found, total in pair.run(_after_closing, str(tmp_path), mesh):
        assert {name for name, text in found.items() if CLOSED not in text} == set()
        assert total == pair.n


def test_a_closed_context_of_one_rank_refuses_every_use(tmp_path):
    with fx.detect({}, device="cpu") as ctx:
        uses = _uses(ctx, str(tmp_path))
    fx.close(ctx)
    for name, use in uses.items():
        with pytest.raises(fx.errors.ContextError, match=CLOSED):
            pytest.fail(f"{name}: {use()}")
