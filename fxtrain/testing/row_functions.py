"""Which functions of a strategy's row a model's life under it calls."""

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import attrs
import torch

from fxtrain.backends import strategies, weights, wrap
from fxtrain.backends.wrapping import problems_of
from fxtrain.checkpoint import restore
from fxtrain.state import DistContext, LocalSGD, Plan, Strategy
from fxtrain.testing.cluster import Cluster
from fxtrain.testing.training import Task, new_model, on_mesh, one_batch, trained


def unused_functions(ranks: Cluster, task: Task, *, clip_value: bool) -> list[list[str]]:
    """On each rank, the functions of the row of a task's plan that nothing calls.

    Args:
        ranks: A pool.
        task: Whose plan and mesh count.
        clip_value: Whether the row clips single entries.
    """
    plan = attrs.evolve(
        task.plan,
        accumulate=2,
        nonfinite="skip",
        clip_norm=0.05,
        clip_value=0.004 if clip_value else None,
    )
    # Weighted windows are corrected when they close.
    busy = attrs.evolve(task, plan=plan, weighted=True)
    with tempfile.TemporaryDirectory(prefix="fxtrain-laws-") as folder:
        return ranks.run(functions_unused, busy, folder)


def counted(row: Strategy, calls: set[str]) -> Strategy:
    """The same row, whose functions note their names when they are called; not those `fused`."""
    fused = dict(row.fused)
    functions = {
        name: function
        for name in attrs.fields_dict(Strategy)
        if callable(function := getattr(row, name))
        and not isinstance(function, type)
        and name not in fused
    }
    noting = {
        name: functools.partial(_noted, calls, name, function)
        for name, function in functions.items()
    }
    return attrs.evolve(row, **noting)


def _noted(
    calls: set[str], name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    calls.add(name)
    return function(*args, **kwargs)


def functions_unused(ctx: Any, task: Task, folder: str) -> list[str]:
    """The names on one rank; every rank of a pool runs this."""
    with on_mesh(ctx, task.mesh) as placed:
        calls: set[str] = set()
        row = strategies()[type(task.plan.strategy)]
        mine = counted(row, calls)
        wanted = {
            name
            for name in attrs.fields_dict(Strategy)
            if getattr(mine, name) is not getattr(row, name)
        }
        trained(placed, ctx.rank, task, save_to=folder, strategy=mine)
        _restored(placed, task, folder, mine)
        alone = _alone(placed, task, row)
        if alone is not None:
            trained(placed, ctx.rank, alone, strategy=mine)
        wanted -= {"generate"}  # the small transformer generates no text
        wanted -= {"average"} if alone is None else set()
        wanted -= {"clip_value"} if task.plan.clip_value is None else set()
        return sorted(wanted - calls)


def _restored(placed: DistContext, task: Task, folder: str, row: Strategy) -> None:
    """Use a saved model without training it."""
    model = wrap(new_model(task), placed, task.plan, strategy=row)
    restore(folder, placed, model)
    for _ in weights(model):
        pass
    batch = one_batch(placed, model)
    with torch.no_grad():
        model(batch[0])


def _alone(placed: DistContext, task: Task, row: Strategy) -> Task | None:
    """The task in copies that train alone; None where the row has no such copies."""
    plan: Plan = attrs.evolve(task.plan, local=task.plan.local or LocalSGD(every=1))
    if placed.world_size == 1 or problems_of(row, placed, plan, new_model(task)):
        return None
    return attrs.evolve(task, plan=plan)
