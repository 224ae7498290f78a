"""Public functions on a device that is not the CPU: what goes in and what comes out."""

import functools
import operator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

pytestmark = pytest.mark.timeout(120)


def _collectives(ctx):
    mine = torch.arange(3.0, device=ctx.device) + ctx.rank
    host = torch.ones(2) * ctx.rank
    tree = {"device": mine, "host": host, "words": f"rank {ctx.rank}", "n": ctx.rank}
    gathered = ops.gather(tree, ctx)
    total = ops.reduce({"device": mine, "host": host, "n": 1}, ctx, op="sum")
    sent = ops.broadcast({"device": mine, "host": host}, ctx)
    padded = ops.pad(torch.ones(ctx.rank + 1, 2, device=ctx.device), ctx)
    part = ops.split(torch.arange(5, device=ctx.device), ctx)
    stays = {
        "gathered": gathered["device"].device == ctx.device,
        "gathered host": gathered["host"].device.type == "cpu",
        "reduced": total["device"].device == ctx.device,
        "reduced host": total["host"].device.type == "cpu",
        "sent": sent["device"].device == ctx.device,
        "padded": padded.data.device == ctx.device,
        "part": part.device == ctx.device,
    }
    values = (
        gathered["device"].cpu().tolist(),
        gathered["host"].tolist(),
        gathered["words"],
        total["device"].cpu().tolist(),
        total["n"],
        sent["device"].cpu().tolist(),
        list(padded.data.shape),
    )
    return stays, values, ops.gather_objects(part.cpu().tolist(), ctx)


def test_collectives_keep_tensors_where_they_are(two):
    for stays, values, parts in two.run(_collectives):
        assert all(stays.values()), stays
        assert values == (
            [0, 1, 2, 1, 2, 3],
            [0, 0, 1, 1],
            ["rank 0", "rank 1"],
            [1, 3, 5],
            2,
            [0, 1, 2],
            [2, 2],
        )
        assert sorted(functools.reduce(operator.iadd, parts, [])) == [0, 1, 2, 3, 4]


def _disagreeing(ctx):
    try:
        ops.gather(torch.ones(2 + ctx.rank, device=ctx.device), ctx)
    except fx.CollectiveError as error:
        return str(error), ops.reduce(1, ctx, op="sum")
    return "no error", 0


def test_shapes_that_differ_are_named(two):
    for words, ranks in two.run(_disagreeing):
        assert "[3]" in words and "[2]" in words
        assert ranks == 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x_BF):
        return self.last(self.norm(self.first(x_BF)).relu())


def _loss(model, batch):
    features, labels = batch.data
    return nn.functional.cross_entropy(model(features), labels)


def _trained(ctx, folder, precision):
    plan = fx.Plan(accumulate=2, clip_norm=1.0, precision=precision, seed=4)
    torch.manual_seed(3)
    dataset = TensorDataset(torch.randn(22, 4), torch.randint(3, (22,)))
    loader = fx.shard(DataLoader(dataset, batch_size=4, shuffle=True), ctx, plan)
    model = fx.wrap(Net(), ctx, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=0.05))
    fns = fx.StepFns(model=model, loss=_loss)
    report = None
    for batch in loader:
        assert batch.data[0].device == ctx.device and batch.valid.device == ctx.device
        report = fx.step(ctx, batch, fns)
    fx.save(folder, ctx, model, position=report.position, background=True).result()
    wanted = {name: value.cpu() for name, value in model.module.state_dict().items()}
    other = fx.wrap(Net(), ctx, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=0.05))
    restored = fx.restore(fx.latest(folder), ctx, other)
    found = {name: value.cpu() for name, value in other.module.state_dict().items()}
    same = all(torch.equal(value, found[name]) for name, value in wanted.items())
    with torch.no_grad():
        outputs = other(torch.ones(2, 4, device=ctx.device))
    fx.export(other, folder + "/export")
    plain = Net()
    fx.load_model(folder + "/export", plain)
    kept = all(torch.equal(p, wanted[name]) for name, p in plain.named_parameters())
    whole = {name: weight.device.type for name, weight in fx.weights(other, device="cpu")}
    return same, kept, outputs.device == ctx.device, set(whole.values()), restored.position.updates


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_training_saving_and_exporting(two, tmp_path, compute):
    for found in two.run(_trained, str(tmp_path), fx.Precision(compute=compute)):
        same, kept, outputs, whole, updates = found
        assert same and kept and outputs and whole == {"cpu"} and updates == 2


def _random_numbers(ctx):
    ops.seed(7, ctx)
    with ops.fork_rng(ctx):
        first = torch.rand(4, device=ctx.device).cpu()
    return torch.equal(first, torch.rand(4, device=ctx.device).cpu())


def test_random_numbers_of_the_device_are_restored(one):
    assert one.run(_random_numbers) == [True]


class Graph:
    """Moves itself, as graphs of PyG and DGL do; torch knows no leaves of it."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Graph(self.x.to(device))


def _graphs(rows):
    return {"graph": Graph(torch.stack(rows)), "kind": Graph, "name": "a"}


def _moved_by_itself(ctx):
    loader = DataLoader(torch.ones(4, 2), batch_size=2, collate_fn=_graphs)
    batch = next(iter(fx.shard(loader, ctx))).data
    return batch["graph"].x.device == ctx.device, batch["kind"] is Graph, batch["name"]


def test_objects_with_a_method_to_are_moved(one):
    assert one.run(_moved_by_itself) == [(True, True, "a")]
