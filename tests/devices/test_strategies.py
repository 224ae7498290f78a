"""Strategies beyond those of test_laws.py: stages, streamed weights, hooks, several contexts."""

import importlib.util
from contextlib import nullcontext

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist

import fxtrain as fx
from fxtrain.backends.context.ring_attention import RingAttention
from fxtrain.testing import LAWS, Task, Terms, Transformer, all_at_once, on_ranks
from tests.cluster._models import PIPELINES
from tests.cluster.test_laws import CUTS, ROWS
from tests.devices._device import STAND_IN, is_gpu, synchronize
from tests.devices._training import parts
from tests.offload._streamed import placement

pytestmark = pytest.mark.timeout(300)

TERMS = Terms(exact=False)
HALF = Terms(dtype=torch.float32, rtol=1e-4, atol=1e-5, exact=False)
NAMES = [law.__name__ for law in LAWS]


@PIPELINES
@pytest.mark.parametrize("law", LAWS, ids=NAMES)
def test_stages_on_one_device(nccl, law):
    law(nccl, fx.Plan(strategy=fx.PP()), terms=TERMS)


@PIPELINES
@pytest.mark.parametrize("law", LAWS, ids=NAMES)
def test_stages_on_two_devices(pair_of_gpus, law):
    law(pair_of_gpus, fx.Plan(strategy=fx.PP()), fx.Mesh(pipeline=2), terms=TERMS)


@pytest.mark.parametrize("terms", [TERMS, HALF], ids=["float64", "float32"])
@pytest.mark.parametrize("balance", [False, True], ids=["in order", "balanced"])
def test_attention_over_two_devices(pair_of_gpus, balance, terms):
    plan = fx.Plan(strategy=fx.DDP(), context=fx.CP(tables=ROWS, balance=balance))
    all_at_once(pair_of_gpus, plan, fx.Mesh(context=2), terms=terms)


def _ring(ctx, dtype, size, causal):
    """The largest error of outputs and gradients of a ring of one rank, and of torch's own."""
    torch.manual_seed(0)
    made = [torch.randn(2, 4, 40, size, dtype=dtype, device=ctx.device) for _ in range(4)]
    ring = RingAttention(dist.group.WORLD, fx.CP(balance=False))

    def results(mode, kind):
        *leaves, weight = [one.detach().to(**kind).requires_grad_() for one in made]
        with mode:
            out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
            out.backward(weight.detach())
        return [one.detach().double().cpu() for one in (out, *(leaf.grad for leaf in leaves))]

    exact = results(nullcontext(), {"dtype": torch.float64, "device": "cpu"})
    found = results(ring, {"dtype": dtype})
    assert ring.calls == 1
    return max(float((a - b).abs().max()) for a, b in zip(found, exact, strict=True))


PRECISE = {torch.float64: 1e-12, torch.float32: 1e-2, torch.bfloat16: 0.1, torch.float16: 0.02}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [32, 20, 264], ids=["aligned", "not aligned", "large"])
@pytest.mark.parametrize("dtype", PRECISE, ids=str)
def test_kernels_of_ring_attention(nccl, dtype, size, causal):
    (error,) = nccl.run(_ring, dtype, size, causal)
    assert error < PRECISE[dtype]


def test_tensor_parallelism_on_two_devices(pair_of_gpus):
    plan = fx.Plan(strategy=fx.FSDP(tensor=fx.TP(styles=CUTS)))
    all_at_once(pair_of_gpus, plan, fx.Mesh(tensor=2), terms=TERMS)


ZERO = {
    "stage 0": fx.DeepSpeed(stage=0),
    "stage 1": fx.DeepSpeed(stage=1),
    "stage 2": fx.DeepSpeed(stage=2, reduce_bucket=1000),
    "stage 3": fx.DeepSpeed(stage=3, persistence_threshold=0),
}
ZERO_TERMS = attrs.evolve(HALF, clip_value=False, fp16=False)  # overflows have a test of their own


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.skipif(bool(STAND_IN), reason="tests/deepspeed has these laws on the CPU")
@pytest.mark.parametrize("law", LAWS, ids=NAMES)
@pytest.mark.parametrize("stage", ZERO)
def test_deepspeed_at_one_rank(nccl, stage, law):
    law(nccl, fx.Plan(strategy=ZERO[stage]), terms=ZERO_TERMS)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.skipif(bool(STAND_IN), reason="tests/deepspeed has the laws on the CPU")
@pytest.mark.parametrize("stage", ZERO)
def test_deepspeed_skips_an_update_that_overflows(nccl, stage):
    """As the law, except for the loss scale, which is the engine's."""
    scale = fx.LossScale(initial=2.0**10)
    plan = fx.Plan(strategy=ZERO[stage], precision=fx.Precision(compute="fp16", scale=scale))
    (run,) = nccl.run(on_ranks, Task(plan=plan, dtype=torch.float32, poke_at=2))
    assert run.applied == [True, False, True]
    assert all(torch.isfinite(value).all() for value in run.parameters.values())


TOKENS = torch.arange(6)[None]


def _streamed(ctx, folder):
    """Outputs of a streamed model and of one that is on the device, and what the first holds."""
    fx.export(Transformer(), folder)
    placed = placement("blocks.0", "blocks.1", device=str(ctx.device))
    with torch.device("meta"):
        empty = Transformer()
    config = fx.Offload(placement=placed, source=folder)
    model = fx.wrap(empty, ctx, fx.Plan(strategy=config))
    tokens = TOKENS.to(ctx.device)
    with torch.no_grad():
        outputs = [model(tokens) for _ in range(3)]
        wanted = Transformer().to(ctx.device)(tokens)
    synchronize(ctx)
    same = all(torch.equal(one, outputs[0]) for one in outputs)
    held = {parameter.device.type for parameter in model.module.blocks.parameters()}
    close = torch.allclose(outputs[0], wanted, rtol=1e-5)
    fx.unwrap(model)
    return same, close, outputs[0].device == ctx.device, held <= {"cpu", ctx.device.type}


def test_streamed_weights_give_the_outputs_of_resident_ones(gpu, tmp_path):
    assert gpu.run(_streamed, str(tmp_path / "model")) == [(True, True, True, True)]


def _apart(ctx):
    """Losses of two contexts in one process that take turns, and of each by itself."""
    plans = (
        fx.Plan(seed=1),
        fx.Plan(seed=2, precision=fx.Precision(compute="bf16"), clip_norm=1.0),
    )

    def train(runs):
        losses = [[] for _ in runs]
        for batches in zip(*(loader for _, loader, _ in runs), strict=True):
            for found, batch, (own, _, fns) in zip(losses, batches, runs, strict=True):
                found.append(float(fx.step(own, batch, fns).loss))
        return losses

    def begin(own, plan):
        loader, fns = parts(own, plan)
        return own, loader, fns

    with fx.detect({}, device=ctx.device) as other:
        together = train([begin(ctx, plans[0]), begin(other, plans[1])])
        alone = [
            train([begin(own, plan)])[0] for own, plan in zip((ctx, other), plans, strict=True)
        ]
        assert other.device == ctx.device or not is_gpu(ctx)
    after = train([begin(ctx, plans[0])])[0]
    return together, alone, after


def test_contexts_in_one_process_do_not_affect_each_other(one):
    ((together, alone, after),) = one.run(_apart)
    assert together == alone
    assert after == alone[0]


def _fused_tree(ctx):
    """A tree of many leaves on device and host, gathered and reduced."""
    from fxtrain import ops

    on_device = {f"d{i}": torch.full((3, i + 1), float(i), device=ctx.device) for i in range(16)}
    tree = on_device | {"host": torch.arange(4), "half": torch.ones(2, dtype=torch.bfloat16)}
    gathered, total = ops.gather(tree, ctx), ops.reduce(tree, ctx, op="mean")
    places = {name: leaf.device.type for name, leaf in gathered.items()}
    kinds = {leaf.dtype for leaf in total.values()}
    same = all(torch.equal(total[name], leaf) for name, leaf in on_device.items())
    return places, kinds >= {torch.float32, torch.bfloat16}, same


def test_trees_of_device_and_host_keep_their_places(two):
    for places, kinds, same in two.run(_fused_tree):
        assert places.pop("host") == places.pop("half") == "cpu"
        assert "cpu" not in set(places.values()) or STAND_IN == "cpu"
        assert kinds and same
