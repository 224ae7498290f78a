"""Optimizer states shared out over replicas: what a rank holds, what is sent, any optimizer."""

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.testing import Transformer, count_collectives

SHARED = fx.Plan(strategy=fx.DDP(shard_optimizer=True), clip_norm=1.0)


def _groups(params):
    """Two groups, and a learning rate of its own for one of them."""
    thin = [p for p in params if p.ndim == 1]
    wide = [p for p in params if p.ndim > 1]
    return [{"params": wide, "lr": 0.02}, {"params": thin, "weight_decay": 0.0}]


def _two(params):
    half = len(params) // 2
    return {"a": torch.optim.AdamW(params[:half]), "b": torch.optim.SGD(params[half:], lr=0.1)}


OPTIMIZERS = {
    "groups": lambda params: torch.optim.AdamW(_groups(params), lr=0.01, amsgrad=True),
    "two": _two,
    "states from the start": lambda params: torch.optim.Adagrad(
        params, initial_accumulator_value=1
    ),
    "list": lambda params: [torch.optim.RMSprop(params, momentum=0.5)],
}


def _mixed():
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, dtype=torch.float64))
    net[0].register_forward_hook(lambda module, args, out: out.double())
    return net


def _lone():
    return nn.Linear(3, 2, bias=False)


def _train(ctx, strategy, kind, net=None):
    plan = fx.Plan(strategy=strategy, clip_norm=1.0)
    torch.manual_seed(0)
    model = fx.wrap(
        Transformer() if net is None else net(),
        ctx,
        plan,
        optimizer=OPTIMIZERS[kind],
        scheduler=None if kind != "groups" else lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
    )
    generator = torch.Generator().manual_seed(ctx.rank)
    for _ in range(3):
        with count_collectives() as traffic:
            x = (
                torch.randint(0, 8, (2, 6), generator=generator)
                if net is None
                else torch.rand(2, 3, generator=generator)
            )
            with fx.ops.sync(model):
                fx.ops.backward(model(x).square().mean(), model)
            fx.ops.apply(model)
    state = model.strategy.state(model)
    held = sum(t.nbytes for key, t in state.tensors.items() if key.kind == "optimizer")
    values = {name: value.detach() for name, value in fx.unwrap(model).named_parameters()}
    own = {p.untyped_storage().nbytes() - p.nbytes for p in values.values()}
    return values, held, traffic.counts, own


@pytest.mark.slow
def test_half_of_the_states_and_the_same_bits(pair):
    for kind in OPTIMIZERS:
        wanted, whole, _, _ = pair.run(_train, fx.DDP(), kind)[0]
        answers = pair.run(_train, fx.DDP(shard_optimizer=True), kind)
        assert abs(sum(held for _, held, _, _ in answers) - whole) <= whole * 0.01
        for values, held, counts, storage in answers:
            assert held < 0.55 * whole or kind == "two"
            assert counts == {"all_reduce": 1, "broadcast": 4 if kind == "two" else 2}
            assert all(torch.equal(value, wanted[name]) for name, value in values.items())
            assert storage == {0}, "unwrapped parameters stay in buckets"


@pytest.mark.slow
def test_parameters_of_two_formats_and_fewer_than_ranks(clusters):
    for net in (_mixed, _lone):
        wanted = clusters[4].run(_train, fx.DDP(), "list", net)[0][0]
        for values, *_ in clusters[4].run(_train, fx.DDP(shard_optimizer=True), "list", net):
            assert all(torch.equal(value, wanted[name]) for name, value in values.items())


def test_an_optimizer_that_was_built_before_is_shared_out_too(pair):
    assert pair.run(_built_before) == [[True, True, True]] * 2


def _built_before(ctx):
    net = Transformer()
    made = torch.optim.SGD(net.parameters(), lr=0.1)
    steps = []
    made.register_step_post_hook(lambda one, *_: steps.append(one))
    model = fx.wrap(net, ctx, SHARED, optimizer=made)
    held = [p for group in made.param_groups for p in group["params"]]
    whole = [p for group in model.optimizer.param_groups for p in group["params"]]
    fx.ops.backward(model(torch.zeros(2, 8, dtype=torch.int64)).sum(), model)
    fx.ops.apply(model)
    once = len(steps) == 1 and steps[0] is model.optimizer
    return [0 < len(held) < len(whole), len(whole) == len(list(net.parameters())), once]
