"""Pipelines whose stages are sharded over the data axes, or split over the tensor axis."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.backends.pipeline.assemble import own_units
from fxtrain.backends.pipeline.partition import partition_of
from fxtrain.testing import LAWS, Task, Transformer, all_at_once, count_collectives, on_ranks
from fxtrain.testing.training import backward_once, on_mesh, reference
from tests.cluster._models import ATTENTION, DOWN, PIPELINES, UP, synced_each

pytestmark = [PIPELINES, pytest.mark.slow]

FOUR = ("blocks.0", "blocks.1", "norm")
COPIES = fx.Mesh(pipeline=2)
SHARDS = fx.Mesh(pipeline=2, shard=2)
SPLITS = fx.Mesh(pipeline=2, tensor=2)
SPLIT = fx.FSDP(tensor=fx.TP(styles=(UP, DOWN, *ATTENTION)))
LOOP = {"schedule": "interleaved_1f1b", "microbatches": 2, "split": FOUR}


# Beside those that `all_at_once` holds together.
NAMES = (
    "frozen_and_tied_stay",
    "overflow_skips_everywhere",
    "resumes_where_it_stopped",
    "unwrap_gives_the_module_back",
)
REST = [all_at_once, synced_each, *(law for law in LAWS if law.__name__ in NAMES)]
# Those that the tensor axis could break beside the shards.
SPLIT_LAWS = [law for law in REST if law is not synced_each and law.__name__ != NAMES[0]]
FINITE = [law for law in LAWS if law.__name__ == "non_finite_skips_everywhere"]


@pytest.mark.slow
@pytest.mark.parametrize("law", [*REST, *FINITE], ids=lambda law: law.__name__)
def test_laws_of_shards(clusters, law):
    law(clusters[4], fx.Plan(strategy=fx.PP(stages=fx.FSDP())), SHARDS)


@pytest.mark.slow
@pytest.mark.parametrize("law", SPLIT_LAWS, ids=lambda law: law.__name__)
def test_laws_of_split_layers(clusters, law):
    law(clusters[4], fx.Plan(strategy=fx.PP(stages=SPLIT)), SPLITS)


@pytest.mark.slow
def test_weights_apart_from_inputs_may_be_frozen_and_tied(clusters):
    stages = fx.FSDP(mode="grads_and_optimizer")
    config = fx.PP(schedule="zbv_zero_bubble", microbatches=2, split=FOUR, stages=stages)
    LAWS[4](clusters[4], fx.Plan(strategy=config), SHARDS)


OTHERS = {
    "shards in a loop": (fx.PP(**LOOP, shared=("norm.*",), stages=fx.FSDP()), SHARDS),
    "split embedding": (
        fx.PP(
            stages=fx.FSDP(
                tensor=fx.TP(
                    styles=(
                        fx.Style(modules="embed", style="rowwise"),
                        fx.Style(modules="head", style="colwise_gather"),
                    )
                )
            )
        ),
        SPLITS,
    ),
    "zero bubble, split": (
        fx.PP(**{**LOOP, "schedule": "interleaved_zero_bubble"}, stages=SPLIT),
        SPLITS,
    ),
    "dual": (
        fx.PP(schedule="dualpipe_v", split=FOUR, stages=fx.FSDP(mode="grads_and_optimizer")),
        SHARDS,
    ),
    "host": (fx.PP(**LOOP, stages=fx.FSDP(offload=True, ignore=("norm.*",))), SHARDS),
    "whole": (fx.PP(stages=fx.FSDP(mode="none", ignore=("norm.*",))), COPIES),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_stages_train_as_one_process(clusters, name):
    config, mesh = OTHERS[name]
    plan = fx.Plan(strategy=config, clip_norm=0.05, accumulate=2, recompute=("Attention",))
    task = Task(plan=plan, mesh=mesh, weighted=True, size=4)
    wanted = reference(task, 4 // 2 // mesh.tensor)
    for run in clusters[4].run(on_ranks, task):
        torch.testing.assert_close(run.losses, wanted.losses, rtol=1e-9, atol=0)
        torch.testing.assert_close(run.norms, wanted.norms, rtol=1e-9, atol=0)
        torch.testing.assert_close(run.parameters, wanted.parameters, rtol=1e-9, atol=1e-11)


class Fork(nn.Module):
    """One of two layers."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))

    def forward(self, x, way):
        return (self.left if way else self.right)(x).tanh()


class Forks(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Fork() for _ in range(2))

    def forward(self, x, way):
        for block in self.blocks:
            x = block(x, way)
        return x


X = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4)


def _forked(ctx):
    with on_mesh(ctx, SHARDS) as placed:
        way = placed.axis("data").rank
        plan = fx.Plan(strategy=fx.PP(stages=fx.FSDP(unused_parameters=True)))
        model = fx.wrap(Forks(), placed, plan, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
        batch = next(iter(fx.shard(DataLoader(TensorDataset(X), batch_size=4), placed, plan)))
        loss = functools.partial(_square, way)
        fx.step(placed, batch, fx.StepFns(model=model, loss=loss))
        return {name: p.detach() for name, p in fx.unwrap(model).named_parameters()}


def _square(way, model, batch):
    return model(batch[0], way).square().mean()


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="newer torch needed"
)
def test_stages_of_different_ranks_may_leave_out_different_parameters(clusters):
    net = Forks()
    (sum(_square(way, net, [X[4 * way :][:4]]) for way in (0, 1)) / 2).backward()
    wanted = {name: p.detach() - p.grad for name, p in net.named_parameters()}
    for got in clusters[4].run(_forked):
        torch.testing.assert_close(got, wanted)


@pytest.mark.slow
def test_an_overflow_where_numbers_of_two_formats_meet(clusters):
    # The positions belong to two stages of a rank: whole, in fp32, and added to an fp16 embedding.
    LAWS[5](clusters[4], fx.Plan(strategy=OTHERS["shards in a loop"][0]), SHARDS)


def test_units_are_what_runs_in_one_stage_from_beginning_to_end():
    net = Transformer()
    config = fx.FSDP(wrap=("Block", "Head", "Attention"))
    partition = partition_of(net, fx.PP(split=("blocks.0.norm_2",)), 2)
    first, second = (list(own_units(net, partition, index, config)) for index in (0, 1))
    assert first == [net.blocks[0].attention]  # a block that is left in its middle is none
    assert second == [net.blocks[1].attention, net.blocks[1]]  # nor is the tied head


def _held(ctx, config, mesh):
    """Names and shapes of what a rank holds, and the bytes of parameters and gradients."""
    with on_mesh(ctx, mesh) as placed:
        model = fx.wrap(Transformer(tied=False), placed, fx.Plan(strategy=config))
        backward_once(placed, model)
        held = {name: p.to_local() for name, p in model.module.named_parameters()}
        size = sum(one.numel() * one.element_size() for one in held.values())
        grads = sum(p.grad.to_local().numel() * 8 for p in model.parameters())
        return {name: tuple(one.shape) for name, one in held.items()}, size, grads


@pytest.mark.slow
def test_a_rank_holds_its_shard_of_its_stage(clusters):
    whole = {n: tuple(p.shape) for n, p in Transformer(tied=False).named_parameters()}
    found = clusters[4].run(_held, fx.PP(stages=fx.FSDP()), SHARDS)
    for rank, (held, size, grads) in enumerate(found):
        assert ("blocks.0.up.weight" in held, "blocks.1.up.weight" in held) == (rank < 2, rank > 1)
        wanted = {n: (whole[n][0] // 2, *whole[n][1:]) for n in held}
        assert held == wanted
        assert size == grads == sum(4 * torch.Size(whole[name]).numel() for name in held)


def _gathered(ctx, stages, mesh):
    """Outputs before and after parameters change, and what a batch of another kind takes."""
    with on_mesh(ctx, mesh) as placed:
        plan = fx.Plan(strategy=fx.PP(**LOOP, stages=stages))
        model = fx.wrap(Transformer(), placed, plan).eval()
        outs, counts = [], []
        with torch.no_grad():
            for shape in ((4, 8), (4, 8), (2, 6), (2, 6)):
                for parameter in model.parameters():
                    parameter.mul_(1 if not outs else 2)
                with count_collectives() as counted:
                    outs.append(model(_some(shape)))
                counts.append([counted.counts.get(kind, 0) for kind in ("recv", "all_gather")])
        return outs, counts


def _some(shape):
    return torch.arange(shape[0] * shape[1]).reshape(shape) % 24


@pytest.mark.slow
def test_a_forward_alone_gathers_what_parameters_are_now(clusters):
    net, wanted = Transformer(), []
    with torch.no_grad():
        for shape in ((4, 8), (4, 8), (2, 6), (2, 6)):
            for parameter in net.parameters():
                parameter.mul_(1 if not wanted else 2)
            wanted.append(net(_some(shape)))
    gathered = []
    for stages, mesh in ((None, COPIES), (fx.FSDP(), SHARDS)):
        for outs, counts in clusters[4].run(_gathered, stages, mesh):
            torch.testing.assert_close(outs, wanted)
            gathered.append(counts)
    # More is asked about a new kind of batch, also by gathers, but each forward gathers the same
    # parameters.
    for copies, shards in zip(gathered[:4], gathered[4:], strict=True):
        for asked in (copies, shards):
            packets = [recv for recv, _ in asked]
            assert packets[0] > packets[1] < packets[2]
        (more,) = {ours - theirs for (_, ours), (_, theirs) in zip(shards, copies, strict=True)}
        assert more > 0
