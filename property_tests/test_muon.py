"""Muon on several ranks: the bits of torch's Muon in one process with the same gradients."""

import itertools

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import fxtrain as fx
from fxtrain.testing.training import on_mesh
from tests.cluster._models import PIPELINES

ON_RANKS = settings(
    max_examples=4, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
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


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Chain(nn.Module):
    def __init__(self, width, inner, blocks):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, width)
        self.layers = nn.ModuleList(Block(width, inner) for _ in range(blocks))
        self.head = nn.Linear(width, 8)

    def forward(self, tokens):
        x = self.embed(tokens.flatten())
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _is_hidden_matrix(name, parameter):
    return parameter.ndim == 2 and name.startswith("layers")


def _pair(named, settings):
    hidden = [p for n, p in named if _is_hidden_matrix(n, p)]
    rest = [p for n, p in named if not _is_hidden_matrix(n, p)]
    return [torch.optim.Muon(hidden, **settings), torch.optim.AdamW(rest, lr=settings["lr"])]


def _schedules(optimizers):
    return [torch.optim.lr_scheduler.StepLR(one, 1, 0.7) for one in optimizers]


def _loss(model, tokens):
    return nn.functional.cross_entropy(model(tokens), tokens.flip(1).flatten())


def _tokens(update):
    return torch.arange(update, update + 24).view(8, 3) ** 2 % 8


def _pair_wrapped(placed, sizes, settings, plan):
    return fx.wrap(
        Chain(*sizes).double(),
        placed,
        plan,
        optimizer=lambda params: _pair(params.named(), settings),
        scheduler=_schedules,
    )


def _trained_with_both(ctx, sizes, settings, plan, mesh, folder):
    """Train three updates, stop, and continue from the checkpoint with three more."""
    with on_mesh(ctx, mesh) as placed:
        norms, ranks = [], placed.axis("data").world_size
        for start in (0, 3):
            model = _pair_wrapped(placed, sizes, settings, plan)
            if start:
                fx.restore(folder, placed, model)
            fns = fx.StepFns(model, _loss_of_batch)
            for update in range(start, start + 3):
                rows = _tokens(update).chunk(ranks)[placed.axis("data").rank]
                for part in rows.chunk(plan.accumulate):
                    report = fx.step(placed, fx.batch(part, placed, plan), fns)
                norms.append(float(report.grad_norm))
            fx.save(folder, placed, model, position=report.position)
        weights = {name: value.clone() for name, value in fx.weights(model)}
        return norms, weights, [g["lr"] for one in model.optimizers for g in one.param_groups]


def _loss_of_batch(model, batch):
    return _loss(model, batch.data)


_TENSOR = fx.TP(
    styles=(
        fx.Style(modules="layers.*.up", style="colwise"),
        fx.Style(modules="layers.*.down", style="rowwise"),
    )
)
_STAGES = fx.FSDP(min_params=1, mode="grads_and_optimizer")
PAIRS = {
    2: {
        "DDP": (fx.DDP(), None),
        "ZeRO-1": (fx.DDP(shard_optimizer=True), None),
        "FSDP": (fx.FSDP(min_params=1), None),
        "TP": (fx.FSDP(mode="none", tensor=_TENSOR), fx.Mesh(tensor=2)),
        "PP": (fx.PP(), fx.Mesh(pipeline=2)),
    },
    4: {
        "FSDP and TP": (fx.FSDP(min_params=1, tensor=_TENSOR), fx.Mesh(shard=2, tensor=2)),
        "PP of replicas": (fx.PP(), fx.Mesh(pipeline=2, replicate=2)),
        "PP and FSDP": (fx.PP(stages=_STAGES), fx.Mesh(pipeline=2, shard=2)),
    },
}


@PIPELINES
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@ON_RANKS
@given(data=st.data())
def test_muon_and_adamw_train_as_in_one_process(clusters, tmp_path_factory, ranks, data):
    strategy, mesh = PAIRS[ranks][data.draw(st.sampled_from([*PAIRS[ranks]]), label="strategy")]
    width, inner = (data.draw(st.sampled_from([4, 6, 8])) for _ in range(2))
    sizes = (width, inner, data.draw(st.integers(2, 3), label="blocks"))
    settings = data.draw(OPTIONS, label="Muon")
    clip = data.draw(st.sampled_from([0.1, 10.0]), label="clip_norm")
    plan = fx.Plan(strategy=strategy, clip_norm=clip, accumulate=data.draw(st.integers(1, 2)))

    net, norms = Chain(*sizes).double(), []
    optimizers = _pair([*net.named_parameters()], settings)
    schedules = _schedules(optimizers)
    for update in range(6):
        _loss(net, _tokens(update)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip)))
        for one in (*optimizers, *schedules):
            one.step()
        net.zero_grad()
    rates = [group["lr"] for one in optimizers for group in one.param_groups]

    folder = str(tmp_path_factory.mktemp("pair"))
    for answer in clusters[ranks].run(_trained_with_both, sizes, settings, plan, mesh, folder):
        torch.testing.assert_close(answer[0], norms, rtol=1e-6, atol=1e-9)
        for name, wanted in net.named_parameters():
            torch.testing.assert_close(answer[1][name], wanted, rtol=1e-6, atol=1e-9)
        assert answer[2] == pytest.approx(rates)
