"""Context parallelism: attention over ranks equals that of full sequences."""

import pytest
import torch
import torch.nn.functional as F

import fxtrain as fx
from fxtrain import ops
from fxtrain.backends.context.ring_attention import PLAIN, RingAttention
from fxtrain.backends.context.sequence_tokens import positions_of
from fxtrain.data.to_device import make_splitter
from fxtrain.testing import Task, Transformer, count_collectives, fake_world, on_ranks, reference
from tests._slow import slow_after

PAIR = fx.Mesh(context=2)


def _cp(**options):
    return fx.Plan(context=fx.CP(**options))


# Attention itself: this rank's part of the outputs and gradients is that of whole sequences.

CASES = {
    "causal": ({"is_causal": True}, {}, 4, 8),
    "whole": ({}, {}, 4, 8),
    "other keys": ({}, {"rotate": "alltoall"}, 4, 16),
    "in order": ({"is_causal": True, "scale": 0.3}, {"balance": False}, 4, 8),
    "around": ({"is_causal": True}, {"rotate": "alltoall"}, 4, 8),
    "groups": ({"is_causal": True, "enable_gqa": True}, {}, 2, 8),
    "all causal": ({}, {"causal": True}, 4, 8),
}
# Sizes of heads of keys and of values.
SIZES = {name: (8, 8) for name in CASES} | {"narrow values": (8, 3), "wide values": (5, 7)}
CASES["narrow values"] = CASES["wide values"] = CASES["causal"]


def _inputs(heads, keys, key_size, value_size):
    torch.manual_seed(0)
    shapes = [
        *((2, 4, 8, key_size), (2, heads, keys, key_size)),
        *((2, heads, keys, value_size), (2, 4, 8, value_size)),
    ]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def _attention(parts, options):
    *leaves, weight = [part.detach().requires_grad_() for part in parts]
    out = F.scaled_dot_product_attention(*leaves, **options)
    out.backward(weight.detach())
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _around(ctx, kernel):
    placed = fx.detect({}, device="cpu", mesh=fx.Mesh(context=ctx.world_size), timeout_s=60)
    axis = placed.axis("context")
    found = {}
    for name, (options, how, heads, keys) in CASES.items():
        config = fx.CP(**how)

        def mine(x, config=config):
            count = x.shape[2] // axis.world_size
            return x[:, :, positions_of(count, placed, fx.Plan(context=config))]

        ring = RingAttention(axis.comm.group, config, kernel)
        inputs = _inputs(heads, keys, *SIZES[name])
        with ring:
            got = _attention([mine(x) for x in inputs], options)
        whole = {**options, "is_causal": True} if config.causal else options
        wanted = [mine(x) for x in _attention(inputs, whole)]
        found[name] = max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True))
    return found


@pytest.mark.parametrize("kernel", [None, PLAIN], ids=["CPU", "plain"])
@pytest.mark.parametrize("n", [2, 4])
def test_attention_over_ranks_is_that_of_whole_sequences(clusters, n, kernel):
    for found in clusters[n].run(_around, kernel):
        assert max(found.values()) < 1e-12, found


def _joined(ctx):
    placed = fx.detect({}, device="cpu", mesh=PAIR, timeout_s=60)
    model = fx.wrap(Transformer(), placed, _cp(tables=("position",)))
    rows = torch.arange(16).reshape(2, 8)
    mine = make_splitter(placed, model.plan)({"ids": rows, "text": ["a"]})
    with torch.no_grad(), count_collectives() as traffic:
        logits = model(mine["ids"])
    whole = ops.join_tokens({"logits": logits, "ids": mine["ids"]}, model)
    same = torch.allclose(whole["logits"], Transformer()(rows), rtol=1e-12)
    positions = ops.join_tokens(ops.token_positions(4, model), model, dim=0)
    return same, whole["ids"].tolist(), positions.tolist(), traffic.counts


def test_outputs_are_put_together_in_order(pair):
    rows = torch.arange(16).reshape(2, 8).tolist()
    for same, ids, positions, counts in pair.run(_joined):
        assert same
        assert (ids, positions) == (rows, list(range(8)))
        assert counts == {"all_gather": 2}  # keys and values together, once a layer


@pytest.mark.slow
def test_blocks_may_be_compiled(pair):
    plan = fx.Plan(
        context=fx.CP(tables=("position",)),
        compile=fx.Compile(backend="eager", blocks=("Block",)),
    )
    wanted = reference(Task(plan=plan), 1)
    for run in pair.run(on_ranks, Task(plan=plan, mesh=PAIR)):
        torch.testing.assert_close(run.losses, wanted.losses, rtol=1e-9, atol=0)


def test_half_precision_attends_in_half(pair):
    plan = fx.Plan(context=fx.CP(tables=("position",)), precision="bf16")
    task = Task(plan=plan, mesh=PAIR, dtype=torch.float32)
    wanted = reference(task, 1)
    for run in pair.run(on_ranks, task):
        torch.testing.assert_close(run.losses, wanted.losses, rtol=2e-2, atol=0)


@pytest.mark.parametrize("rank", slow_after(1, [37, 0, 63]))
def test_a_rank_of_many_holds_its_part(rank):
    mesh = fx.Mesh(replicate=2, shard=4, context=4, tensor=2)
    cuts = (
        fx.Style(modules="blocks.*.up", style="colwise"),
        fx.Style(modules="blocks.*.down", style="rowwise"),
    )
    strategy = fx.FSDP(tensor=fx.TP(styles=cuts))
    plan = fx.Plan(strategy=strategy, context=fx.CP(), clip_norm=1.0)
    with fake_world(64, rank=rank, mesh=mesh) as ctx:
        assert ctx.axis("loss").world_size == 32
        model = fx.wrap(
            Transformer(), ctx, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
        )
        up = model.module.blocks[0].up.weight
        assert dict(zip(up.device_mesh.mesh_dim_names, up.device_mesh.shape, strict=True)) == {
            "replicate": 2,
            "shard": 16,
            "tensor": 2,
        }
        assert up.to_local().shape == (32 // 2 // 16, 16)
        ops.backward(model(torch.zeros(1, 8, dtype=torch.int64)).sum(), model)
        ops.clip_norm(model, 1.0)
        assert ops.apply(model).applied
