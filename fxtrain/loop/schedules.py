"""How far schedulers advance with an update, and whether their length is that of the run."""

from typing import Any

from fxtrain import ops
from fxtrain.state import Batch, Wrapped

__all__ = ["advance", "steps_per_update", "warn_of_lengths"]

# The attributes in which schedulers of torch keep the number of steps after which they are done.
_LENGTHS = {
    "CosineAnnealingLR": "T_max",
    "OneCycleLR": "total_steps",
    "PolynomialLR": "total_iters",
}
_TOLERANCE = 0.05  # a last short window, and rows of padding


def steps_per_update(model: Wrapped, rows: int) -> int:
    """Steps of each scheduler for an update that averages over this many rows."""
    plan = model.plan
    if plan.schedule == "samples":
        return rows
    # One batch of the loader before it was sharded is one of a rank; a global one is one of all.
    sharded = plan.schedule == "ranks" and plan.batch == "per_rank"
    return model.ctx.axis("data").world_size if sharded else 1


def advance(scheduler: Any, steps: int, *, capped: bool) -> None:
    """Step a scheduler; capped: as far as its length, which batches of ranks may exceed."""
    for _ in range(steps):
        if capped and scheduler.last_epoch >= getattr(scheduler, "total_steps", float("inf")):
            return
        scheduler.step()


def warn_of_lengths(model: Wrapped, batch: Batch, steps: int) -> None:
    """Log schedulers that are done long before the run, or long after it.

    Args:
        model: The model, which was updated.
        batch: The last one of that update. Unless the model trains on each batch of its loader,
            nothing is known.
        steps: Of schedulers, for each update.
    """
    updates = batch.run_updates
    if updates is None or batch.position.updates != model.window.updates:
        return
    ranks, made = model.ctx.axis("data").world_size, updates * steps
    for scheduler in model.schedulers:
        name = type(scheduler).__name__
        length = getattr(scheduler, _LENGTHS.get(name, ""), None)
        if type(length) is not int or abs(length - made) <= steps + _TOLERANCE * made:
            continue
        cure = f"Build it with {_LENGTHS[name]}={made}, of loader.total_updates(epochs)"
        if length > made and ranks > 1 and model.plan.schedule == "update":
            cure += (
                f"; if it counts the batches of the loader before fx.shard, use "
                f"Plan(schedule='ranks'), which steps it {ranks} times per update"
            )
        ops.log(model.ctx).warning(
            "%s has a length of %d steps, and this run of %d updates makes %d under "
            "Plan(schedule=%r). %s.",
            name,
            length,
            updates,
            made,
            model.plan.schedule,
            cure,
        )
