"""Tensor parallelism beyond the laws: bad plans, the plans that models carry, split logits."""

from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.backends.tensor import find_splits
from fxtrain.testing import Transformer, fake_world
from tests._errors import raises_code
from tests._slow import slow_after
from tests.cluster._models import (
    ATTENTION,
    DOWN,
    PIPELINES,
    UP,
    Experts,
    gpt2,
    llama,
    mixtral,
    qwen2_moe,
    qwen3_moe,
    tied_llama,
)

PAIR = fx.Mesh(tensor=2)
STAGES = fx.Mesh(pipeline=2, tensor=2)


def _sgd(params):
    return torch.optim.SGD(params, lr=0.3)


def _tp(*styles, **options):
    return fx.Plan(strategy=fx.FSDP(tensor=fx.TP(styles=styles, **options)))


BAD = {
    "axis": (None, _tp(UP, DOWN), "which has one rank. Use more"),
    "silent": (PAIR, fx.Plan(strategy=fx.FSDP()), "which FSDP without tensor= does not use"),
    "name": (PAIR, _tp(fx.Style(modules="blocks.*.upp", style="colwise")), "Did you mean"),
    "none": (PAIR, _tp(), "has no tensor-parallel plan"),
    "kind": (PAIR, _tp(fx.Style(modules="norm", style="colwise")), "norm is a LayerNorm"),
    "fits": (fx.Mesh(tensor=8), _tp(UP, DOWN), None),
    "divide": (
        fx.Mesh(tensor=16),
        _tp(fx.Style(modules="head", style="colwise_gather")),
        "dimension of 24, not divisible by 16 tensor",
    ),
    "ties": (
        PAIR,
        _tp(fx.Style(modules="head", style="colwise_gather")),
        "embed and head share a parameter",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_tensor_plan_that_does_not_fit_is_refused(name):
    mesh, plan, words = BAD[name]
    with fake_world(16, rank=3, mesh=mesh) as ctx:
        if words is None:
            fx.wrap(Transformer(), ctx, plan)
            return
        with pytest.raises(fx.PlanError, match=words):
            fx.wrap(Transformer(), ctx, plan)


def test_sequences_need_blocks_and_a_length_that_divides():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    cut = fx.Style(modules="0", style="colwise_gather")
    with fake_world(2, mesh=PAIR) as ctx:
        with raises_code("FX202", "ModuleList"):
            fx.wrap(net, ctx, _tp(cut, sequence=True))
        with raises_code("FX202", "blocks.0.attention.q"):
            fx.wrap(Transformer(), ctx, _tp(UP, DOWN, sequence=True))
        with raises_code("FX202", "attn.c_attn"):
            fx.wrap(gpt2(), ctx, _tp(sequence=True))
        model = fx.wrap(Transformer(), ctx, _tp(*ATTENTION, UP, DOWN, sequence=True))
        with raises_code("FX500", "7 tokens"):
            model(torch.zeros(1, 7, dtype=torch.int64))


@pytest.mark.parametrize("rank", slow_after(1, [21, 0, 63]))
def test_a_rank_of_many_holds_its_part_of_both_axes(rank):
    mesh = fx.Mesh(replicate=2, shard=8, tensor=4)
    with fake_world(64, rank=rank, mesh=mesh) as ctx:
        model = fx.wrap(Transformer(), ctx, _tp(UP, DOWN), optimizer=_sgd)
        parts = {name: p.to_local().shape for name, p in model.module.named_parameters()}
        assert parts["blocks.0.up.weight"] == (32 // 4 // 8, 16)
        assert parts["blocks.0.down.weight"] == (16 // 8, 32 // 4)
        model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
        fx.ops.clip_norm(model, 1.0)
        assert fx.ops.apply(model).applied


MIXED = {"mixtral": mixtral, "qwen2_moe": qwen2_moe, "qwen3_moe": qwen3_moe}
MODELS = {"llama": llama, "tied": tied_llama, "gpt2": gpt2, **MIXED}


def test_a_carried_plan_leaves_out_what_would_cut_ties():
    net = Transformer()
    net._tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_rep"}
    assert set(find_splits(net, fx.TP())) == {
        f"blocks.{i}.{n}" for i in (0, 1) for n in ("up", "down")
    }
    net._tp_plan["norm"] = "packed_colwise"
    with (
        fake_world(2, mesh=PAIR) as ctx,
        raises_code("FX202", "packed_colwise"),
    ):
        fx.wrap(net, ctx, _tp())


def test_the_plans_of_models_are_found():
    splits = find_splits(llama(), fx.TP())
    assert splits["model.layers.1.self_attn.q_proj"] == "colwise"
    assert splits["model.layers.0.mlp.down_proj"] == "rowwise"
    assert splits["lm_head"] == "colwise_gather"
    tied = find_splits(tied_llama(), fx.TP())
    assert (tied["lm_head"], tied["model.embed_tokens"]) == ("colwise_gather", "rowwise")
    assert find_splits(gpt2(), fx.TP()) == {
        f"transformer.h.{index}.mlp.{name}": style
        for index in range(2)
        for name, style in (("c_fc", "colwise"), ("c_proj", "rowwise"))
    }


def test_heads_that_do_not_divide_are_refused():
    refused = raises_code("FX202", "num_key_value_heads=2", "4 tensor ranks")
    with fake_world(4, mesh=fx.Mesh(tensor=4)) as ctx, refused:
        fx.wrap(llama(), ctx, _tp())


def _logit_loss(model, tokens):
    """The sum over the tokens that count, and how many those are."""
    logits = model(tokens).logits
    total = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum", ignore_index=0)
    return fx.Weighted(total, (tokens != 0).sum())


def _tokens():
    return torch.arange(64).reshape(8, 8) * 7 % 24


def train(ctx, name, mesh, plan):
    placed = fx.detect({}, device="cpu", mesh=mesh, timeout_s=60)
    model = fx.wrap(MODELS[name](), placed, plan, optimizer=_sgd)
    loader = fx.shard(
        DataLoader(TensorDataset(_tokens()), batch_size=4 // placed.axis("data").world_size),
        placed,
        plan,
    )
    fns = fx.StepFns(model=model, loss=lambda model, batch: _logit_loss(model, batch[0]))
    norms = [float(fx.step(placed, b, fns).grad_norm) for e in loader.epochs(2) for b in e]
    with torch.no_grad():
        logits = model.eval()(_tokens()[:4]).logits
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    return norms, logits, {n: p.detach() for n, p in fx.unwrap(model).named_parameters()}


def by_hand(name, clip):
    net = MODELS[name]()
    optimizer = _sgd(net.parameters())
    norms = []
    for _ in range(2):
        for part in _tokens().split(4):
            loss = _logit_loss(net, part)
            (loss.total / loss.weight).backward()
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip)))
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return norms, net(_tokens()[:4]).logits, dict(net.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "n", "mesh", "options"),
    [
        ("llama", 2, PAIR, {}),
        ("llama", 2, PAIR, {"sequence": True}),
        ("tied", 2, PAIR, {"loss": True}),
        ("llama", 4, fx.Mesh(shard=2, tensor=2), {"sequence": True, "loss": True}),
        ("mixtral", 2, PAIR, {}),
        ("mixtral", 4, fx.Mesh(shard=2, tensor=2), {}),
        ("qwen2_moe", 2, PAIR, {}),
        ("gpt2", 2, PAIR, {}),
        ("gpt2", 4, fx.Mesh(shard=2, tensor=2), {}),
        pytest.param("mixtral", 2, fx.Mesh(pipeline=2), {}, marks=PIPELINES),
        pytest.param("mixtral", 4, STAGES, {}, marks=PIPELINES),
        pytest.param("qwen3_moe", 2, fx.Mesh(pipeline=2), {}, marks=PIPELINES),
        pytest.param("llama", 4, STAGES, {"sequence": True}, marks=PIPELINES),
        pytest.param("tied", 4, STAGES, {"loss": True}, marks=PIPELINES),
    ],
)
def test_models_of_transformers_train_as_in_one_process(clusters, name, n, mesh, options):
    held = fx.FSDP(tensor=fx.TP(**options)) if mesh.tensor > 1 else None
    strategy = fx.PP(stages=held) if mesh.pipeline > 1 else held
    plan = fx.Plan(strategy=strategy, clip_norm=0.5)
    wanted_norms, wanted_logits, wanted = by_hand(name, 0.5)
    within = 1e-4 if name in MIXED else 1e-7  # of which all, or the norms, are in fp32
    for norms, logits, parameters in clusters[n].run(train, name, mesh, plan):
        torch.testing.assert_close(norms, wanted_norms, rtol=within, atol=0)
        torch.testing.assert_close(logits, wanted_logits, rtol=10 * within, atol=10 * within)
        for key, value in wanted.items():
            torch.testing.assert_close(parameters[key], value, rtol=10 * within, atol=within / 10)


def _train_by(ctx, way):
    """Full weights after two epochs under `TP(loss=True)`, whose loss the loop computes itself."""
    plan = fx.Plan(strategy=fx.FSDP(tensor=fx.TP(loss=True)), clip_norm=0.5, accumulate=2)
    placed = fx.detect({}, device="cpu", mesh=PAIR, timeout_s=60)
    model = fx.wrap(tied_llama(), placed, plan, optimizer=_sgd)
    loader = fx.shard(DataLoader(TensorDataset(_tokens()), batch_size=2), placed, plan)
    fns = fx.StepFns(model, lambda model, batch: _logit_loss(model, batch[0]))
    for batch in (batch for epoch in loader.epochs(2) for batch in epoch):
        if way == "step":
            fx.step(placed, batch, fns)
            continue
        with fx.ops.sync(model, batch), ExitStack() as inner:
            if way == "block inside a block":
                inner.enter_context(fx.ops.sync(model, batch))
            loss = _logit_loss(model, batch[0])
            if way != "block around the loss":
                fx.update(placed, batch, model, loss)
        if way == "block around the loss":
            fx.update(placed, batch, model, loss)
    return [weight for _, weight in fx.weights(model)]


@pytest.mark.slow
def test_split_logits_and_a_loss_of_the_loop_are_a_step_in_every_bit(pair):
    wanted = pair.run(_train_by, "step")
    for way in ("block around the loss", "block around both", "block inside a block"):
        for got, of_step in zip(pair.run(_train_by, way), wanted, strict=True):
            torch.testing.assert_close(got, of_step, rtol=0, atol=0)


def _experts(count=4):
    return Experts(torch.arange(count * 4.0).reshape(count, 2, 2), torch.ones(count, 2))


EXPERT = fx.Style(modules="0", style="expert")


def _mixed(ctx, cut):
    placed = fx.detect({}, device="cpu", mesh=PAIR, timeout_s=60) if cut else ctx
    plan = _tp(EXPERT) if cut else fx.Plan()
    model = fx.wrap(nn.Sequential(_experts()), placed, plan)
    experts = model.module[0]
    tokens = torch.arange(6.0).reshape(3, 2).requires_grad_()
    index = torch.tensor([[0, 3], [1, 2], [3, 1]])
    weights = torch.tensor([[0.5, 0.5], [0.1, 0.9], [1.0, 2.0]], requires_grad=True)
    # The second call takes names instead of places.
    out = experts(tokens, index, weights) + experts(tokens=tokens, index=index, weights=weights)
    out.square().sum().backward()
    held = experts.weight.to_local() if cut else experts.weight
    grads = [fx.unwrap(model)[0].num_experts, tokens.grad, weights.grad]
    return out.detach(), held.detach(), grads


def test_a_rank_runs_its_experts_and_outputs_are_summed(clusters):
    ((out, whole, grads),) = clusters[1].run(_mixed, False)
    for rank, (got, held, found) in enumerate(clusters[2].run(_mixed, True)):
        torch.testing.assert_close(got, out)
        assert torch.equal(held, whole[2 * rank : 2 * rank + 2])
        torch.testing.assert_close(found, grads)


class _Apart(nn.ModuleList):
    num_experts = 2

    def forward(self, tokens, index, weights):
        return tokens


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (nn.Sequential(_experts(3)), "along a dimension of 3, not divisible by 2 tensor ranks"),
        (nn.Sequential(nn.Linear(4, 4)), "0 is a Linear, but expert splits a mixture"),
        (
            nn.Sequential(_Apart([nn.Linear(2, 2)] * 2)),
            "0 is a _Apart, but expert splits a mixture",
        ),
    ],
)
def test_experts_that_cannot_be_split_are_refused(net, words):
    with fake_world(2, mesh=PAIR) as ctx, pytest.raises(fx.PlanError, match=words):
        fx.wrap(net, ctx, _tp(EXPERT))


def test_experts_do_not_see_a_part_of_the_sequence():
    refused = raises_code("FX202", "layers.0.mlp.experts")
    with fake_world(2, mesh=PAIR) as ctx, refused:
        fx.wrap(mixtral(), ctx, _tp(sequence=True))
