"""Pipelines: plans that do not fit, and stages without anything to train."""

import pytest

import fxtrain as fx
from fxtrain.ops.transport.exchange import CallState
from fxtrain.testing import (
    Transformer,
    fake_world,
)
from tests.cluster._models import ATTENTION, DOWN, PIPELINES, UP
from tests.cluster._pipelines import FOUR, SHARDS, SPLITS, held

pytestmark = PIPELINES

BAD = {
    "axis": (fx.Mesh(), fx.PP(), {}, "has one rank. Use more"),
    "context": (fx.Mesh(pipeline=2, context=2), fx.PP(), {}, "context=2, which PP does not use"),
    "shard": (fx.Mesh(pipeline=2, shard=2), fx.PP(), {}, "shard=2, which PP without stages="),
    "tensor": (fx.Mesh(pipeline=2, tensor=2), fx.PP(), {}, "tensor=2, which PP without stages="),
    "silent": (fx.Mesh(pipeline=2, tensor=2), held(), {}, r"Use FSDP\(tensor=fx\.TP"),
    "no tensor": (SHARDS, held(tensor=fx.TP(styles=(UP, DOWN))), {}, "tensor axis, which has one"),
    "wrap": (SHARDS, held(wrap=("Blok",)), {}, "Did you mean Block"),
    "zero bubble": (
        SHARDS,
        fx.PP(schedule="zbv_zero_bubble", split=FOUR, stages=fx.FSDP()),
        {},
        r"Use stages=FSDP\(mode='grads_and_optimizer'",
    ),
    "sequence": (
        SPLITS,
        fx.PP(
            split=("blocks.1.norm_2",),
            stages=fx.FSDP(tensor=fx.TP(styles=(UP, DOWN, *ATTENTION), sequence=True)),
        ),
        {},
        r"before blocks\.1\.norm_2, inside blocks\.1, but TP\(sequence=True\)",
    ),
    "name": (None, fx.PP(split=("block.1", "x", "y")), {}, r"'block\.1'. Did you mean blocks\.1"),
    "number": (None, fx.PP(split=("blocks.1",)), {}, "names 1 modules, but 4 pipeline ranks"),
    "layers": (None, fx.PP(), {}, r"into 4 stages, but it has 2 blocks \(blocks\.0, blocks\.1"),
    "parts": (None, fx.PP(split=FOUR, microbatches=3), {}, "at least one micro-batch per stage"),
    "rounds": (
        fx.Mesh(pipeline=2),
        fx.PP(schedule="interleaved_1f1b", split=FOUR, microbatches=7),
        {},
        "a multiple of its 3 rounds, such as 6",
    ),
    "each": (None, fx.PP(stages_per_rank=2), {}, "this schedule needs exactly 1 per rank"),
    "shared": (None, fx.PP(split=FOUR, shared=("heads",)), {}, "no parameter matches 'heads'"),
    "compile": (None, fx.PP(split=FOUR), {"compile": fx.Compile()}, "Compile blocks"),
    "middle": (
        fx.Mesh(pipeline=2),
        fx.PP(split=("blocks.0.norm_2",)),
        {"recompute": ("Block",)},
        r"before blocks\.0\.norm_2, which is inside blocks\.0, a Block that Plan\.recompute",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_plan_that_does_not_fit_is_refused_once_plans_are_compared(name):
    mesh, config, fields, words = BAD[name]
    told = set()
    for rank in (0, 3):
        with fake_world(4, rank=rank, mesh=mesh or fx.Mesh(pipeline=4)) as ctx:
            calls = ctx.comm.slot(CallState).count
            with pytest.raises(fx.PlanError, match=words) as error:
                fx.wrap(Transformer(), ctx, fx.Plan(strategy=config, **fields))
            assert ctx.comm.slot(CallState).count == calls + 1
            told.add(str(error.value))
    assert len(told) == 1
