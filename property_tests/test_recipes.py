"""Laws of recipes: conversion can be undone, and skipping every layer changes nothing."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxtrain as fx
from fxtrain.precision.recipe_layers import convert_layers, recipe_targets

pytest.importorskip("torchao", reason="needs fxtrain[quant]")

CPU = torch.device("cpu")


@st.composite
def recipes(draw):
    common = {
        "skip": draw(st.sampled_from([(), ("0",), ("1", "2")])),
        "head": draw(st.booleans()),
        "min_features": draw(st.sampled_from([16, 32])),
        "emulate": True,
    }
    scaling = st.sampled_from(["tensorwise", "rowwise", "rowwise_with_gw_hp"])
    float8 = st.builds(
        lambda scaling, pad: fx.Float8(scaling=scaling, pad=pad, **common), scaling, st.booleans()
    )
    mx = st.builds(
        lambda format, grads: fx.MX(format=format, grad_weight=grads, **common),
        st.sampled_from(["mxfp8", "mxfp4"]),
        st.sampled_from(["format", "bf16"]),
    )
    return draw(float8 | mx)


def _net(sizes):
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*(nn.Linear(a, b, bias=bool(a % 3)) for a, b in pairs))


def _as_is(module):
    parts = [(id(one), type(one), sorted(vars(one))) for one in module.modules()]
    return parts, [(name, id(one)) for name, one in module.named_parameters()]


@settings(max_examples=30, deadline=None)
@given(
    recipe=recipes(),
    sizes=st.lists(st.sampled_from([16, 24, 32, 64]), min_size=5, max_size=5),
)
def test_converting_and_undoing_is_the_identity(recipe, sizes):
    net = _net(sizes)
    before = _as_is(net)
    plan = fx.Plan(precision=fx.Precision(compute="fp8", recipe=recipe))
    with fx.detect({}, device="cpu") as ctx:
        try:
            targets = recipe_targets(net, recipe)
            model = fx.wrap(net, ctx, plan)
        except fx.PlanError as error:
            assert "skips every linear layer" in str(error) and _as_is(net) == before
            return
        _check_converted(net, targets, sizes)
        fx.unwrap(model)
    assert _as_is(net) == before


def _check_converted(net, targets, sizes):
    names, skipped = targets
    assert {*names, *skipped} == {"0", "1", "2", "3"} and names
    for name, part in net.named_children():
        assert (type(part) is nn.Linear) == (name in skipped)
        assert isinstance(part, nn.Linear)
    assert list(net.state_dict()) == list(_net(sizes).state_dict())


@given(sizes=st.lists(st.sampled_from([16, 32]), min_size=3, max_size=3))
@settings(max_examples=5, deadline=None)
def test_skipping_every_layer_is_the_identity(sizes):
    net = _net(sizes)
    before = _as_is(net)
    convert_layers(net, fx.Float8(skip=("*",), emulate=True), CPU)
    assert _as_is(net) == before
