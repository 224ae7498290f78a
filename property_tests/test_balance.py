"""The load of experts: the loss and the biases of several ranks are those of one process."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.testing.training import on_mesh
from tests._errors import raises_code
from tests.cluster._models import PIPELINES

ON_RANKS = settings(
    max_examples=4, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
WIDTH, EXPERTS, UPDATES = 4, 4, 3


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 6))
        self.down = nn.Parameter(torch.randn(EXPERTS, 6, WIDTH))

    def forward(self, tokens, index, weights):
        def compute(rows, product):
            return product(product(rows, self.up).relu(), self.down)

        return fx.experts.mix(tokens, index, weights, self.num_experts, compute)


class Mixture(nn.Module):
    """One that chooses experts by its scores and a bias of each."""

    def __init__(self, chosen):
        super().__init__()
        self.chosen = chosen
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()
        self.register_buffer("bias", torch.linspace(0, 2, EXPERTS, dtype=torch.float64))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        scores = self.gate(tokens).sigmoid()
        index = (scores + self.bias).topk(self.chosen).indices
        out = self.experts(tokens, index, scores.gather(1, index))
        return x + out.view_as(x)


def _net(chosen):
    torch.manual_seed(0)
    return nn.Sequential(*(Mixture(chosen) for _ in range(2))).double()


def _rows(update):
    generator = torch.Generator().manual_seed(update)
    return torch.randn(8, 3, WIDTH, dtype=torch.float64, generator=generator)


def _balanced(ctx, chosen, plan, mesh):
    with on_mesh(ctx, mesh) as placed:
        net = _net(chosen)
        update = fx.experts.balance_bias(net, bias="bias", rate=0.1)
        model = fx.wrap(net, placed, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        fns = fx.StepFns(model, lambda model, batch: model(batch.data).square().mean())
        data, loads = placed.axis("data"), []
        for number in range(UPDATES):
            rows = _rows(number).chunk(data.world_size)[data.rank]
            for part in rows.chunk(plan.accumulate):
                report = fx.step(placed, fx.batch(part, placed, plan), fns)
            assert report.applied
            loads.append({name: count.tolist() for name, count in update(model).items()})
        return loads, {name: value.clone() for name, value in fx.weights(model)}


_SPLIT = fx.TP(styles=(fx.Style(modules="*.experts", style="expert"),))
PLANS = {
    "DDP": (fx.DDP(), None),
    "FSDP": (fx.FSDP(), None),
    "spread": (fx.FSDP(expert=2), None),
    "tensor axis": (fx.FSDP(mode="none", tensor=_SPLIT), fx.Mesh(tensor=2)),
    "pipeline": (fx.PP(), fx.Mesh(pipeline=2)),
}


@PIPELINES
@ON_RANKS
@given(data=st.data())
def test_biases_are_those_of_one_process(pair, data):
    strategy, mesh = PLANS[data.draw(st.sampled_from([*PLANS]), label="strategy")]
    chosen = data.draw(st.integers(1, 3), label="experts of a token")
    plan = fx.Plan(
        strategy=strategy,
        accumulate=data.draw(st.integers(1, 2), label="accumulate"),
        recompute=("Mixture",) if data.draw(st.booleans(), label="recompute") else (),
    )

    net = _net(chosen)
    with fx.detect({}, device="cpu") as alone:
        loads, wanted = _balanced(alone, chosen, fx.Plan(), None)
    before = dict(net.named_buffers())
    assert any(not torch.equal(wanted[name], value) for name, value in before.items())
    stages = [{"0.bias"}, {"1.bias"}] if mesh == fx.Mesh(pipeline=2) else [{"0.bias", "1.bias"}] * 2
    for names, (found, weights) in zip(
        stages, pair.run(_balanced, chosen, plan, mesh), strict=True
    ):
        for got, of_one in zip(found, loads, strict=True):
            assert got == {name: of_one[name] for name in names}
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)
            if name.endswith("bias") and "gate" not in name:
                assert torch.equal(weights[name], value)


def _router(ctx, chosen, plan):
    """A router, and a loss whose micro-batches are weighted by their tokens."""
    torch.manual_seed(0)
    router = nn.Linear(WIDTH, EXPERTS, bias=False).double()
    model = fx.wrap(router, ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))

    def loss(model, batch):
        tokens, kept = batch.data
        balance = fx.experts.balance_loss(
            model(tokens).flatten(0, 1), model, top_k=chosen, mask=kept
        )
        return fx.Weighted(balance * kept.sum(), kept.sum())

    return fx.StepFns(model, loss)


def _balance(ctx, rows, mask, chosen, parts):
    plan = fx.Plan(strategy=fx.DDP(), accumulate=parts)
    fns = _router(ctx, chosen, plan)
    for part, kept in zip(rows.chunk(parts), mask.chunk(parts), strict=True):
        own = [whole.chunk(ctx.world_size)[ctx.rank] for whole in (part, kept)]
        report = fx.step(ctx, fx.batch(tuple(own), ctx, plan), fns)
    assert report.applied
    return fns.model.module.weight.detach().clone()


def _balance_of_six_rows(ctx):
    plan = fx.Plan(strategy=fx.DDP(), even="uneven", batch="global")
    fns, rows = _router(ctx, 2, plan), _rows(0)[:6]
    data = TensorDataset(rows, torch.ones(6, rows.shape[1]))
    for batch in fx.shard(DataLoader(data, batch_size=4), ctx, plan):
        fx.step(ctx, batch, fns)
    return fns.model.module.weight.detach().clone()


def test_a_rank_without_rows_counts_for_nothing_in_the_loss(clusters):
    with fx.detect({}, device="cpu") as alone:
        wanted = _balance_of_six_rows(alone)
    for weight in clusters[4].run(_balance_of_six_rows):  # the last two rows are on two ranks
        torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=1e-6)  # in fp32


@ON_RANKS
@given(data=st.data())
def test_the_loss_is_that_of_one_process(pair, data):
    chosen = data.draw(st.integers(1, 3), label="experts of a token")
    parts = data.draw(st.sampled_from([1, 2]), label="micro-batches")
    kept = data.draw(st.lists(st.booleans(), min_size=24, max_size=24), label="mask")
    mask = torch.tensor(kept).view(8, 3)
    mask[:, 0] = True  # each rank has a token in each micro-batch
    rows = _rows(0)
    with fx.detect({}, device="cpu") as alone:
        wanted = _balance(alone, rows, mask, chosen, parts)
    for weight in pair.run(_balance, rows, mask, chosen, parts):
        torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=1e-6)  # in fp32


@given(st.data())
def test_it_is_the_loss_of_transformers_for_each_layer(data):
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    chosen = data.draw(st.integers(1, 3))
    layers = [torch.randn(12, EXPERTS) * data.draw(st.sampled_from([0.1, 3.0])) for _ in range(2)]
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=12, max_size=12)))
    mask[0] = True
    wanted = [
        modeling.load_balancing_loss_func((one,), EXPERTS, chosen, mask.view(3, 4))
        for one in layers
    ]
    with fx.detect({}, device="cpu") as ctx:
        model = fx.wrap(nn.Linear(WIDTH, EXPERTS), ctx)
        found = fx.experts.balance_loss(layers, model, top_k=chosen, mask=mask.view(3, 4))
    torch.testing.assert_close(found, torch.stack(wanted).mean())


@given(st.data())
def test_mixed_tokens_are_the_sum_of_their_experts(data):
    tokens = torch.randn(data.draw(st.integers(0, 9)), WIDTH, dtype=torch.float64)
    chosen = data.draw(st.integers(1, 3))
    picks = st.integers(0, EXPERTS)  # the last one is no expert
    drawn = data.draw(st.lists(picks, min_size=len(tokens) * chosen, max_size=len(tokens) * chosen))
    index = torch.tensor(drawn, dtype=torch.int64).view(len(tokens), chosen)
    weights = torch.rand(index.shape, dtype=torch.float64).requires_grad_()
    experts = Experts().double()
    wanted = torch.zeros_like(tokens)
    for token, place in zip(*torch.where(index < EXPERTS), strict=True):
        e = index[token, place]
        made = (tokens[token] @ experts.up[e]).relu() @ experts.down[e]
        wanted = wanted.index_add(0, token[None], made[None] * weights[token, place])
    found = experts(tokens, index, weights)
    torch.testing.assert_close(found, wanted)
    parameters = [*experts.parameters(), weights]
    grads = torch.autograd.grad(found.square().sum(), parameters)
    if wanted.requires_grad:
        for got, one in zip(
            grads,
            torch.autograd.grad(wanted.square().sum(), parameters, materialize_grads=True),
            strict=True,
        ):
            torch.testing.assert_close(got, one)


@given(st.data())
def test_grouped_products_are_those_of_the_loop(data):
    """The products of GPUs, here on the CPU, with rows of no expert at the end."""
    if not hasattr(F, "grouped_mm"):
        pytest.skip("torch has grouped_mm from 2.10 on")
    tokens = torch.randn(data.draw(st.integers(1, 9)), 8).bfloat16().requires_grad_()
    picks = st.lists(st.integers(0, EXPERTS), min_size=2 * len(tokens), max_size=2 * len(tokens))
    index = torch.tensor(data.draw(picks)).view(-1, 2)
    weights = torch.rand(index.shape)
    width = data.draw(st.sampled_from([16, 12]), label="a width that grouped_mm takes, or not")
    up = torch.randn(EXPERTS, 8, width).bfloat16().requires_grad_()

    def outcome():
        out = fx.experts.mix(tokens, index, weights, EXPERTS, lambda rows, by: by(rows, up).relu())
        return out, *torch.autograd.grad(out.float().square().sum(), (tokens, up))

    wanted = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fx.experts, "_has_grouped_products", lambda tokens: True)
        for found, value in zip(outcome(), wanted, strict=True):
            torch.testing.assert_close(found, value, rtol=0.05, atol=0.05)


class _NoBias(Mixture):
    def __init__(self):
        super().__init__(1)
        del self.bias


def test_what_has_no_biases_is_refused():
    with raises_code("FX200", "Linear"):
        fx.experts.balance_bias(nn.Linear(2, 2), bias="bias", rate=0.1)
    with raises_code("FX200", "0.bias", "[4]"):
        fx.experts.balance_bias(nn.Sequential(_NoBias()), bias="bias", rate=0.1)
    net = _net(1)
    update = fx.experts.balance_bias(net, bias="bias", rate=0.1)
    with fx.detect({}, device="cpu") as ctx:
        model = fx.wrap(net, ctx, fx.Plan(local=fx.LocalSGD(every=2)))
        with raises_code("FX200", "Plan(local"):
            update(model)
