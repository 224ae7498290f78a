"""Adapters of peft over quantized layers: merged after an evaluation, and exported."""

import importlib.util

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.precision.quantizing import quantize_layers, stored_tensors
from tests._slow import slow_after

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")
    for package in ("peft", "bitsandbytes")
]

X = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))


def _net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 3))


def _outputs(model):
    with torch.no_grad():
        return model.eval()(X)


@pytest.mark.filterwarnings("ignore:Merge lora module to .*may get different generations")
@pytest.mark.parametrize(
    ("record", "flag"),
    slow_after(1, [(fx.Bnb4(), "is_loaded_in_4bit"), (fx.Bnb8(), "is_loaded_in_8bit")]),
    ids=["4 bits", "8 bits"],
)
def test_adapters_are_merged_into_quantized_layers(ctx, record, flag, tmp_path):
    import peft  # takes every process that collects tests seconds

    net = _net().requires_grad_(False)
    quantize_layers(net, record, torch.device("cpu"))
    setattr(net, flag, True)  # where peft looks
    base = _outputs(net)
    net = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["0", "2"]))
    model = fx.wrap(
        net, ctx, fx.Plan(quantize=record), optimizer=lambda params: torch.optim.SGD(params, lr=1.0)
    )
    fns = fx.StepFns(model=model, loss=lambda m, b: (m(b.data) - 1).square().mean())
    loader = torch.utils.data.DataLoader(X.repeat(4, 1), batch_size=6)
    for batch in fx.shard(loader, ctx, fx.Plan()):
        fx.step(ctx, batch, fns)
        _outputs(model.module)
        model.module.train()
    trained = _outputs(model)
    merged = fx.unwrap(model).merge_and_unload()
    # The merged weights are quantized once more.
    moved, lost = (trained - base).norm(), (_outputs(merged) - trained).norm()
    assert moved > 0.1 * base.norm() and lost < 0.3 * moved
    fx.export(merged, tmp_path)
    again = _net()
    fx.load_model(tmp_path, again)
    assert torch.equal(_outputs(again), _outputs(merged))
    before, after = stored_tensors(merged), stored_tensors(again)
    assert all(torch.equal(one, after[name]) for name, one in before.items())
