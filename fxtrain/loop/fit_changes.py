"""What differs between the run that a checkpoint is of and the one that continues it."""

from typing import Any

from torch.utils.data import BatchSampler, SequentialSampler

from fxtrain import ops
from fxtrain._errors import DataError
from fxtrain.checkpoint import Restored
from fxtrain.data import Sharded
from fxtrain.state import DistContext

# What decides which row a position inside an epoch stands at.
_MEANING = {"units": "rows or batches in an epoch", "unit": "unit", "order": "order"}


def layout_of(loader: Sharded) -> dict[str, Any]:
    """What a checkpoint records of the data: plain values, equal on every rank."""
    layout, source = loader._layout, loader._loader
    sampler = getattr(source, "batch_sampler", None)
    if sampler is None or type(sampler) is BatchSampler:
        sampler = getattr(sampler or source, "sampler", None)
    order = type(sampler).__name__
    if type(sampler) is not SequentialSampler:
        order += f" with seed {loader.plan.seed}"
    if loader.plan.data.source == "sharded":
        order += ", sharded already"
    return {
        "units": loader._source.length(),
        "unit": layout.unit,
        "order": order,
        "batch": layout.stride,
        "even": layout.even,
    }


def check_changes(ctx: DistContext, restored: Restored, loader: Sharded) -> None:
    """Compare the data of a checkpoint with those that continue it; `restore` compares the plan.

    Effects:
        Logs one line with what differs.

    Raises:
        DataError: the position is inside an epoch, and stands at another row of this data.
    """
    position, saved, now = restored.position, restored.extra["layout"], layout_of(loader)
    changes = [f"{name} {saved[name]} → {now[name]}" for name in now if saved[name] != now[name]]
    moved = [
        f"{words} {saved[name]} when it was saved, {now[name]} now"
        for name, words in _MEANING.items()
        if saved[name] != now[name] and None not in (saved[name], now[name])
    ]
    if moved and position.index and not position.is_last:
        raise DataError(
            f"fit: {restored.path} was saved inside epoch {position.epoch}, at index "
            f"{position.index}, which is another row of the data that is given: "
            f"{'; '.join(moved)}. Pass the data, batch sampler and seed that it was saved with. To "
            f"train on other data, use another folder, and load the model with fx.restore.",
            code="FX401",
        )
    if changes:
        ops.log(ctx).info("fit: %s continues on other data: %s.", restored.path, "; ".join(changes))
