"""Training what stays resident of a streamed model: steps, checkpoints, and the frozen files."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.checkpoint.folders import read_manifest
from fxtrain.checkpoint.storage import open_storage
from fxtrain.state import Unit
from fxtrain.testing import Transformer
from fxtrain.testing.training import on_mesh
from tests._errors import raises_code
from tests._slow import slow_after
from tests.offload._streamed import COPIES, placement

UNITS = ("net.blocks.0", "net.blocks.1", "net.embed")
PLACED = fx.state.Placement(
    units=(
        Unit(name="", device="cpu"),
        *(Unit(name=name, device="disk") for name in UNITS),
    )
)


class Adapted(nn.Module):
    """A frozen transformer with low-rank updates, as of LoRA, beside each block."""

    def __init__(self, net):
        super().__init__()
        self.net = net.requires_grad_(False)
        torch.manual_seed(0)
        self.down = nn.ModuleList(nn.Linear(16, 2, bias=False).double() for _ in net.blocks)
        self.up = nn.ModuleList(nn.Linear(2, 16, bias=False).double() for _ in net.blocks)

    def forward(self, tokens):
        x = self.net.embed(tokens) + self.net.position[: tokens.shape[1]]
        for block, down, up in zip(self.net.blocks, self.down, self.up, strict=True):
            x = block(x) + up(down(x))
        return self.net.head(self.net.norm(x))


def _adam(params):
    return torch.optim.AdamW(params, lr=0.01)


def _streamed(ctx, folder, seed=0, **plan):
    with torch.device("meta"):
        net = Transformer(seed=seed)
    config = fx.Offload(placement=PLACED)
    model = fx.wrap(Adapted(net), ctx, fx.Plan(strategy=config, **plan), optimizer=_adam)
    fx.load_model(folder, model, strict=False, rename=lambda name: f"net.{name}")
    return model


def _resident(ctx, **plan):
    return fx.wrap(Adapted(Transformer()), ctx, fx.Plan(**plan), optimizer=_adam)


def _rows(ctx, model):
    tokens = torch.randint(0, 24, (24, 9), generator=torch.Generator().manual_seed(1))
    return fx.shard(DataLoader(TensorDataset(tokens), batch_size=4), ctx, model.plan)


def _loss(model, batch):
    (tokens,) = batch
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _train(ctx, model, batches=None, start=None):
    loader = _rows(ctx, model)
    loader = loader if start is None else loader.at(start)
    fns, reports = fx.StepFns(model=model, loss=_loss), []
    for epoch in loader.epochs(1):
        for batch in epoch:
            reports.append(fx.step(ctx, batch, fns))
            if len(reports) == batches:
                return reports
    return reports


def _trained(model):
    return {
        name: copy.deepcopy(p.detach())
        for name, p in model.module.named_parameters()
        if p.requires_grad
    }


@pytest.mark.parametrize(
    "plan", slow_after(1, [{}, {"recompute": ("Block",)}]), ids=["plain", "recompute"]
)
def test_steps_equal_those_of_the_resident_model(ctx, folder, plan):
    found, wanted = _streamed(ctx, folder, **plan), _resident(ctx, **plan)
    one, other = _train(ctx, found), _train(ctx, wanted)
    assert [float(report.loss) for report in one] == [float(report.loss) for report in other]
    for name, value in _trained(wanted).items():
        assert torch.equal(_trained(found)[name], value), name


def test_a_placement_by_memory_keeps_what_trains(ctx, tmp_path):
    """Also what is inside of a unit that streams."""

    def make():
        net = Adapted(Transformer())
        net.net.blocks[0].up.bias.requires_grad_()
        return net

    limit = int(0.6 * fx.big.sizes(make()).bytes)
    config = fx.Offload(memory={"cpu": limit}, offload_folder=str(tmp_path))
    found = fx.wrap(make(), ctx, fx.Plan(strategy=config), optimizer=_adam)
    wanted = fx.wrap(make(), ctx, optimizer=_adam)
    assert "net.blocks.0" in {unit.name for unit in found.placement.streamed}
    assert found.placement.bytes_on("cpu") <= limit
    one, other = _train(ctx, found), _train(ctx, wanted)
    assert [float(report.loss) for report in one] == [float(report.loss) for report in other]
    assert "net.blocks.0.up.bias" in _trained(wanted)
    for name, value in _trained(wanted).items():
        assert torch.equal(_trained(found)[name], value), name


def test_a_checkpoint_has_what_is_trained_and_names_the_frozen_files(ctx, folder, tmp_path):
    model = _streamed(ctx, folder)
    _train(ctx, full := _streamed(ctx, folder))
    reports = _train(ctx, model, batches=3)
    fx.save(tmp_path / "runs", ctx, model, position=reports[-1].position)
    at = Path(fx.latest(tmp_path / "runs"))
    found = read_manifest(open_storage(at)).tensors
    names = {name for name in found if "/module." in name}
    assert names == {f"model/module.{way}.{n}.weight" for way in ("up", "down") for n in (0, 1)}
    assert "model.safetensors" in (at / "manifest.json").read_text()

    again = _streamed(ctx, folder)
    found = fx.restore(tmp_path / "runs", ctx, again)
    _train(ctx, again, start=found.position)
    for name, value in _trained(full).items():
        assert torch.equal(_trained(again)[name], value), name

    fx.export(Transformer(seed=1), folder)
    other = _streamed(ctx, folder)
    with raises_code("FX603"):
        fx.restore(tmp_path / "runs", ctx, other)


def _on_rank(ctx, folder):
    with on_mesh(ctx, None) as placed:
        model = _streamed(placed, folder)
        losses = [float(report.loss) for report in _train(placed, model)]
        return losses, _trained(model)


def test_ranks_average_what_they_train(pair, ctx, folder):
    wanted = _resident(ctx)
    rows = _rows(ctx, wanted)
    batches = [batch for epoch in rows.epochs(1) for batch in epoch]
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        loss = (_loss(wanted, first) + _loss(wanted, second)) / 2
        loss.backward()
        wanted.optimizer.step()
        wanted.optimizer.zero_grad()
    for _, found in pair.run(_on_rank, str(folder)):
        for name, value in _trained(wanted).items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


class Routed(nn.Module):
    """A frozen layer with an adapter for each task; a batch names the tasks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, task):
        return self.adapters[task](self.base(x))


def _routed(ctx, folder):
    placed = placement("base")
    plan = fx.Plan(strategy=fx.Offload(placement=placed, offload_folder=folder))
    model = fx.wrap(Routed(), ctx, plan, optimizer=_adam)
    with fx.ops.sync(model):
        fx.ops.backward(model(torch.ones(2, 4), ctx.rank).sum(), model)
    fx.ops.apply(model)
    return _trained(model), [parameter.grad is None for parameter in model.parameters()]


def test_what_no_rank_uses_stays_as_it_is(pair, tmp_path):
    before = dict(Routed().named_parameters())
    first, second = pair.run(_routed, str(tmp_path))
    assert str(first) == str(second)
    for name, value in first[0].items():
        assert torch.equal(value, before[name]) == ("adapters.2" in name), name


class Normed(nn.Module):
    """Frozen layers with running statistics, and a gain that trains."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        parts = (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3))
        self.layers = nn.ModuleList(parts).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.gain


@pytest.mark.parametrize("row", [None, COPIES], ids=["in place", "copied"])
def test_running_statistics_that_stream_are_updated_and_saved(ctx, row, tmp_path):
    fx.export(Normed(), tmp_path / "model")
    placed = placement("layers.0", "layers.1", "layers.2", offload_buffers=True)
    plan = fx.Plan(strategy=fx.Offload(placement=placed, source=str(tmp_path / "model")))

    def wrapped():
        sgd = lambda some: torch.optim.SGD(some, lr=0.1)  # noqa: E731
        return fx.wrap(Normed(), ctx, plan, optimizer=sgd, strategy=row)

    model, resident, x = wrapped(), Normed(), torch.randn(5, 6)
    for _ in range(3):
        assert torch.equal(model(x), resident(x))
    fx.save(tmp_path / "run", ctx, model, position=fx.Position())
    again, used = wrapped(), wrapped()
    used(x)
    for one in (again, used):
        fx.restore(tmp_path / "run", ctx, one)
    resident.eval()
    for one in (model, again, used):
        one.eval()
        assert torch.equal(one(x), resident(x))
