"""A context that was closed refuses every use, instead of running over what is left of it."""

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import ops

CLOSED = "this context is closed; call fx.detect"


def _uses(ctx, folder):
    """By name, what uses a context; everything they need is made while it is open."""
    model = fx.wrap(torch.nn.Linear(1, 1), ctx, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
    loader = DataLoader(torch.ones(8, 1), batch_size=2)
    sharded = fx.shard(loader, ctx)
    batch = next(iter(sharded))
    copy, axis = ops.duplicate(ctx), ctx.axis("tensor")
    return {
        "gather": lambda: ops.gather(torch.zeros(2), ctx),
        "barrier": lambda: ops.barrier(ctx),
        "any_rank": lambda: ops.any_rank(False, ctx),
        "on a duplicate": lambda: ops.gather_objects(1, copy),
        "on an axis": lambda: ops.reduce(1, axis),
        "on an axis found later": lambda: ops.reduce(1, ctx.axis("tensor")),
        "duplicate": lambda: ops.duplicate(ctx),
        "step": lambda: fx.step(ctx, batch, fns),
        "shard": lambda: fx.shard(loader, ctx),
        "iterating": lambda: next(iter(sharded)),
        "wrap": lambda: fx.wrap(torch.nn.Linear(1, 1), ctx),
        "save": lambda: fx.save(folder, ctx, model),
        "restore": lambda: fx.restore(folder, ctx, model),
    }


def _after_closing(ctx, folder, mesh):
    mine = fx.detect({}, device="cpu", timeout_s=5, mesh=mesh)
    uses = _uses(mine, folder)
    fx.close(mine)
    fx.close(mine)
    found = {}
    for name, use in uses.items():
        try:
            use()
        except fx.errors.ContextError as error:
            found[name] = str(error)
        else:
            found[name] = "no error"
    return found, ops.reduce(1, ctx, op="sum")


@pytest.mark.parametrize("mesh", [None, fx.Mesh(replicate=1, shard=2), fx.Mesh(replicate=2)])
def test_a_closed_context_refuses_every_use(pair, tmp_path, mesh):
    for found, total in pair.run(_after_closing, str(tmp_path), mesh):
        assert {name for name, text in found.items() if CLOSED not in text} == set()
        assert total == pair.n


def test_a_closed_context_of_one_rank_refuses_every_use(tmp_path):
    with fx.detect({}, device="cpu") as ctx:
        uses = _uses(ctx, str(tmp_path))
    fx.close(ctx)
    for name, use in uses.items():
        with pytest.raises(fx.errors.ContextError, match=CLOSED):
            pytest.fail(f"{name}: {use()}")
