"""How far a loop got in each epoch."""

import attrs

from fxtrain.data.windows import Cursor, to_epoch
from fxtrain.state import Batch, Position


@attrs.define(eq=False)
class Iteration:
    """How far iteration got: mutable, as an iterator is.

    Attributes:
        start: The cursor of the first batch; for a later epoch, only its number counts.
        before: The iteration of the epoch before, which decides where a later epoch starts;
            None once this one has begun.
        passes: Passes that got further than one batch.
        reached: The position after the last batch that was yielded.
        held: Rows, including padding, of the window that is open there, where known.
        batch: That batch.
    """

    start: Cursor
    before: "Iteration | None" = None
    passes: int = 0
    reached: Position | None = None
    held: int | None = 0
    batch: Batch | None = None

    def cursor(self) -> Cursor:
        """Where the epoch starts, given what has been seen of those before it."""
        if self.before is None:
            return self.start
        return to_epoch(self.before.end(), self.start.position.epoch)

    def begin(self) -> Cursor:
        """Fix where the epoch starts, whatever happens to those before it afterwards."""
        self.start, self.before = self.cursor(), None
        return self.start

    def end(self) -> Cursor:
        """Where iteration got to; for an epoch that did not run, where the one before it got to."""
        trail = self
        while trail.reached is None and trail.before is not None:
            trail = trail.before
        return trail.start if trail.reached is None else Cursor(trail.reached, trail.held)
