"""Models that take turns on a device; moves are counted, since the device is the CPU."""

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain import big


class Model(nn.Linear):
    """A layer that notes where it moves."""

    def __init__(self, log, name):
        super().__init__(2, 2)
        self.log, self.name = log, name

    def to(self, device):
        self.log.append((self.name, str(device)))
        return self


@pytest.fixture
def three():
    """Models whose device is called meta, of which nothing computes there."""
    log = []
    models = {name: Model(log, name) for name in ("text", "unet", "vae")}
    return log, models, big.turns(models, "cpu", away="meta")


X = torch.ones(1, 2)


def test_one_model_at_a_time_is_on_the_device(three):
    log, models, turns = three
    assert log == [(name, "meta") for name in models] and turns.resident is None
    log.clear()
    for name in ("text", "text", "unet", "unet"):
        models[name](X)
        assert turns.resident == name
    assert log == [("text", "cpu"), ("text", "meta"), ("unet", "cpu")]
    assert big.bring(turns, "vae") is models["vae"] and turns.resident == "vae"
    log.clear()
    big.release(turns)
    big.release(turns)
    assert log == [("vae", "meta")] and turns.resident is None
    big.end_turns(turns)
    models["text"](X)
    assert turns.resident is None and not any(one._forward_pre_hooks for one in models.values())


def test_inputs_move_and_outputs_are_those_of_the_models():
    nets = [nn.Linear(2, 2, dtype=torch.float64) for _ in range(2)]
    wanted = nets[1](nets[0](X.double()))
    turns = big.turns(dict(zip("ab", nets, strict=True)), "cpu")
    assert torch.equal(nets[1](input=nets[0](X.double())), wanted) and turns.resident == "b"


def test_a_wrapped_model_takes_turns():
    log = []
    with fx.detect({}, device="cpu") as ctx:
        model = fx.wrap(nn.Linear(2, 2), ctx)
        other = Model(log, "other")
        turns = big.turns({"model": model, "other": other}, "cpu")
        model(X)
        assert turns.resident == "model"
        other(X)
        assert turns.resident == "other"
