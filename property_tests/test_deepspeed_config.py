"""Resolving a DeepSpeed config: laws over plans and files."""

import copy
import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.backends.deepspeed.config import resolve_deepspeed

COUNTS = st.integers(1, 64)
PLANS = st.builds(
    lambda stage, accumulate, clip, precision, bucket: fx.Plan(
        strategy=fx.DeepSpeed(stage=stage, reduce_bucket=bucket),
        accumulate=accumulate,
        clip_norm=clip,
        precision=precision,
    ),
    st.sampled_from([None, 0, 1, 2, 3]),
    COUNTS,
    st.none() | st.floats(0.01, 10),
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.none() | st.integers(1, 10**9),
)
FACTS = st.fixed_dictionaries(
    {"ranks": COUNTS, "rows": st.none() | COUNTS, "hidden": st.integers(1, 10_000)}
)
# Entries that nobody here knows about.
PLAIN = st.booleans() | st.integers(-5, 5) | st.text("xyz", max_size=3)
OTHERS = st.dictionaries(
    st.text("pqr", min_size=1, max_size=4), PLAIN | st.dictionaries(st.text("st"), PLAIN)
)
AUTOS = st.sets(
    st.sampled_from(
        [
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "train_batch_size",
            "gradient_clipping",
            "bf16.enabled",
            "fp16.enabled",
            "zero_optimization.stage",
            "zero_optimization.reduce_bucket_size",
            "zero_optimization.stage3_prefetch_bucket_size",
            "zero_optimization.stage3_param_persistence_threshold",
            "zero_optimization.overlap_comm",
        ]
    )
)


def _file(autos, others):
    file = copy.deepcopy(others)
    for path in autos:
        *tables, name = path.split(".")
        table = file
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = "auto"
    return file


@given(plan=PLANS, facts=FACTS, autos=AUTOS, others=OTHERS)
def test_an_auto_is_as_good_as_nothing_and_all_else_stays(plan, facts, autos, others):
    file = _file(autos, others)
    before = copy.deepcopy(file)
    got = resolve_deepspeed(plan, file, **facts)
    assert file == before
    assert "auto" not in json.dumps(got)
    for name, value in others.items():
        assert got[name] == value
    rows = got["train_micro_batch_size_per_gpu"]
    assert got["train_batch_size"] == rows * plan.accumulate * facts["ranks"]
    assert got["gradient_accumulation_steps"] == plan.accumulate
    assert got.get("gradient_clipping", 0.0) == (plan.clip_norm or 0.0)
    for name in ("bf16", "fp16"):
        assert got.get(name, {}).get("enabled", False) == (plan.precision.compute == name)
    assert got["zero_optimization"]["stage"] == (
        2 if plan.strategy.stage is None else plan.strategy.stage
    )


@given(plan=PLANS, facts=FACTS, autos=AUTOS, others=OTHERS)
def test_a_resolved_config_resolves_to_itself(plan, facts, autos, others):
    got = resolve_deepspeed(plan, _file(autos, others), **facts)
    assert resolve_deepspeed(plan, got, **facts) == got


@given(plan=PLANS, facts=FACTS, wrong=COUNTS)
def test_a_default_is_that_of_the_file(plan, facts, wrong):
    file = resolve_deepspeed(plan, {}, **facts)
    file["gradient_accumulation_steps"] = wrong
    file["train_batch_size"] = file["train_micro_batch_size_per_gpu"] * wrong * facts["ranks"]
    found = resolve_deepspeed(fx.Plan(strategy=plan.strategy), file, **facts)
    assert found == resolve_deepspeed(attrs.evolve(plan, accumulate=wrong), file, **facts) == file


@given(plan=PLANS, facts=FACTS, wrong=COUNTS)
def test_what_differs_is_named_and_nothing_else(plan, facts, wrong):
    plan = attrs.evolve(plan, accumulate=plan.accumulate + 1)  # not the default
    got = resolve_deepspeed(plan, {}, **facts)
    changed = copy.deepcopy(got)
    changed["gradient_accumulation_steps"] = plan.accumulate + wrong
    with pytest.raises(fx.PlanError) as found:
        resolve_deepspeed(plan, changed, **facts)
    lines = [line for line in str(found.value).splitlines() if line.startswith("  ")]
    assert len(lines) == 1 and "gradient_accumulation_steps" in lines[0]
    assert f"has {plan.accumulate}, the config has {plan.accumulate + wrong}" in lines[0]
