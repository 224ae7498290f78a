"""A law: `fx.update` and a loop of parts equal `fx.step` bit for bit, under any plan."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import fxtrain as fx
from tests.cluster._both_ways import WAYS, Case, both_ways, check_equal

ON_RANKS = settings(
    max_examples=6, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
STRATEGIES = {
    1: (fx.Single(), fx.DDP()),
    2: (
        fx.DDP(),
        fx.DDP(shard_optimizer=True),
        fx.DDP(unused_parameters=True),
        fx.FSDP(),
        fx.FSDP(mode="grads_and_optimizer"),
        "local",
    ),
}
OPTIONS = {
    "accumulate": st.integers(1, 4),
    "flush": st.booleans(),
    "precision": st.sampled_from(["fp32", "bf16", "fp16"]),
    "clip_norm": st.sampled_from([None, 0.05]),
    "clip_value": st.sampled_from([None, 0.01]),
    "nonfinite": st.sampled_from(["ignore", "skip", "raise"]),
    "even": st.sampled_from(["pad", "uneven", "drop"]),
    "schedule": st.sampled_from(["update", "samples", "ranks"]),
    "sync_each": st.booleans(),
}


@ON_RANKS
@given(data=st.data())
def test_every_way_is_a_step_in_every_bit_on_one_rank(clusters, data):
    _check(clusters[1], data)


@pytest.mark.slow
@ON_RANKS
@given(data=st.data())
def test_every_way_is_a_step_in_every_bit_on_two_ranks(clusters, data):
    _check(clusters[2], data)


def _check(pool, data):
    fields = data.draw(st.fixed_dictionaries({}, optional=OPTIONS), label="plan")
    strategy = data.draw(st.sampled_from(STRATEGIES[pool.n]), label="strategy")
    if strategy == "local":
        fields["local"] = fx.LocalSGD(every=2)
    else:
        fields["strategy"] = strategy
    batches = st.integers(0, 5)
    stream = data.draw(st.booleans()) and fields.get("even") != "drop"
    case = Case(
        rows=data.draw(st.integers(4, 20), label="rows"),
        size=data.draw(st.integers(1, 3), label="size"),
        weighted=data.draw(st.booleans(), label="weighted"),
        stream=stream,
        poison=data.draw(st.none() | st.tuples(st.integers(0, pool.n - 1), batches)),
        leave=data.draw(st.none() | st.integers(1, 5), label="leave"),
    )
    way = data.draw(st.sampled_from([*WAYS][1:]), label="way")
    check_equal(pool.run(both_ways, fx.Plan(**fields), case, None, way))
