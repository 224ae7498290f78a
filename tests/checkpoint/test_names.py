"""The names that tensors have in a manifest, as all checkpoints so far have them."""

import json
import os

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.checkpoint.manifest import MANIFEST
from tests._errors import raises_code

NORM = ["norm.bias", "norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
NORM += ["norm.weight"]
TRAINED = ["layer.bias", "layer.weight", "norm.bias", "norm.weight"]
MOMENTS = ["exp_avg", "exp_avg_sq", "step"]
RANDOM = ["random.python", "random.python.gauss", "random.torch"]


class Counted(nn.Module):
    """A model with a tied layer, buffers, and state beside tensors."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 1), nn.BatchNorm1d(1)
        self.tied, self.count = self.layer, 3

    def forward(self, x):
        return self.norm(self.layer(x))

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def _adam(params):
    return torch.optim.AdamW(params, lr=0.1)


def _in_window(ctx, plan, optimizer=_adam):
    """A model in the middle of its second window of two micro-batches."""
    model = fx.wrap(Counted(), ctx, plan, optimizer=optimizer)
    x = torch.arange(8.0).view(4, 2) + ctx.rank
    for _ in range(3):
        with fx.ops.sync(model):
            fx.ops.backward(model(x).square().mean(), model)
        fx.ops.apply(model)
    return model


def _manifest(path):
    with open(os.path.join(path, MANIFEST)) as file:
        return json.load(file)["manifest"]


def _of(model, *names):
    return sorted(f"{model}/{name}" for name in names)


def _plain(own):
    """The names of a rank's own tensors, without the states of NumPy, which may not be imported."""
    return sorted(name for name in own if not name.startswith("random.numpy"))


def test_names_of_a_model_in_an_open_window_and_of_the_users_state(tmp_path):
    extra = {"x/y": torch.ones(2), "x": {"y": 3}, 3: torch.ones(1), "3": torch.zeros(1)}
    with fx.detect({}, device="cpu") as ctx:
        model = _in_window(ctx, fx.Plan(accumulate=2))
        saving = fx.save(
            tmp_path, ctx, {"a.b": model}, position=fx.Position(updates=1), extra=extra
        )
        manifest = _manifest(saving.path)
        other = fx.wrap(Counted(), ctx, fx.Plan(accumulate=2), optimizer=_adam)
        other.module.count = 0
        restored = fx.restore(saving.path, ctx, {"a.b": other})
    grads = [f"grad.{name}" for name in TRAINED]
    weights = [f"module.{name}" for name in ("layer.bias", "layer.weight", *NORM)]
    moments = [f"optimizer.0.{name}.{part}" for name in TRAINED for part in MOMENTS]
    of_model = _of("a.b", *grads, *weights, *moments)
    assert sorted(manifest["tensors"]) == [*of_model, "extra.3", "extra.3'", "extra.x/y"]
    assert manifest["aliases"] == {
        "a.b/module.tied.weight": "a.b/module.layer.weight",
        "a.b/module.tied.bias": "a.b/module.layer.bias",
    }
    (own,) = manifest["own"]
    assert _plain(own) == sorted([*_of("a.b", "counts", "tally", *grads), *RANDOM])
    values = manifest["models"]["a.b"]["values"]
    assert values["module"] == {"module._extra_state": {"count": 3}}
    assert values["optimizers"][0]["groups"][0]["params"] == [
        "layer.weight", "layer.bias", "norm.weight", "norm.bias",
    ]  # fmt: skip
    assert other.module.count == 3 and other.window.micro == 1
    assert torch.equal(other.module.layer.weight.grad, model.module.layer.weight.grad)
    assert restored.extra["3"] == 0 and restored.extra[3] == 1


def test_names_of_the_digests_of_frozen_weights(tmp_path):
    net = Counted()
    net.layer.requires_grad_(requires_grad=False)
    with fx.detect({}, device="cpu") as ctx:
        model = fx.wrap(net, ctx, fx.Plan(frozen="digests"), optimizer=_adam)
        manifest = _manifest(fx.save(tmp_path, ctx, model).path)
        fx.restore(tmp_path, ctx, model)
        net.layer.weight.data.add_(1)
        with raises_code("FX603", "such as layer.weight"):
            fx.restore(tmp_path, ctx, model)
    assert sorted(manifest["tensors"]) == _of("model", *(f"module.{name}" for name in NORM))
    base = manifest["models"]["model"]["values"]["base"]
    assert {*base} >= {"module.layer.weight", "module.layer.bias"}


def _saved_by_replicas(ctx, folder):
    local = fx.DiLoCo(every=2, fragments=2, delay=1, compress="int8")
    model = fx.wrap(nn.Linear(2, 1), ctx, fx.Plan(local=local), optimizer=_adam)
    return _manifest(fx.save(folder, ctx, model).path)


def test_names_of_replicas_that_train_independently(pair, tmp_path):
    manifest = pair.run(_saved_by_replicas, str(tmp_path))[0]
    names = ["bias", "weight"]
    assert sorted(manifest["tensors"]) == _of(
        "model",
        *(f"module.{name}" for name in names),
        *(f"round.{part}.{name}" for part in ("anchor", "momentum") for name in names),
    )
    rounds = ["open_rows", "open_weight", "residual.bias", "residual.weight", "rows", "weight"]
    for own in manifest["own"]:
        assert _plain(own) == sorted(
            _of("model", "counts", "tally", "optimizer.0.state", *(f"round.{n}" for n in rounds))
            + RANDOM
        )


@pytest.mark.parametrize("name", ["extra.one", "random.a", "a/b", ""])
def test_models_have_names_that_are_read_back(tmp_path, name):
    with fx.detect({}, device="cpu") as ctx:
        model = fx.wrap(nn.Linear(1, 1), ctx)
        with raises_code("FX600", "not a valid model name"):
            fx.save(tmp_path, ctx, {name: model})
        fx.save(tmp_path, ctx, {"extra": model, "random": model}, extra=torch.ones(1))
        assert fx.restore(tmp_path, ctx, {"extra": model}).extra == 1
