"""What is recomputed in backward: which modules, and which operations in them."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fxtrain as fx
from fxtrain.testing import Transformer
from tests._errors import raises_code

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class _Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _run(**recompute):
    plan = fx.Plan(strategy=fx.Single(), **recompute)
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(Transformer(), ctx, plan)
        with _Counted() as counted:
            fx.ops.backward(model(torch.arange(8)[None]).square().mean(), model)
        grads = {n: p.grad for n, p in fx.unwrap(model).named_parameters()}
    return counted.calls[ATTENTION], counted.calls["addmm"], counted.calls["gelu"], grads


# Two blocks, each with one attention, five products with a bias and one gelu.
@pytest.mark.parametrize(
    ("recompute", "wanted"),
    [
        ({}, (2, 10, 2)),
        ({"recompute": ("Block",)}, (4, 18, 4)),
        ({"recompute": ("Block",), "recompute_every": 2}, (3, 14, 3)),
        ({"recompute": ("Block",), "recompute_keep": ("attention",)}, (2, 18, 4)),
        ({"recompute": ("Block",), "recompute_keep": ("attention", "matmul")}, (2, 10, 4)),
    ],
)
def test_what_runs_again_in_backward(recompute, wanted):
    *counts, grads = _run(**recompute)
    assert tuple(counts) == wanted
    for name, grad in _run()[-1].items():
        assert torch.equal(grads[name], grad), name


@pytest.mark.parametrize("option", [{"recompute_every": 2}, {"recompute_keep": ("matmul",)}])
def test_options_of_recomputation_need_names(option):
    with (
        fx.detect(env={}, device="cpu") as ctx,
        raises_code("FX202"),
    ):
        fx.wrap(Transformer(), ctx, fx.Plan(**option))
