"""Which plans are tried: meshes, micro-batches, bounds of memory."""

import math

import attrs

import fxtrain as fx
from fxtrain.choosing.candidates import lanes, least_memory, micro_batches, needs_no_split
from fxtrain.state import Memory
from tests.choosing._programs import STATES, question

ABOUT = {"depth": 4, "experts": 0, "update": 64}


def _pairs(asked, about=ABOUT):
    return [(lane.strategy, lane.mesh) for lane in lanes(asked, about)]


def _lane(strategy, mesh):
    return fx.Plan(strategy=strategy, mesh=mesh)


def test_lanes_use_all_ranks_and_begin_with_the_users_own():
    asked = question(world=16, plan=fx.Plan(strategy=fx.FSDP(wrap=("Block",))))
    found = _pairs(asked)
    assert found[0] == (fx.FSDP(wrap=("Block",)), fx.Mesh(replicate=16))
    assert len(found) == len(set(found)) < 60
    for strategy, mesh in found:
        assert math.prod(mesh.sizes.values()) == 16
        assert (mesh.pipeline > 1) == isinstance(strategy, fx.PP)
    hybrid = fx.Mesh(replicate=2, shard=8)
    assert (fx.FSDP(wrap=("Block",)), hybrid) in found
    assert not any(mesh.context > 1 for _, mesh in found)


def test_one_rank_has_the_users_own_plan_only():
    assert _pairs(question(world=1)) == [(fx.DDP(), fx.Mesh(replicate=1))]


def test_experts_are_spread_over_divisors_of_their_number():
    found = _pairs(question(), {**ABOUT, "experts": 6})
    degrees = {s.expert for s, _ in found if isinstance(s, fx.FSDP) and s.expert is not None}
    assert degrees == {2}


def test_sequences_are_split_where_the_plan_says_how():
    asked = question(plan=fx.Plan(context=fx.CP()), fixed={"context"})
    found = _pairs(asked)
    assert {mesh.context for _, mesh in found} == {1, 2, 4, 8}
    # Over context ranks alone, parameters may be shards as well.
    alone = [type(strategy) for strategy, mesh in found if mesh.context == 8]
    assert alone == [fx.FSDP, fx.FSDP, fx.FSDP, fx.DDP]


def test_layers_are_split_in_replicas_and_in_shards():
    found = _pairs(question(world=16))
    modes = {(s.mode, mesh.shard > 1) for s, mesh in found if isinstance(s, fx.FSDP) and s.tensor}
    assert modes == {("none", False), ("full", True)}


def test_a_fixed_strategy_is_tried_on_every_mesh():
    asked = question(plan=fx.Plan(strategy=fx.FSDP(tensor=fx.TP())), fixed={"strategy"})
    found = _pairs(asked)
    assert {strategy for strategy, _ in found} == {asked.plan.strategy}
    assert {mesh.tensor for _, mesh in found} == {1, 2, 4, 8}


def test_micro_batches_divide_the_rows_of_an_update():
    lane = _lane(fx.DDP(), fx.Mesh(replicate=8))
    assert micro_batches(question(), lane, 8 * 12, 0) == [12, 6, 3, 1]
    assert micro_batches(question(), lane, 8 * 12 + 1, 0) == []
    fixed = question(plan=fx.Plan(accumulate=4), fixed={"accumulate"})
    assert micro_batches(fixed, lane, 8 * 12, 0) == [3]
    own = attrs.evolve(question(), rows_fixed=True)
    assert micro_batches(own, lane, 8 * 12, 4) == [4] and micro_batches(own, lane, 8 * 12, 5) == []
    whole = attrs.evolve(own, plan=fx.Plan(batch="global"))
    assert (
        micro_batches(whole, lane, 8 * 12, 32) == [4]
        and micro_batches(whole, lane, 8 * 12, 12) == []
    )


def test_a_pipeline_has_micro_batches_that_fill_it():
    mesh = fx.Mesh(replicate=2, pipeline=4)
    (strategy,) = [s for s, at in _pairs(question()) if at == mesh]
    assert strategy.microbatches == 16
    assert micro_batches(question(), _lane(strategy, mesh), 64, 0) == [32, 16]
    own = question(plan=fx.Plan(strategy=fx.PP(microbatches=8)))
    assert {s.microbatches for s, _ in _pairs(own) if isinstance(s, fx.PP)} == {8}


def test_least_memory_is_what_is_sharded():
    total = STATES.total
    cases = {
        (fx.DDP(), fx.Mesh(replicate=8)): total,
        (fx.DDP(shard_optimizer=True), fx.Mesh(replicate=8)): 9_000_000,
        (fx.FSDP(), fx.Mesh(replicate=8)): total / 8,
        (fx.FSDP(), fx.Mesh(replicate=2, shard=4)): total / 4,
        (fx.FSDP(tensor=fx.TP()), fx.Mesh(replicate=1, shard=4, tensor=2)): total / 8,
        (fx.PP(), fx.Mesh(replicate=2, pipeline=4)): total / 4,
        (fx.FSDP(offload=True), fx.Mesh(replicate=8)): 0,
        (fx.PP(stages=fx.FSDP(offload=True)), fx.Mesh(replicate=4, pipeline=2)): 0,
        (fx.FSDP(mode="none"), fx.Mesh(replicate=8)): total,
    }
    assert {pair: least_memory(_lane(*pair), STATES) for pair in cases} == cases


def test_layers_are_split_where_memory_or_rows_ask_for_it():
    lane = _lane(fx.PP(), fx.Mesh(replicate=2, pipeline=4))
    assert needs_no_split(lane, STATES, question(), 100e6, 64)
    assert not needs_no_split(lane, STATES, question(), 20e6, 64)
    assert not needs_no_split(lane, STATES, question(), 100e6, 4)
    assert not needs_no_split(lane, Memory(), question(fixed={"mesh"}), 100e6, 64)
