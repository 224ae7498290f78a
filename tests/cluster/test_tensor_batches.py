"""`fx.batch`: rows that a loop has at hand, as many on each rank as there are."""

import numpy as np
import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.errors import DataError

# Rows of each rank, for each batch in turn.
ROWS = ((3, 1), (2, 2), (0, 4), (5, 0))


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def _adam(params):
    return torch.optim.Adam(params, lr=0.1)


def _rows(number, ranks):
    """What some of the ranks pass in a batch, one after the other."""
    parts = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(10 * number + rank)
        parts.append(torch.randn(ROWS[number][rank], 4, generator=generator))
    return torch.cat(parts)


def _loss(model, batch, *, weighted):
    each = model(batch["x"]).square().squeeze(1)
    return fx.Weighted(each.sum(), len(each)) if weighted else each.mean()


def _train(ctx, plan, weighted):
    model, position = fx.wrap(_net(), ctx, plan, optimizer=_adam), None
    fns = fx.StepFns(model, lambda model, batch: _loss(model, batch, weighted=weighted))
    ranks, seen = (ctx.rank,) if ctx.world_size > 1 else (0, 1), []
    for number in range(4):
        batch = fx.batch({"x": _rows(number, ranks)}, ctx, plan, after=position, last=number == 2)
        report = fx.step(ctx, batch, fns)
        position = batch.position
        seen.append((position, batch.rows, int(batch.valid.sum()), float(report.loss)))
    return seen, [p.detach().clone() for p in fx.unwrap(model).parameters()]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("plan", [fx.Plan(), fx.Plan(accumulate=2), fx.Plan(strategy="fsdp")])
def test_ranks_train_on_all_rows_as_one_process_does(clusters, plan, weighted):
    ((alone, values),) = clusters[1].run(_train, plan, weighted)
    for rank, (seen, found) in enumerate(clusters[2].run(_train, plan, weighted)):
        assert [position for position, *_ in seen] == [position for position, *_ in alone]
        assert [rows for _, rows, *_ in seen] == list(ROWS)
        assert [valid for *_, valid, _ in seen] == [rows[rank] for rows in ROWS]
        torch.testing.assert_close(found, values)


def test_positions_count_rows_updates_and_epochs():
    with fx.detect({}, device="cpu") as ctx:
        plan, after, seen = fx.Plan(accumulate=2), None, []
        for rows, last in ((3, False), (2, False), (1, True), (4, False)):
            batch = fx.batch(torch.ones(rows), ctx, plan, after=after, last=last)
            after = batch.position
            seen.append((after.epoch, after.index, after.samples, after.updates, after.micro))
        assert seen == [(0, 3, 3, 0, 1), (0, 5, 5, 1, 0), (0, 6, 6, 2, 0), (1, 4, 10, 2, 1)]
        assert fx.batch((1, torch.ones(2, 3)), ctx)[0] == 1


@pytest.mark.parametrize("make", [np.asarray, lambda rows: np.asarray(rows)[::-1][::-1]])
def test_arrays_become_tensors_that_share_their_memory(make):
    rows = {"x": make(np.arange(6.0).reshape(3, 2)), "name": np.array(["a", "b", "c"])}
    with fx.detect({}, device="cpu") as ctx:
        batch = fx.batch(rows, ctx)
        assert batch.rows == (3,) and torch.equal(batch["x"], torch.arange(6.0).view(3, 2).double())
        assert batch["name"] is rows["name"]
        rows["x"][0] = 7.0
        assert batch["x"][0].tolist() == [7.0, 7.0]
        made = fx.shard(lambda position: position.index + np.arange(2), ctx, batch_size=2)
        assert [batch.data.tolist() for batch in made.updates(2)] == [[0, 1], [2, 3]]


def _refused(ctx, case):
    rows, after, last = torch.ones(0, 3), None, False
    if case == "no tensor" and ctx.rank:
        rows = ["text"]
    if case == "position" and ctx.rank:
        after = fx.Position(index=3, samples=3, updates=1)
    if case == "last":
        last = ctx.rank == 0
    with pytest.raises(DataError) as caught:
        fx.batch(rows, ctx, fx.Plan(), after=after, last=last)
    return caught.value.message


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no rows", r"^batch: no rank has a row.* Skip the batch on every rank"),
        ("no tensor", r"^batch: the data of ranks \[1\] has no tensor with a first dimension"),
        ("position", "rank 0 continues after epoch 0, index 0.*rank 1 .* index 3"),
        ("last", "rank 0 continues after epoch 0, index 0, update 0, last; rank 1 .* update 0. "),
    ],
)
def test_every_rank_refuses_what_makes_no_batch(clusters, case, words):
    first, second = clusters[2].run(_refused, case)
    assert first == second
    with pytest.raises(DataError, match=words):
        raise DataError(first)
