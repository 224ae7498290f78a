"""Laws of streamed models: outputs and gradients are those of the resident model, bit for bit."""

import copy
import functools
import tempfile

import attrs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxtrain as fx
from fxtrain.backends.offload.strategy import OFFLOAD, wrap_streamed
from fxtrain.state import Unit

WIDTH = 6
# Units that are copied to their device, as for an accelerator, also where that is the CPU.
COPIES = attrs.evolve(OFFLOAD, wrap=functools.partial(wrap_streamed, copy=True))


class Net(nn.Module):
    """Layers that are called in the order that a call asks for; some are the same, or tied."""

    def __init__(self, layers, same, tied, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(_layer(kind) for kind in layers)
        for one, other in same:
            self.layers[one % len(layers)] = self.layers[other % len(layers)]
        for one, other in tied:
            first, second = self.layers[one % len(layers)][0], self.layers[other % len(layers)][0]
            second.weight = first.weight
        self.gains = nn.Parameter(torch.rand(len(layers), WIDTH) + 0.5)

    def forward(self, x, order, *, recompute=False):
        for number in order:
            layer = self.layers[number]
            y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
            x = torch.tanh(y) * self.gains[number]
        return x


def _layer(kind):
    made = [nn.Linear(WIDTH, WIDTH, bias=kind != 1)]
    if kind == 2:
        made.append(nn.LayerNorm(WIDTH))
    if kind == 3:  # with buffers that have values of their own
        made.append(nn.BatchNorm1d(WIDTH))
        made[-1](torch.randn(5, WIDTH))
    return nn.Sequential(*made).eval()


pairs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2)
models = st.builds(
    Net, st.lists(st.integers(0, 3), min_size=1, max_size=6), pairs, pairs, st.integers(0, 99)
)


def _placement(net, data):
    """Each layer on disk or not; parts of one tie in one place."""
    names = [f"layers.{number}" for number in range(len(net.layers))]
    homes = [data.draw(st.sampled_from(["disk", "cpu"])) for _ in names]
    first = {}
    units = [Unit(name="", device="cpu")]
    for name, layer, home in zip(names, net.layers, homes, strict=True):
        home = first.setdefault(id(layer[0].weight), home)
        units.append(Unit(name=name, device=home))
    return fx.state.Placement(
        units=tuple(units),
        prefetch=data.draw(st.integers(0, 4)),
        offload_buffers=data.draw(st.booleans()),
    )


@settings(max_examples=25)
@given(net=models, data=st.data(), copies=st.booleans(), from_memory=st.booleans())
def test_streamed_equals_resident(net, data, copies, from_memory):
    resident = copy.deepcopy(net)
    orders = st.lists(st.integers(0, len(net.layers) - 1), max_size=7)
    placement = _placement(net, data)
    row = COPIES if copies else OFFLOAD
    with tempfile.TemporaryDirectory() as folder, fx.detect(env={}, device="cpu") as ctx:
        fx.export(net, f"{folder}/model")
        at = f"{folder}/offload"
        config = fx.Offload(
            placement=placement,
            source=None if from_memory else f"{folder}/model",
            offload_folder=at if from_memory else None,
        )
        model = fx.wrap(net, ctx, fx.Plan(strategy=config), strategy=row)
        for _ in range(3):
            order = data.draw(orders)
            x = torch.randn(2, WIDTH)
            with torch.no_grad():
                assert torch.equal(model(x, order), resident(x, order))
        assert fx.unwrap(model) is net
        assert [n for n, _ in net.named_parameters()] == [n for n, _ in resident.named_parameters()]
        assert torch.equal(net(x, order), resident(x, order))


@settings(max_examples=20)
@given(net=models, data=st.data(), copies=st.booleans(), recompute=st.booleans())
def test_gradients_of_resident_parameters_equal_those_of_the_resident_model(
    net, data, copies, recompute
):
    net.train().layers.requires_grad_(False)
    resident = copy.deepcopy(net)
    placement = _placement(net, data)
    row = COPIES if copies else OFFLOAD
    orders = st.lists(st.integers(0, len(net.layers) - 1), min_size=1, max_size=7)
    with tempfile.TemporaryDirectory() as folder, fx.detect(env={}, device="cpu") as ctx:
        fx.export(net, folder)
        plan = fx.Plan(strategy=fx.Offload(placement=placement, source=folder))
        model = fx.wrap(net, ctx, plan, optimizer=_sgd, strategy=row)
        plain = _sgd([resident.gains])
        for _ in range(3):
            order, x = data.draw(orders), torch.randn(2, WIDTH)
            for one, optimizer in ((model, model.optimizer), (resident, plain)):
                one(x, order, recompute=recompute).sum().backward()
                optimizer.step()
            assert torch.equal(net.gains.grad, resident.gains.grad)
            assert torch.equal(net.gains, resident.gains)
            for optimizer in (model.optimizer, plain):
                optimizer.zero_grad()
        held = dict(fx.weights(model))
        fx.unwrap(model)
        own = dict(net.named_buffers())
        for name, wanted in resident.named_buffers():
            # A recomputed forward updates running statistics again, where torch recomputes one.
            assert recompute or torch.equal(held[name], wanted)
            assert torch.equal(held[name], own[name])


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1)
