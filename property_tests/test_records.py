"""Laws of records: conversion is the identity, equality has a fingerprint, values are frozen."""

import hashlib

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain import state
from fxtrain.launchers.program import plan_variable
from fxtrain.state import structure, unstructure
from fxtrain.state.topology import Topology

names = st.one_of(
    st.text(max_size=6),
    # What a format could take for something else than text.
    st.sampled_from(["yes", "null", "~", "010", "1e3", ".inf", "1:30", "true", "<<", "=", "- a"]),
)
positive = st.integers(1, 1000)
reals = st.floats(0.001, 1e6, allow_nan=False)
maybe = st.one_of(st.none(), reals)

hooks = st.builds(
    fx.CommHook,
    name=st.sampled_from(["none", "fp16", "bf16", "power_sgd", "batched_power_sgd"]),
    wrapper=st.sampled_from(["none", "fp16", "bf16"]),
    power_sgd=st.builds(fx.PowerSGD, rank=positive, start_iter=st.integers(2, 99)),
)
ddp = st.builds(fx.DDP, bucket_mib=reals, static_graph=st.booleans(), hook=hooks)
deepspeed = st.builds(
    fx.DeepSpeed,
    stage=st.sampled_from([None, 0, 1, 2, 3]),
    config=st.none() | st.just({"a": {"c": 1.5, "b": [True, None]}}) | st.just("ds.json"),
    offload_optimizer=st.sampled_from([None, "cpu", "nvme"]),
    leaf_modules=st.lists(names).map(tuple),
    reduce_bucket=st.none() | positive,
)
precisions = st.builds(
    fx.Precision,
    compute=st.sampled_from(["fp32", "bf16", "fp16"]),
    output=st.sampled_from([None, "fp32"]),
    scale=st.builds(fx.LossScale, initial=reals, interval=positive),
)
compiles = st.builds(
    fx.Compile,
    blocks=st.lists(names, max_size=3),
    mode=st.one_of(st.none(), names),
    dynamic=st.sampled_from([None, True, False]),
)
local = st.one_of(
    st.builds(fx.LocalSGD, every=positive),
    st.builds(fx.DiLoCo, every=positive, outer_lr=reals, outer_momentum=st.floats(0, 0.99)),
)
plans = st.builds(
    fx.Plan,
    strategy=st.one_of(st.just(fx.Single()), ddp, deepspeed),
    precision=precisions,
    local=st.none() | local,
    accumulate=positive,
    clip_norm=maybe,
    clip_value=maybe,
    nonfinite=st.sampled_from(["ignore", "skip", "raise"]),
    even=st.sampled_from(["pad", "drop", "uneven"]),
    data=st.builds(fx.Data, source=st.sampled_from(["shard", "dispatch", "sharded"])),
    seed=st.integers(0, 1 << 62),
    recompute=st.lists(names, max_size=3),
    compile=st.one_of(st.none(), compiles),
)
positions = st.builds(fx.Position, epoch=positive, index=positive, is_last=st.booleans())
meshes = st.builds(fx.Mesh, replicate=positive, shard=positive, tensor=positive)
topologies = st.builds(Topology, rank=positive, launcher=names, main_address=names)
records = st.one_of(plans, positions, meshes, topologies, ddp, precisions, compiles)


@given(record=records)
def test_structure_after_unstructure_is_the_identity(record):
    assert structure(unstructure(record), type(record)) == record


@given(plan=plans, form=st.sampled_from(["json", "toml", "yaml"]))
def test_text_formats_are_the_identity(plan, form):
    again = fx.state.loads(fx.state.dumps(plan, form), fx.Plan, form)
    assert again == plan and hash(again) == hash(plan)
    assert fx.fingerprint(again) == fx.fingerprint(plan)


@given(plan=plans, form=st.sampled_from(["json", "toml", "yaml"]))
def test_a_plan_by_launch_by_file_and_by_argument_is_one_value(plan, form):
    name, _, value = plan_variable(unstructure(plan)).partition("=")
    launched = fx.given_plan(env={name: value})
    written = fx.state.loads(fx.state.dumps(plan, form), fx.Plan, form)
    assert launched == written == plan and len({launched, written, plan}) == 1


@given(left=plans, right=plans)
def test_fingerprints_and_diffs_tell_plans_apart(left, right):
    assert fx.diff(left, left) == ()
    changes = fx.diff(left, right)
    assert (left == right) == (changes == ()) == (fx.fingerprint(left) == fx.fingerprint(right))
    backward = {c.path: c for c in fx.diff(right, left)}
    assert backward.keys() == {c.path for c in changes}
    assert all(
        (backward[c.path].left, backward[c.path].right) == (c.right, c.left) for c in changes
    )


def test_fingerprint_is_a_fixed_function_of_the_canonical_text():
    """Pinned: a stored fingerprint must keep its meaning in later versions."""
    text = '{"epoch":0,"index":0,"is_last":false,"micro":0,"order":"","samples":0,"updates":0}'
    wanted = hashlib.blake2b(f"Position{text}".encode(), digest_size=16).hexdigest()
    assert fx.fingerprint(fx.Position()) == wanted


KEYS = sorted(
    {field for kind in (fx.Plan, fx.DDP, fx.CommHook) for field in attrs.fields_dict(kind)}
)
json_like = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(10**5000, 10**5001),
        st.floats(),
        st.text(max_size=300),
        st.sampled_from(["ddp", "single", "bf16", "pad", "\ud800"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=30),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=300)), inner),
        st.dictionaries(st.integers(), inner, max_size=2),
    ),
    max_leaves=40,
)
kinds = st.sampled_from(
    [
        fx.Plan,
        fx.Position,
        fx.Mesh,
        Topology,
        fx.DDP,
        fx.DeepSpeed,
        fx.Precision,
        fx.Compile,
        fx.LossScale,
    ]
)


@given(data=json_like, kind=kinds)
def test_any_data_is_a_record_or_a_plan_error_of_some_lines(data, kind):
    try:
        assert isinstance(structure(data, kind), kind)
    except fx.PlanError as error:
        lines = str(error).splitlines()
        assert 0 < len(lines) <= 21
        assert all(len(line) <= 1000 and line.strip() for line in lines)
        assert all(line.startswith(kind.__name__.lower()) for line in lines[:20])


@given(plan=plans, data=st.data())
def test_one_wrong_field_is_one_line_with_its_path(plan, data):
    table = unstructure(plan)
    name = data.draw(st.sampled_from(sorted(table)))
    table[name] = {"no such key": data.draw(json_like)} if name == "strategy" else ["\ud800"]
    with pytest.raises(fx.PlanError) as caught:
        structure(table, fx.Plan)
    (line,) = str(caught.value).splitlines()
    assert f"plan.{name}" in line


@pytest.mark.slow
@given(value=json_like)
def test_values_made_in_python_and_read_from_files_get_the_same_checks(value):
    for name in attrs.fields_dict(fx.PowerSGD):
        try:
            made = fx.PowerSGD(**{name: value})
        except fx.PlanError as error:
            with pytest.raises(fx.PlanError) as read:
                structure({name: value}, fx.PowerSGD)
            path, _, told = str(read.value).partition(": ")
            assert told.split("; ", 1)[-1] == str(error).split("): ", 1)[-1]
            assert path == f"powersgd.{name}"
        else:
            assert structure({name: value}, fx.PowerSGD) == made
            assert fx.fingerprint(structure({name: value}, fx.PowerSGD)) == fx.fingerprint(made)


@given(text=st.text(max_size=60), form=st.sampled_from(["json", "toml", "yaml"]))
def test_any_text_is_a_plan_or_a_plan_error(text, form):
    try:
        assert isinstance(fx.state.loads(text, fx.Plan, form), fx.Plan)
    except fx.PlanError as error:
        assert str(error)


@pytest.mark.parametrize("name", sorted(state.__all__))
def test_records_are_frozen_and_hashable_or_say_why_not(name):
    kind = getattr(state, name)
    if not (isinstance(kind, type) and attrs.has(kind)):
        return
    if kind.__setattr__ is not object.__setattr__ and "mutable" not in (kind.__doc__ or ""):
        assert kind.__hash__ is not None
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            kind.__setattr__(object.__new__(kind), "anything", 1)
    else:
        assert "mutable" in (kind.__doc__ or ""), f"{name} is not frozen and does not say why"


@pytest.mark.parametrize("cls", [fx.Plan, fx.Precision, fx.Compile, fx.Data, fx.DDP])
def test_fields_left_out_by_toml_default_to_none(cls):
    for field in attrs.fields(cls):
        if type(None) in getattr(field.type, "__args__", ()):
            assert field.default is None or getattr(cls(), field.name) is None
