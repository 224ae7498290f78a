"""What a dry run predicts, against what real ranks do: equal, not near."""

import functools

import attrs
import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

import fxtrain as fx
from fxtrain.profiling.rehearsal import axis_namer, figures
from fxtrain.profiling.watching import LoopRecorder, StepsConverged
from fxtrain.state.mesh import resolve_mesh
from fxtrain.testing import count_collectives
from tests._slow import slow_after
from tests.profiling._dry_runs import DRY_DDP
from tests.profiling._loops import (
    by_steps,
    on_context_mesh,
    on_pipeline_mesh,
    on_tensor_mesh,
    sharded_by_hand,
)
from tests.profiling._real import recording_real


def _measured(ctx, loop, mesh, *args):
    """The same figures, of real tensors and real traffic; and the bytes counted by hand."""
    watch = LoopRecorder(most=4)
    held, ends = {}, []

    def count(optimizer, *_):
        ends.append(len(traffic.calls))
        params = [p for group in optimizer.param_groups for p in group["params"]]
        inner = getattr(optimizer, "optim", optimizer)
        state = [v for one in inner.state.values() for v in one.values()]
        held.update(
            parameters=_bytes(params),
            gradients=_bytes([p.grad for p in params]),
            optimizer=_bytes(state),
        )

    hook = register_optimizer_step_post_hook(count)
    try:
        with count_collectives() as traffic, recording_real(watch):
            loop(ctx, *args)
    except StepsConverged:
        step = _totals(traffic.calls[ends[-2] : ends[-1]])
        return figures(watch, axis_namer(mesh, ctx.rank)), held, step
    finally:
        hook.remove()
    raise AssertionError("the loop ended before its steps were alike")


def _totals(calls):
    """Calls and bytes by kind."""
    totals = {}
    for call in calls:
        count, size = totals.get(call.kind, (0, 0))
        totals[call.kind] = (count + getattr(call, "count", 1), size + call.bytes)
    return totals


def _bytes(tensors):
    """What the tensors occupy, with the padding of uneven shards."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in local}
    return sum(storage.nbytes() for storage in storages.values())


def _compare(pool, loop, *args, mesh=None, rank=None):
    """Of the last rank, if none is named."""
    rank = pool.n - 1 if rank is None else rank
    told = _told(pool.n, loop, args, rank, mesh)
    return told, _as_told(told, pool.run(_measured, loop, told.mesh, *args)[rank])


def _told(world, loop, args, rank, mesh=None):
    told = fx.dry_run(functools.partial(_call, loop, args), world=world, rank=rank, mesh=mesh)
    assert told.problems == () and told.updates >= 2
    return told


def _as_told(told, measured):
    got, held, step = measured
    assert {name: getattr(told.memory, name) for name in held} == held
    assert _totals(told.step) == step
    return got


def _call(loop, args, ctx):
    loop(ctx, *args)


PLANS = {
    "plain": fx.Plan(),
    "several buckets": fx.Plan(strategy=fx.DDP(bucket_mib=0.01)),
    "unused": fx.Plan(strategy=fx.DDP(unused_parameters=True, sync_buffers=False)),
    "static": fx.Plan(strategy=fx.DDP(static_graph=True)),
    "hook": fx.Plan(strategy=fx.DDP(hook=fx.CommHook(name="fp16"))),
    "windows": fx.Plan(accumulate=3, clip_norm=1.0),
    "sync each": fx.Plan(accumulate=2, sync_each=True),
    "bf16": fx.Plan(precision="bf16"),
    "fp16": fx.Plan(precision="fp16", clip_norm=1.0),
    "recompute": fx.Plan(recompute=("Linear",)),
    "shared optimizer": fx.Plan(strategy=fx.DDP(shard_optimizer=True)),
    "alone": fx.Plan(local=fx.DiLoCo(every=2)),
}


@DRY_DDP
@pytest.mark.parametrize("name", slow_after(1, PLANS))
def test_ddp_is_predicted_exactly(name, pair):
    told, got = _compare(pair, by_steps, PLANS[name])
    assert told.step == got["step"] and told.setup == got["setup"]
    assert told.memory == got["memory"] and told.peak == got["peak"]
    assert told.memory.optimizer > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "windows"])
def test_weights_travel_as_predicted(name, clusters):
    """Reduced over ranks with the checks and packets that fxtrain adds."""
    told, got = _compare(clusters[4], by_steps, PLANS[name], "weights")
    assert told.step == got["step"] and told.setup == got["setup"]
    assert {row.kind for row in told.step} == {"all_reduce", "send", "recv"}


def test_one_rank_has_no_traffic(clusters):
    told, got = _compare(clusters[1], by_steps, fx.Plan(strategy=fx.Single()))
    assert told.step == got["step"] == told.setup == ()
    assert told.memory == got["memory"] and told.peak == got["peak"]


def _peaks_agree(told, got):
    """What travels is held until it arrives: on a busy machine longer than in a pretended world."""
    return told / 1.15 <= got <= told * 1.5


@pytest.mark.slow
@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (4, 2)])
def test_sharding_by_hand_is_predicted_exactly(world, replicas, clusters):
    mesh = fx.Mesh(replicate=replicas, shard=world // replicas)
    told, got = _compare(clusters[world], sharded_by_hand, replicas, mesh=mesh)
    assert told.step == got["step"]
    assert told.memory.buffers == got["memory"].buffers
    assert _peaks_agree(told.peak, got["peak"])
    assert {row.axis for row in told.step} == {"shard"} | ({"replicate"} if replicas > 1 else set())


def _sharded(**config):
    return fx.FSDP(wrap=("Linear",), **config)


SHARDED = {
    "full": fx.Plan(strategy=_sharded(), clip_norm=1.0),
    "gathered once": fx.Plan(strategy=_sharded(mode="grads_and_optimizer")),
    "hybrid": fx.Plan(strategy=_sharded(shard=2)),
    "windows": fx.Plan(strategy=_sharded(), accumulate=2),
    # Batch normalization on the CPU wants parameters in fp32.
    "bf16": fx.Plan(strategy=_sharded(ignore=("1.*",)), precision="bf16", clip_norm=1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_fsdp_is_predicted_exactly(name, clusters):
    told, got = _compare(clusters[4], by_steps, SHARDED[name])
    assert told.step == got["step"] and told.setup == got["setup"]
    assert told.memory.buffers == got["memory"].buffers
    assert _peaks_agree(told.peak, got["peak"])
    whole = fx.dry_run(functools.partial(_call, by_steps, (fx.Plan(),)), world=4).memory
    assert told.memory.optimizer < whole.optimizer


@pytest.mark.slow
def test_the_rank_that_sends_values_is_predicted(clusters):
    told, got = _compare(clusters[4], by_steps, SHARDED["full"], rank=0)
    assert told.setup == got["setup"] and "broadcast" in {row.kind for row in told.setup}
    assert told.setup_peak == pytest.approx(got["setup_peak"], rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_split_layers_are_predicted_exactly(accumulate, clusters):
    styles = (
        fx.Style(modules="3", style="colwise"),
        fx.Style(modules="4", style="rowwise"),
    )
    strategy = fx.FSDP(mode="none", tensor=fx.TP(styles=styles))
    plan = fx.Plan(strategy=strategy, clip_norm=1.0, accumulate=accumulate)
    told, got = _compare(clusters[4], on_tensor_mesh, plan)
    assert told.step == got["step"]
    assert {row.axis for row in told.step} >= {"replicate", "tensor"}
    assert _peaks_agree(told.peak, got["peak"])


@pytest.mark.slow
@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
def test_attention_over_ranks_is_predicted_exactly(rotate, clusters):
    plan = fx.Plan(context=fx.CP(tables=("position",), rotate=rotate), recompute=("Block",))
    told, got = _compare(clusters[4], on_context_mesh, plan)
    assert told.step == got["step"]
    assert {row.axis for row in told.step} >= {"context", "world"}


FOUR = ("blocks.0", "blocks.1", "norm")
_SPLIT = fx.TP(
    styles=(
        fx.Style(modules="blocks.*.up", style="colwise"),
        fx.Style(modules="blocks.*.down", style="rowwise"),
    )
)
STAGES = {
    "copies": (fx.PP(), fx.Mesh(replicate=2, pipeline=2)),
    "there and back": (
        fx.PP(schedule="zbv_zero_bubble", microbatches=4, split=FOUR),
        fx.Mesh(replicate=2, pipeline=2),
    ),
    "four": (fx.PP(split=FOUR), fx.Mesh(pipeline=4)),
    "sharded": (fx.PP(stages=fx.FSDP(wrap=("Block",))), fx.Mesh(shard=2, pipeline=2)),
    "split": (fx.PP(stages=fx.FSDP(tensor=_SPLIT)), fx.Mesh(tensor=2, pipeline=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_stages_are_predicted_exactly(name, clusters):
    config, mesh = STAGES[name]
    counted = ["counted"] if name in ("copies", "four") else []
    args = (fx.Plan(strategy=config, clip_norm=1.0), mesh, *counted)
    runs = clusters[4].run(_measured, on_pipeline_mesh, resolve_mesh(mesh, 4), *args)
    for rank in (0, 3):
        told = _told(4, on_pipeline_mesh, args, rank)
        got = _as_told(told, runs[rank])
        assert told.step == got["step"]
        assert set(told.setup) == set(map(_without_detect, got["setup"]))
        assert told.memory.buffers == got["memory"].buffers
        assert _peaks_agree(told.peak, got["peak"])
        assert {row.axis for row in told.step} >= {"pipeline"}


def _without_detect(row):
    """Real ranks end `detect`, a part of this loop, with an exchange; a dry run opens nothing.

    All messages of setup are exchanges of packets, in two rounds.
    """
    if (row.kind, row.ranks) not in {("send", 4), ("recv", 4)}:
        return row
    return attrs.evolve(row, count=row.count - 2, bytes=row.bytes - 2 * row.bytes // row.count)


@DRY_DDP
def test_a_larger_world_changes_traffic_but_not_memory_of_replicas():
    few, many = (
        fx.dry_run(functools.partial(_call, by_steps, (fx.Plan(),)), world=world)
        for world in (8, 512)
    )
    assert few.memory.gradients == many.memory.gradients > 0
    few_step, many_step = ({row.kind: row for row in run.step} for run in (few, many))
    assert attrs.evolve(many_step["all_reduce"], ranks=8) == few_step["all_reduce"]
    # Two exchanges of packets: a message and its answer in each of nine rounds, of few bytes.
    assert many_step["send"].count == 2 * 2 * 9
    assert many_step["send"].bytes < few_step["send"].bytes
