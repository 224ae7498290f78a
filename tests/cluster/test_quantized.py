"""Quantized weights on several ranks: equal bits, adapters that train, what is refused."""

import pytest
import torch

import fxtrain as fx
from fxtrain.precision.quantizing import stored_tensors
from fxtrain.testing import Transformer
from tests._slow import slow_after
from tests.precision._records import RECORDS, TRAINABLE, marked, mlp


class _Adapted(torch.nn.Module):
    """A frozen model and a layer that trains."""

    def __init__(self, seed):
        super().__init__()
        self.net = mlp(seed=seed).requires_grad_(False)
        self.adapter = torch.nn.Linear(64, 3, bias=False)

    def forward(self, x):
        return self.net(x) + self.adapter(x)


def _bytes(module):
    """The bytes of every tensor: pickle cannot carry float8."""
    found = stored_tensors(module)
    return {
        key: value.detach().clone().reshape(-1).view(torch.uint8) for key, value in found.items()
    }


def _train(ctx, name, folder):
    """Bytes before and after two updates, and after a restore into another model."""
    plan = fx.Plan(strategy=fx.DDP(), quantize=RECORDS[name])

    def made(seed):
        return fx.wrap(_Adapted(seed), ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))

    model = made(ctx.rank)
    before = _bytes(model.module)
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    torch.manual_seed(0)
    rows = torch.randn(8, 64)
    for batch in fx.shard(torch.utils.data.DataLoader(rows, batch_size=2), ctx, plan):
        fx.step(ctx, batch, fns)
    after = _bytes(model.module)
    fx.save(folder, ctx, model, position=fx.Position())
    other = made(5)
    fx.restore(folder, ctx, other)
    restored = _bytes(other.module)
    fx.export(model, f"{folder}/export")
    hidden = "_ddp_params_and_buffers_to_ignore"
    return before, after, restored, hasattr(fx.unwrap(model), hidden)


@pytest.mark.parametrize("name", slow_after(2, marked(TRAINABLE)))
def test_ranks_agree_bit_for_bit(pair, name, tmp_path):
    first, second = pair.run(_train, name, str(tmp_path))
    for one, other in zip(first[:3], second[:3], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    before, after, restored, marked_module = first
    assert not marked_module
    assert {key for key in after if not torch.equal(before[key], after[key])} == {"adapter.weight"}
    assert all(torch.equal(after[key], restored[key]) for key in after)
    fresh = _Adapted(7)
    fx.load_model(tmp_path / "export", fresh)
    found = _bytes(fresh)
    assert all(torch.equal(after[key], found[key]) for key in after)


def _refused(ctx, strategy):
    plan = fx.Plan(strategy=strategy, quantize=fx.Torchao())
    net = Transformer(dtype=torch.float32).requires_grad_(False)
    parts = [id(part) for part in net.modules()]
    with pytest.raises(fx.PlanError) as found:
        fx.wrap(net, ctx, plan)
    assert parts == [id(part) for part in net.modules()]
    return str(found.value)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (fx.FSDP(), "tensors of torchao cannot be split over ranks. Use fx.Bnb4()"),
        (fx.PP(), "PP cannot split quantized weights here"),
    ],
    ids=["fsdp", "pp"],
)
def test_strategies_that_split_parameters_refuse(pair, strategy, words):
    told = pair.run(_refused, strategy)
    assert told[0] == told[1]
    assert words in told[0] and "DDP()" in told[0]


def _uneven_failure(ctx):
    """One rank cannot quantize; no rank changes its module."""
    import sys

    if ctx.rank:
        sys.modules["torchao"] = None
    net = mlp()
    try:
        fx.wrap(net, ctx, fx.Plan(quantize=fx.Torchao()))
    except fx.FxError as error:
        return type(error).__name__, str(error), type(net[0].weight).__name__
    finally:
        if ctx.rank:
            del sys.modules["torchao"]
    return "no error"


@pytest.mark.parametrize("name", marked(["int8"]))
def test_a_package_missing_on_one_rank_fails_on_all(pair, name):
    (kind, text, weight), other = pair.run(_uneven_failure)
    assert other == (kind, text, weight)
    assert kind == "MissingPackageError" and weight == "Parameter"
    assert "rank 1" in text and "pip install 'fxtrain[quant]'" in text
