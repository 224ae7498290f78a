"""Muon on several ranks: the bits of torch's Muon in one process with the same gradients."""

import itertools

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import fxtrain as fx

ON_RANKS = settings(
    max_examples=12, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
SHAPES = st.lists(st.tuples(*[st.integers(1, 9)] * 2), min_size=1, max_size=5)
OPTIONS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.02, 0.3]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "momentum": st.sampled_from([0.0, 0.9]),
        "nesterov": st.booleans(),
        "ns_steps": st.integers(1, 5),
        "adjust_lr_fn": st.sampled_from([None, "match_rms_adamw"]),
    }
)
STRATEGIES = {
    "replicas": fx.DDP(),
    "sharded states": fx.DDP(shard_optimizer=True),
    "shards": fx.FSDP(min_params=1),
    "one unit": fx.FSDP(),
}


class Matrix(nn.Module):
    """A function of a matrix whose gradient has the same bits on any number of ranks."""

    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        rows = 1 + torch.arange(len(self.weight), dtype=x.dtype)[:, None]
        return (x * rows * self.weight).sum()


class Sum(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        self.parts = nn.ModuleList(Matrix(shape) for shape in shapes)

    def forward(self, x):
        return sum(part(x) for part in self.parts)


def _train(ctx, shapes, options, plan):
    model = fx.wrap(
        Sum(shapes), ctx, plan, optimizer=lambda params: torch.optim.Muon(params, **options)
    )
    for update in range(3):
        with fx.ops.sync(model):
            fx.ops.backward(model(torch.tensor(2.0**update)), model)
        fx.ops.apply(model)
    return {name: value.clone() for name, value in fx.weights(model)}


@ON_RANKS
@given(shapes=SHAPES, options=OPTIONS, strategy=st.sampled_from([*STRATEGIES]))
def test_ranks_have_the_bits_of_one_process(cluster, shapes, options, strategy):
    net = Sum(shapes)
    optimizer = torch.optim.Muon(net.parameters(), **options)
    for update in range(3):
        optimizer.zero_grad()
        net(torch.tensor(2.0**update)).backward()
        optimizer.step()
    plan = fx.Plan(strategy=STRATEGIES[strategy])
    for weights in cluster.run(_train, shapes, options, plan):
        for name, wanted in net.named_parameters():
            assert torch.equal(weights[name], wanted), name


_MESHES = {
    "replicas of shards": (fx.FSDP(min_params=1, shard=2), fx.Mesh(replicate=2, shard=2)),
    "shards of splits": (
        fx.FSDP(
            min_params=1,
            tensor=fx.TP(
                styles=(
                    fx.Style(modules="0", style="colwise"),
                    fx.Style(modules="2", style="rowwise"),
                )
            ),
        ),
        fx.Mesh(shard=2, tensor=2),
    ),
}


def _layers(ctx, strategy, mesh):
    with fx.detect({}, device="cpu", mesh=mesh, timeout_s=30) as placed:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.GELU(), nn.Linear(8, 4, bias=False))
        model = fx.wrap(
            net.double(),
            placed,
            fx.Plan(strategy=strategy),
            optimizer=lambda params: torch.optim.Muon(params, lr=0.05),
        )
        for update in range(3):
            x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6) + update
            with fx.ops.sync(model):
                fx.ops.backward(model(x).square().mean(), model)
            fx.ops.apply(model)
        return {name: value.clone() for name, value in fx.weights(model)}


@pytest.mark.slow  # four ranks
def test_meshes_of_two_dimensions_equal_one_process(clusters):
    wanted = clusters[4].run(_layers, fx.FSDP(min_params=1), fx.Mesh(shard=4))
    for strategy, mesh in _MESHES.values():
        answers = clusters[4].run(_layers, strategy, mesh)
        for rank, name in itertools.product(range(4), wanted[0]):
            torch.testing.assert_close(answers[rank][name], wanted[0][name], rtol=1e-9, atol=1e-12)
