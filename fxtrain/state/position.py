"""The position of a run in its data."""

import attrs


@attrs.frozen(kw_only=True)
class Position:
    """A cursor into the data of a run, the same at every world size.

    It points to the end of a batch: continuing from it yields the next row that no rank has
    seen.

    Attributes:
        epoch: The pass over the data, from 0.
        index: Rows of this epoch that all ranks together have consumed, without padding; for a
            custom batch sampler, batches instead of rows.
        samples: Rows consumed since the start of the run, over all epochs and ranks.
        updates: Accumulation windows of the loader's plan that have closed so far: the updates of
            a model that trains on each of its batches, under the same plan. `report.updates`
            counts those of any model.
        micro: Batches in the open one; 0 if the batch closed its window.
        is_last: Whether the batch was the last of its epoch.
        order: What the order of the epoch depends on, as text with digests. A loader that continues
            inside the epoch in another order raises a DataError. Empty where it is unknown; two
            positions are equal whatever it is.
    """

    epoch: int = 0
    index: int = 0
    samples: int = 0
    updates: int = 0
    micro: int = 0
    is_last: bool = False
    order: str = attrs.field(default="", eq=False, repr=False)

    @property
    def update(self) -> int:
        """The number of the update of which the batch is part, from 0 as in `range`.

        Example:
            >>> import fxtrain as fx, torch
            >>> from torch.utils.data import DataLoader
            >>> with fx.detect(env={}, device="cpu") as ctx:
            ...     loader = fx.shard(DataLoader(torch.ones(5)), ctx, fx.Plan(accumulate=2))
            ...     [batch.position.update for batch in loader]
            [0, 0, 1, 1, 2]
        """
        return self.updates if self.micro else max(self.updates - 1, 0)


def position_words(position: Position) -> str:
    """A cursor in words, for what records print.

    Example:
        >>> from fxtrain.state.position import Position, position_words
        >>> position_words(Position(epoch=1, index=8, samples=24, updates=3, is_last=True))
        'epoch 1, index 8, update 3, end of the epoch'
    """
    end = ", end of the epoch" if position.is_last else ""
    return f"epoch {position.epoch}, index {position.index}, update {position.updates}{end}"
