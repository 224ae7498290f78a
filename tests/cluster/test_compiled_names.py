"""Checkpoints of a model that torch.compile wrapped before fx.wrap have the names of the model."""

import pytest
import torch
from safetensors import safe_open
from torch import nn

import fxtrain as fx
from fxtrain.testing.training import on_mesh

PLANS = {
    "ddp": {"accumulate": 2},
    "fsdp": {"strategy": fx.FSDP(), "accumulate": 2},
    "diloco": {"local": fx.DiLoCo(every=2)},
    "frozen": {"frozen": "digests"},
    "stages": {"strategy": fx.PP(split=("1",), microbatches=2)},
}


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.calls = 0

    def forward(self, x):
        return x + torch.tanh(self.norm(self.up(x)))

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def _net(which):
    torch.manual_seed(0)
    net = nn.Sequential(_Block(), _Block(), nn.Linear(4, 1))
    net[2].bias.requires_grad_(False)
    if which == "child":
        net[1] = torch.compile(net[1], backend="eager")
    return torch.compile(net, backend="eager") if which == "whole" else net


def _trained(ctx, options, which, *, folder=None, saved=False):
    stages = isinstance(options.get("strategy"), fx.PP)
    with on_mesh(ctx, fx.Mesh(pipeline=2) if stages else None) as placed:
        return _trained_on(placed, options, which, folder, saved=saved)


def _trained_on(ctx, options, which, folder, *, saved):
    plan = fx.Plan(**options)
    adam = lambda params: torch.optim.AdamW(params, lr=0.1)  # noqa: E731
    model = fx.wrap(_net(which), ctx, plan, optimizer=adam)
    position = fx.restore(folder, ctx, model).position if saved else fx.Position()
    if saved:
        calls = [part.calls for part in model.module.modules() if "calls" in vars(part)]
        assert 5 in calls  # of a pipeline, on the ranks of the stage
    fns = fx.StepFns(model, lambda m, batch: m(batch.data).square().mean())
    while position.index < 32:
        rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(position.index + ctx.rank))
        position = fx.step(ctx, fx.batch(rows, ctx, plan, after=position), fns).position
        if folder and not saved and position.index == 8 * 3:
            for part in model.module.modules():
                vars(part).update({"calls": 5} if "calls" in vars(part) else {})
            fx.save(folder, ctx, model, position=position)
            return None
    weights = {name: value.clone() for name, value in fx.weights(model)}
    fx.unwrap(model)
    return weights


def _both(ctx, options, first, second, folder):
    _trained(ctx, options, first, folder=folder)
    return _trained(ctx, options, second, folder=folder, saved=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("ddp", "child", "plain"),
        ("ddp", "plain", "whole"),
        ("fsdp", "child", "plain"),
        ("fsdp", "plain", "child"),
        ("diloco", "child", "plain"),
        ("frozen", "whole", "plain"),
        ("stages", "child", "plain"),
    ],
)
def test_training_continues_with_and_without_compile(pair, name, first, second, tmp_path):
    wanted = pair.run(_trained, PLANS[name], "plain")[0]
    for weights in pair.run(_both, PLANS[name], first, second, str(tmp_path)):
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[key], value) for key, value in wanted.items())


@pytest.mark.parametrize("which", ["whole", "child"])
def test_files_have_the_names_of_the_model(tmp_path, which):
    net, names = _net("plain"), []

    def optimizer(params):
        names.extend(name for name, _ in params.named())
        return torch.optim.AdamW(params, lr=0.1)

    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(_net(which), ctx, optimizer=optimizer)
        fx.save(tmp_path, ctx, model, position=fx.Position(index=1))
        fx.restore(tmp_path, ctx, fx.wrap(net, ctx, optimizer=optimizer))
    trained = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
    assert names == [*trained, *trained]
    fx.checkpoint.merge(tmp_path, tmp_path / "merged")
    with safe_open(tmp_path / "merged" / "model.safetensors", "pt") as file:
        assert {*file.keys()} == {key for key in net.state_dict() if "_extra_state" not in key}
