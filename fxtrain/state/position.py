"""The position of a run in its data."""

import attrs

__all__ = ["Position"]


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
        updates: Optimizer updates due so far.
        micro: Micro-batches in the open accumulation window; 0 if the batch closed its window,
            so that an update is due.
        is_last: Whether the batch was the last of its epoch.
    """

    epoch: int = 0
    index: int = 0
    samples: int = 0
    updates: int = 0
    micro: int = 0
    is_last: bool = False
