"""Ranks with different numbers of batches, and loops that leave an epoch, under every strategy."""

import itertools

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.testing import Transformer
from fxtrain.testing.training import on_mesh
from tests._slow import slow_after
from tests.cluster._models import PIPELINES
from tests.cluster.test_laws import CUTS

ROWS = (5, 1, 3, 2)  # of each data rank, in batches of two
EVEN = fx.Plan(even="uneven", data=fx.Data(source="sharded"))
STAGES = {"split": ("blocks.0", "blocks.1", "norm"), "microbatches": 4}
PLANS = {
    "single": ((1,), fx.Single(), None),
    "ddp": ((2, 4), fx.DDP(), None),
    "sharded optimizer": ((2,), fx.DDP(shard_optimizer=True), None),
    "full": ((2,), fx.FSDP(), None),
    "grads and optimizer": ((2,), fx.FSDP(mode="grads_and_optimizer"), None),
    "hybrid": ((4,), fx.FSDP(shard=2), None),
    "tensor": ((4,), fx.FSDP(tensor=fx.TP(styles=CUTS)), fx.Mesh(shard=2, tensor=2)),
    "context": ((4,), fx.DDP(), fx.Mesh(replicate=2, context=2)),
    "stages": ((4,), fx.PP(stages=fx.FSDP()), fx.Mesh(pipeline=2, shard=2)),
    "in a loop": ((2,), fx.PP(**STAGES, schedule="interleaved_1f1b"), fx.Mesh(pipeline=2)),
    "there and back": ((2,), fx.PP(**STAGES, schedule="dualpipe_v"), fx.Mesh(pipeline=2)),
    "alone": ((2,), fx.DDP(), None),
}
# Which share their code with another plan here.
REPEATED = ("sharded optimizer", "grads and optimizer", "there and back", "alone")


def _sgd(params):
    return torch.optim.SGD(params, lr=0.3)


def _rows(rank):
    """Inputs, targets, and which of those count: a different number in every row."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, Transformer.VOCABULARY, (ROWS[rank], 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:], torch.arange(8) <= tokens[:, :1] % 8


def _losses(model, inputs, targets, kept):
    """The mean over targets; the sum over those that count, and how many."""
    each = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
    return each.mean(), (each * kept.flatten()).sum(), kept.sum()


def _loss(model, batch, *, weighted):
    mean, total, weight = _losses(model, *batch)
    return fx.Weighted(total, weight) if weighted else mean


def _train(ctx, plan, mesh, weighted):
    with on_mesh(ctx, mesh) as placed:
        table = TensorDataset(*_rows(placed.axis("data").rank))
        loader = fx.shard(DataLoader(table, batch_size=2), placed, plan)
        model = fx.wrap(Transformer(), placed, plan, optimizer=_sgd)
        fns = fx.StepFns(model=model, loss=lambda m, batch: _loss(m, batch, weighted=weighted))
        for epoch in loader.epochs(2):
            for batch in epoch:
                report = fx.step(placed, batch, fns)
        whole = fx.unwrap(model)
        return report.position, {n: p.detach().clone() for n, p in whole.named_parameters()}


def _by_hand(ranks, plan, weighted):
    net = Transformer()
    optimizer = _sgd(net.parameters())
    batches = [list(zip(*(t.split(2) for t in _rows(rank)), strict=True)) for rank in range(ranks)]
    count = max(map(len, batches))
    for _ in range(2):
        for low in range(0, count, plan.accumulate):
            parts = [part for one in batches for part in one[low : low + plan.accumulate]]
            mean, total, weight = _losses(net, *map(torch.cat, zip(*parts, strict=True)))
            (total / weight if weighted else mean).backward()
            optimizer.step()
            optimizer.zero_grad()
    return dict(net.named_parameters())


def cases():
    for name, (ranks, strategy, _) in PLANS.items():
        marks = [PIPELINES] if isinstance(strategy, fx.PP) else []
        marks += [pytest.mark.slow] if name in REPEATED else []
        for n in ranks:
            yield pytest.param(n, name, marks=marks, id=f"{n}-{name}")


@pytest.mark.parametrize(("n", "name"), slow_after(2, list(cases())))
def test_updates_are_those_of_all_rows(clusters, n, name):
    _, strategy, mesh = PLANS[name]
    local = fx.LocalSGD(every=1) if name == "alone" else None
    for accumulate, weighted in ((1, True), (2, False)):
        context = fx.CP(tables=("position",)) if name == "context" else None
        plan = attrs.evolve(EVEN, strategy=strategy, local=local, context=context)
        plan = attrs.evolve(plan, accumulate=accumulate)
        ranks = n if mesh is None else n // (mesh.tensor * mesh.pipeline * mesh.context)
        wanted = _by_hand(ranks, plan, weighted)
        answers = clusters[n].run(_train, plan, mesh, weighted)
        assert len({position for position, _ in answers}) == 1
        for _, got in answers:
            for key, value in wanted.items():
                torch.testing.assert_close(got[key], value.detach(), rtol=1e-9, atol=1e-11)


def _whole_loop(ctx, n, source, folder):
    """A loop that looks at every batch with all ranks, and the mean over rows that it finds."""
    plan = fx.Plan(even="uneven", accumulate=2, nonfinite="raise", data=fx.Data(source=source))
    rows = torch.arange(float(n if source != "sharded" else 1 + ctx.rank * 3)).view(-1, 1)
    loader = fx.shard(DataLoader(rows, batch_size=2), ctx, plan)
    # Without a row, the mean is not a number.
    fns = fx.StepFns(
        model=fx.wrap(torch.nn.Linear(1, 1), ctx, plan, optimizer=_still),
        loss=lambda model, batch: (model(batch.data) * 0 + batch.data)[batch.valid].mean(),
    )
    seen, total, weight = [], 0.0, 0.0
    for batch in loader:
        report = fx.step(ctx, batch, fns)
        assert report.weight == batch.sizes[ctx.rank]
        total += float(fx.ops.reduce(report.loss * report.weight, ctx, op="sum"))
        weight += fx.ops.reduce(report.weight, ctx, op="sum")
        seen.append((batch.position, report.position, report.applied, sum(batch.rows)))
    fx.save(folder, ctx, fns.model, position=batch.position)
    return seen, total, weight, fx.restore(folder, ctx, fns.model).position


def _still(params):
    return torch.optim.SGD(params, lr=0.0)


@pytest.mark.parametrize("source", ["shard", "dispatch", "sharded"])
def test_every_rank_sees_the_same_loop(cluster, source, tmp_path):
    n = 4 * cluster.n + 1
    found = cluster.run(_whole_loop, n, source, str(tmp_path))
    assert all(mine == found[0] for mine in found)
    seen, total, weight, position = found[0]
    assert weight == sum(rows for *_, rows in seen)
    ends = [n] if source != "sharded" else [1 + 3 * rank for rank in range(cluster.n)]
    assert weight == sum(ends)
    assert total == pytest.approx(sum(sum(range(end)) for end in ends))
    assert position == seen[-1][0] and position.is_last and position.samples == weight
    assert all(here == reported for here, reported, *_ in seen)
    applied = [number % 2 == 1 or number == len(seen) - 1 for number in range(len(seen))]
    assert [one[2] for one in seen] == applied


BATCH, BATCHES = 4, 5  # of each data rank
# Windows of three: the epoch would end with a short one, and the loop leaves that open.
LEFT_AFTER = 4
WINDOWS = ((0, 1, 2), (3, 0, 1), (2, 3, 4))


def _tokens(ranks):
    generator = torch.Generator().manual_seed(3)
    count = BATCH * BATCHES * ranks
    return torch.randint(0, Transformer.VOCABULARY, (count, 9), generator=generator)


def _loss_breaks(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _train_breaks(ctx, plan, mesh):
    with on_mesh(ctx, mesh) as placed:
        tokens = _tokens(placed.axis("data").world_size)
        table = TensorDataset(tokens[:, :-1], tokens[:, 1:])
        loader = fx.shard(DataLoader(table, batch_size=BATCH), placed, plan)
        model = fx.wrap(Transformer(), placed, plan, optimizer=_sgd)
        fns = fx.StepFns(model=model, loss=lambda m, batch: _loss_breaks(m, *batch))
        for epoch, count in zip(loader.epochs(2), (LEFT_AFTER, BATCHES), strict=True):
            for batch in itertools.islice(epoch, count):
                report = fx.step(placed, batch, fns)
        whole = fx.unwrap(model)
        return report.position.updates, {n: p.detach().clone() for n, p in whole.named_parameters()}


def _by_hand_breaks(ranks):
    net = Transformer()
    optimizer = _sgd(net.parameters())
    batches = _tokens(ranks).split(BATCH * ranks)
    for window in WINDOWS:
        rows = torch.cat([batches[number] for number in window])
        _loss_breaks(net, rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(net.named_parameters())


@pytest.mark.parametrize(("n", "name"), slow_after(3, list(cases())))
def test_an_open_window_continues_with_the_next_epoch(clusters, n, name):
    _, strategy, mesh = PLANS[name]
    plan = fx.Plan(strategy=strategy, accumulate=3)
    if name == "alone":
        plan = attrs.evolve(plan, local=fx.LocalSGD(every=1))
    if name == "context":
        plan = attrs.evolve(plan, context=fx.CP(tables=("position",)))
    ranks = n if mesh is None else n // (mesh.tensor * mesh.pipeline * mesh.context)
    wanted = _by_hand_breaks(ranks)
    for updates, got in clusters[n].run(_train_breaks, plan, mesh):
        assert updates == len(WINDOWS)
        for key, value in wanted.items():
            torch.testing.assert_close(got[key], value.detach(), rtol=1e-9, atol=1e-11)
