"""Ulysses and AutoTP: sequences and weights cut among ranks, against one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.testing.training import on_mesh
from tests.deepspeed._ranks import on_rank, sgd

pytestmark = pytest.mark.deepspeed


class Attention(nn.Module):
    """Under Ulysses each rank has a part of the sequence outside, and of the heads inside."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))
        self.spread = None

    def forward(self, x):
        parts = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (part(x).unflatten(-1, (-1, 4)) for part in parts)
        mixed = _attend(q, k, v) if self.spread is None else self.spread(q, k, v, 0)
        return self.o_proj(mixed.flatten(2))


def _attend(q, k, v):
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.self_attn = nn.LayerNorm(16), Attention()
        self.up_proj, self.down_proj = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        x = x + self.self_attn(self.norm(x))
        return x + self.down_proj(F.gelu(self.up_proj(x)))


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(Layer(), Layer(), nn.Linear(16, 4))


def _rows():
    return torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(1))


def _by_hand(updates=3):
    """The model and its gradient norms."""
    net = _net()
    optimizer = sgd(net.parameters())
    norms = []
    for _ in range(updates):
        net(_rows()).square().mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return net, norms


def _update(model, x):
    fx.ops.backward(model(x).square().mean(), model)
    return float(fx.ops.apply(model, fx.state.UpdateSpec(clip_norm=0.5)).grad_norm)


def _spread(net):
    """Attention over all ranks of a sequence, once DeepSpeed has its groups."""
    from deepspeed.sequence.layer import DistributedAttention
    from deepspeed.utils import groups

    group = groups._get_sequence_parallel_group()
    for layer in net[:2]:
        layer.self_attn.spread = DistributedAttention(_attend, group, scatter_idx=2, gather_idx=1)


@on_rank
def _ulysses(ctx, stage):
    with on_mesh(ctx, fx.Mesh(context=2)) as placed:
        plan = fx.Plan(strategy=fx.DeepSpeed(stage=stage, sequence_parallel=2), clip_norm=0.5)
        net = _net()
        model = fx.wrap(net, placed, plan, optimizer=sgd)
        _spread(net)
        mine = _rows().chunk(2, dim=1)[placed.axis("context").rank]
        norms = [_update(model, mine) for _ in range(3)]
        return norms, [p.detach().clone() for p in fx.unwrap(model).parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_that_share_a_sequence_train_as_one_process(pair, stage):
    wanted, right = _by_hand()
    for norms, got in pair.run(_ulysses, stage):
        assert norms == pytest.approx(right, rel=1e-4)
        for a, b in zip(got, wanted.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def _mask():
    """Weights of tokens, of which the second half of a sequence has fewer."""
    return torch.tensor([[1.0, 1, 1, 1, 0, 0], [1, 0, 1, 0, 0, 1]]).repeat(2, 1)


def _weighed(model, x, mask):
    return fx.Weighted((model(x).square().mean(-1) * mask).sum(), mask.sum())


@on_rank
def _weighted_parts(ctx, stage):
    with on_mesh(ctx, fx.Mesh(context=2)) as placed:
        strategy = fx.DeepSpeed(stage=stage, sequence_parallel=2)
        plan = fx.Plan(strategy=strategy, clip_norm=0.5, accumulate=2)
        net = _net()
        model = fx.wrap(net, placed, plan, optimizer=sgd)
        _spread(net)
        part = placed.axis("context").rank
        loader = fx.shard(DataLoader(TensorDataset(_rows(), _mask()), batch_size=2), placed, plan)
        fns = fx.StepFns(
            model=model, loss=lambda m, b: _weighed(m, *[x.chunk(2, dim=1)[part] for x in b.data])
        )
        reports = [fx.step(placed, batch, fns) for epoch in loader.epochs(2) for batch in epoch]
        norms = [float(r.grad_norm) for r in reports if r.applied]
        return norms, [p.detach().clone() for p in fx.unwrap(model).parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_tokens_of_a_shared_sequence_are_weighed_as_in_one_process(pair, stage):
    net = _net()
    optimizer, right = sgd(net.parameters()), []
    for _ in range(2):
        loss = _weighed(net, _rows(), _mask())
        (loss.total / loss.weight).backward()
        right.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    for norms, got in pair.run(_weighted_parts, stage):
        assert norms == pytest.approx(right, rel=1e-4)
        for a, b in zip(got, net.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


CUTS = [
    {"patterns": [r".*(q_proj|k_proj|v_proj|up_proj)\.weight$"], "partition_type": "column"},
    {"patterns": [r".*(o_proj|down_proj)\.weight$"], "partition_type": "row"},
]


@on_rank
def _autotp(ctx, stage, folder):
    with on_mesh(ctx, fx.Mesh(tensor=2)) as placed:
        specs = {"use_default_specs": False, "layer_specs": CUTS}
        config = {"tensor_parallel": {"partition_config": specs}}
        strategy = fx.DeepSpeed(stage=stage, tensor_parallel=2, config=config)
        plan = fx.Plan(strategy=strategy, clip_norm=0.5)
        model = fx.wrap(_net(), placed, plan, optimizer=sgd)
        held = sum(parameter.numel() for parameter in model.module[0].parameters())
        norms = [_update(model, _rows()) for _ in range(3)]
        with torch.no_grad():
            out = model(_rows())
        words, position = [], fx.Position(updates=3)
        calls = (
            lambda: fx.save(folder, placed, model, position=position),
            lambda: fx.unwrap(model),
        )
        for call in calls:
            with pytest.raises(fx.FxError) as refused:
                call()
            words.append(str(refused.value))
        model.engine.destroy()
        return held, norms, out, words


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_that_share_weights_train_as_one_process(pair, tmp_path, stage):
    net, right = _by_hand()
    wanted = net(_rows())
    whole = sum(parameter.numel() for parameter in net[0].parameters())
    for held, norms, out, words in pair.run(_autotp, stage, str(tmp_path)):
        assert held < 0.6 * whole
        assert norms == pytest.approx(right, rel=1e-4)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
        assert all("save_16bit_model" in each for each in words)


@on_rank
def _one_after_the_other(ctx, sizes):
    """The norms of an engine per number of tensor ranks, and how many weights of a layer it has."""
    found = []
    for size in sizes:
        with on_mesh(ctx, fx.Mesh(tensor=size)) as placed:
            specs = {"use_default_specs": False, "layer_specs": CUTS}
            config = {"tensor_parallel": {"partition_config": specs}} if size > 1 else None
            strategy = fx.DeepSpeed(stage=1, tensor_parallel=size, config=config)
            plan = fx.Plan(strategy=strategy, clip_norm=0.5)
            model = fx.wrap(_net(), placed, plan, optimizer=sgd)
            held = model.module[0].self_attn.q_proj.weight.numel()
            found.append((held, [_update(model, _rows()) for _ in range(3)]))
            model.engine.destroy()
    return found


def test_engines_of_different_meshes_follow_each_other(clusters):
    sizes = (4, 2, 1, 2)
    _, right = _by_hand()
    for found in clusters[4].run(_one_after_the_other, sizes):
        assert [held for held, _ in found] == [256 // size for size in sizes]
        for _, norms in found:
            assert norms == pytest.approx(right, rel=1e-4)


@on_rank
def _second_copies(ctx, sizes):
    """Ranks that share a second copy of the parameters, per engine."""
    found = []
    for size in sizes:
        plan = fx.Plan(strategy=fx.DeepSpeed(stage=3, partial_ranks=size))
        with fx.zero_init(ctx, plan):
            net = _net()
        model = fx.wrap(net, ctx, plan, optimizer=sgd)
        group = next(net.parameters()).ds_zero_param_process_group
        again = model.engine.optimizer.parameter_offload.zero_param_parallel_group
        found.append([one and one.size() for one in (group, again)])
        model.engine.destroy()
    return found


def test_each_engine_has_the_second_copies_of_its_own_plan(clusters):
    right = [[2, 2], [None, None], [4, 4], [4, 4]]
    assert clusters[4].run(_second_copies, (2, None, 4, 4)) == [right] * 4
