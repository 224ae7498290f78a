"""The sharded loader that users hold."""

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic

import attrs
from torch import Tensor
from torch.utils.data import BatchSampler

from fxtrain import _tree, ops
from fxtrain._display import Displayed, counted
from fxtrain.data.fetch import PlainStream
from fxtrain.data.order_texts import text_of_dataset
from fxtrain.data.rank_slices import Batching, Cursor, GlobalBatch, advance, to_epoch
from fxtrain.data.sources import Loaded, StepSource
from fxtrain.data.to_device import on_device, valid_mask
from fxtrain.errors import DataError
from fxtrain.ops.plan_agreement import agree_on_plan
from fxtrain.ops.transport.pickled import error_text
from fxtrain.state import Batch, DistContext, Plan, Position
from fxtrain.state.batch import Data_co
from fxtrain.state.context import check_connected
from fxtrain.state.position import position_words

_NO_BATCH = (
    "Pass a dataset with rows; with drop_last=True or even='drop', at least as many as one batch "
    "of all ranks."
)


_START = Cursor(Position())  # of a run


@attrs.define(eq=False)
class Reached:
    """The batch that a loader or one of its epochs yielded last: mutable, as an iterator is."""

    # Just after it, with the state of the stream or blend on this rank; or where a loader
    # starts that has yielded none.
    cursor: Cursor = _START
    batch: Batch | None = None  # that batch


@attrs.define(eq=False)
class Iteration:
    """How far iteration over an epoch got: mutable, as an iterator is."""

    number: int = 0  # the epoch
    start: Cursor | None = None  # where it starts; None until it begins, after those before it
    # What the epochs of the same call have reached, which share it.
    run: Reached = attrs.field(factory=Reached)
    passes: int = 0  # passes that got further than one batch

    def cursor(self) -> Cursor:
        """Where the epoch starts, given what has been seen of those before it."""
        before = self.run.cursor.position
        return Cursor(to_epoch(before, self.number)) if self.start is None else self.start


_SPLIT = (
    "Each rank passes the whole data, in one order, of which fx.shard gives it a part. Pass the "
    "loader before it was split by rank, and seed what shuffles equally on all ranks; or keep it "
    'and set fx.Plan(data=fx.Data(source="sharded")).'
)
# What to do if the ranks differ in one of these.
_CURES = {"failure": "A rank could not read its first batch.", "rows": _SPLIT, "order": _SPLIT}
_CURES |= {"data": _SPLIT}


class _NoLengthError(DataError, TypeError):
    """`list(loader)` asks for a length first, and does without one after a TypeError."""


def _no_length(call: str, instead: str) -> _NoLengthError:
    return _NoLengthError(
        f"{call}: this loader has no length, because its dataset or sampler has none or its ranks "
        f"see only their own rows. {instead}"
    )


class _Epochs(Iterator["Sharded[Data_co]"]):
    """The epochs of a loader, one after the other; prints which."""

    def __init__(self, epochs: Iterator["Sharded[Data_co]"], text: str) -> None:
        self._epochs, self._text = epochs, text

    def __next__(self) -> "Sharded[Data_co]":
        return next(self._epochs)

    def __repr__(self) -> str:
        return self._text


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Sharded(Displayed, Generic[Data_co]):
    """A loader that yields this rank's part of every global batch; see `shard`.

    A handle: its settings stay, and iterating it changes where it stands (`position`, `batch`).

    Attributes:
        ctx: The ranks that share the data.
        plan: The plan that it follows.
    """

    ctx: DistContext
    plan: Plan
    _source: StepSource = attrs.field(alias="source", repr=False)
    _batching: Batching = attrs.field(alias="batching")
    _loader: Any = attrs.field(alias="loader", repr=False)
    _split: Callable[[Any], Any] | None = attrs.field(default=None, alias="cut", repr=False)
    _trail: Iteration = attrs.field(
        factory=partial(Iteration, start=_START), alias="trail", repr=False
    )
    _run_updates: int | None = attrs.field(default=None, alias="run_updates")
    _reached: Reached = attrs.field(factory=Reached, alias="reached", repr=False)
    _alone: bool = attrs.field(default=False, alias="alone")  # its ranks are in no group

    def __repr__(self) -> str:
        left = self._left()
        batches = "unknown length" if left is None else f"{counted(left, 'batch')} left"
        size = "" if self.batch_size is None else f" of {counted(self.batch_size, 'row')} per rank"
        ctx, where = self.ctx, position_words(self.position)
        return (
            f"Sharded({type(self.dataset).__name__}, {batches}{size}, {where}, "
            f"rank {ctx.rank} of {ctx.world_size} on {ctx.device})"
        )

    @property
    def dataset(self) -> Any:
        """The dataset of the loader that was sharded, or the data that were passed without one."""
        dataset = self._loader.dataset
        return dataset.rows if isinstance(dataset, PlainStream) else dataset

    @property
    def batch_size(self) -> int | None:
        """Rows on this rank in a full batch; None if a batch sampler or the data decides."""
        return self._batching.per_rank if self._batching.unit == "row" else None

    @property
    def number(self) -> int:
        """The number of this epoch, from 0."""
        return self.position.epoch

    @property
    def batch(self) -> Batch[Data_co]:
        """The batch that iteration yielded last, for a loop that unpacks it.

        Raises:
            DataError: there was none yet.

        Example:
            >>> import fxtrain as fx, torch
            >>> from torch.utils.data import DataLoader, TensorDataset
            >>> table = TensorDataset(torch.arange(4), torch.ones(4))
            >>> with fx.detect(env={}, device="cpu") as ctx:
            ...     loader = fx.shard(DataLoader(table, batch_size=2), ctx)
            ...     for inputs, targets in loader:
            ...         inputs.tolist(), loader.batch.position.samples
            ([0, 1], 2)
            ([2, 3], 4)
        """
        if self._reached.batch is None:
            raise DataError("batch: this loader has yielded no batch yet. Iterate it first.")
        return self._reached.batch

    def total_updates(self, n: int) -> int:
        """Optimizer updates in n whole epochs of the run, for schedulers and progress bars.

        Raises:
            DataError: the loader has no length.

        Example:
            >>> import fxtrain as fx, torch
            >>> from torch.utils.data import DataLoader
            >>> with fx.detect(env={}, device="cpu") as ctx:
            ...     plan = fx.Plan(accumulate=2)
            ...     fx.shard(DataLoader(torch.arange(5)), ctx, plan).total_updates(3)
            9
        """
        _check_count("total_updates", n, "epochs")
        updates = self._total_updates(n)
        if updates is None:
            raise _no_length("total_updates", "Count updates by batch.position.updates.")
        return updates

    def _total_updates(self, n: int) -> int | None:
        length = self._source.length(0)
        if length is None:
            return None
        batches, every = self._batching.count(length), self.plan.accumulate
        return n * -(-batches // every) if self.plan.flush else n * batches // every

    @property
    def position(self) -> Position:
        """The cursor at which iteration starts.

        For an epoch that has not begun, `samples` and `updates` count what has been seen so far.
        """
        return self._trail.cursor().position

    def epochs(self, n: int) -> Iterator["Sharded[Data_co]"]:
        """One loader per epoch: the rest of this one, then the others up to epoch n.

        A loop that leaves an epoch early (`break`), or skips it, continues with the next one;
        `samples` and `updates` count only the rows seen. An accumulation window that `break`
        leaves open continues with the first batches of the next epoch.

        Args:
            n: Epochs of the whole run, including those before a restart.

        Raises:
            DataError: an epoch has no end, as with a function of a position and most blends.

        Example:
            >>> import fxtrain as fx, torch
            >>> from torch.utils.data import DataLoader
            >>> with fx.detect(env={}, device="cpu") as ctx:
            ...     loader = fx.shard(DataLoader(torch.arange(4), batch_size=2), ctx)
            ...     [batch.position.updates for epoch in loader.epochs(2) for batch in epoch]
            [1, 2, 3, 4]
        """
        _check_count("epochs", n, "epochs")
        if self._source.endless:
            raise DataError(
                f"epochs({n}): an epoch of this loader has no end. Use loader.updates(n), or "
                f"fit(..., updates=n) without epochs; a blend also has Blend(ends='stop')."
            )
        return _Epochs(self._of_run(self._total_updates(n))._epochs(n), f"epochs({n}) of {self!r}")

    def _of_run(self, updates: int | None) -> "Sharded[Data_co]":
        """The same loader, whose batches say how long the run is."""
        known = self._run_updates is not None
        return self if known else attrs.evolve(self, run_updates=updates)

    def _epochs(self, n: int) -> Iterator["Sharded[Data_co]"]:
        cursor = self._trail.cursor()
        if cursor.position.is_last or (cursor.position.index and self._left() == 0):
            cursor = Cursor(to_epoch(cursor.position, cursor.position.epoch + 1))
        run, first = Reached(cursor), cursor.position.epoch
        for number in range(first, n):
            start = cursor if number == first else None
            yield attrs.evolve(self, trail=Iteration(number, start, run))

    def updates(self, n: int, *, epochs: int | None = None) -> Iterator[Batch[Data_co]]:
        """The batches until update n of the run, over as many epochs as that takes.

        Each epoch has its own order, as in `epochs`. The last batch closes its accumulation window,
        also under `flush=False`. Where n updates have been made, there is no batch, so a script
        that is started again ends at the same update.

        Args:
            n: Updates of the whole run, including those before a restart, counted by
                `position.updates`.
            epochs: Epochs of the whole run; iteration ends after them if that comes first.

        Raises:
            DataError: an epoch has no batch; while iterating.

        Example:
            >>> import fxtrain as fx, torch
            >>> from torch.utils.data import DataLoader
            >>> with fx.detect(env={}, device="cpu") as ctx:
            ...     loader = fx.shard(DataLoader(torch.arange(4), batch_size=2), ctx)
            ...     first = [batch.position for batch in loader.updates(3)][-1]
            ...     [batch.position.updates for batch in loader.at(first).updates(5)]
            [4, 5]
        """
        _check_count("updates", n, "updates")
        if epochs is not None:
            _check_count("updates", epochs, "epochs", name="epochs=")
        total = None if epochs is None else self._total_updates(epochs)
        last = n if total is None else min(n, total)
        known = None if last == sys.maxsize else last
        return self._of_run(known)._updates(n, sys.maxsize if epochs is None else epochs)

    def _updates(self, n: int, epochs: int) -> Iterator[Batch[Data_co]]:
        if self.position.updates >= n:
            return
        for epoch in self._epochs(epochs):
            batch, whole = None, not epoch.position.index
            for batch in epoch:
                yield batch
                if batch.position.updates >= n and not batch.position.micro:
                    return
            if batch is None and whole:
                raise DataError(
                    f"Epoch {epoch.number} has no batch, so the run would never end. {_NO_BATCH}"
                )

    def at(self, position: Position, state: object = None) -> "Sharded[Data_co]":
        """The same loader from a cursor on; the cursor may come from another world size.

        Args:
            position: Of a batch, a report or a checkpoint.
            state: What `loader.state()` returned at that position: a stream then continues there,
                and without it is read from the start of the epoch.

        Raises:
            DataError: the state is of another position, or, for `Data(source="sharded")`, of
                another world size.

        Example:
            >>> import fxtrain as fx, torch
            >>> from torch.utils.data import DataLoader
            >>> with fx.detect(env={}, device="cpu") as ctx:
            ...     loader = fx.shard(DataLoader(torch.arange(4), batch_size=2), ctx)
            ...     first = next(iter(loader))
            ...     [batch.data.tolist() for batch in loader.at(first.position)]
            [[2, 3]]
        """
        if not isinstance(position, Position):
            raise DataError(
                f"at({position!r}) takes a Position, found {type(position).__name__}. "
                f"Use batch.position or report.position."
            )
        fresh = attrs.evolve(self, reached=Reached(Cursor(position)))
        return continued(fresh, position, state)

    def skip(self, n: int) -> "Sharded[Data_co]":
        """The same loader without its next n batches, which end with its epoch.

        For a run whose position is unknown, such as one of other code that has stored an epoch and
        a number of batches: `loader.at(fx.Position(epoch=3)).skip(120)`. A checkpoint of fxtrain
        has the position, for `at`.

        Args:
            n: Global batches to skip; an epoch with fewer is skipped to its end.

        Effects:
            None for rows of a dataset with a length, and for a function of a position. Streams,
            batches of a batch sampler or that are ready, and already sharded data are read up to
            there, which is the only way to count their rows.

        Raises:
            DataError: n is not a number of batches.

        Example:
            >>> import fxtrain as fx, torch
            >>> from torch.utils.data import DataLoader
            >>> with fx.detect(env={}, device="cpu") as ctx:
            ...     loader = fx.shard(DataLoader(torch.arange(4)), ctx)
            ...     [batch.data.tolist() for batch in loader.skip(2)]
            [[2], [3]]
        """
        if type(n) is not int or n < 0:
            raise DataError(f"skip({n!r}): pass a number of batches, 0 or more.")
        cursor, stride, source = self._trail.cursor(), self._batching.stride, self._source
        position = cursor.position
        left, length = self._left(), source.length(position.epoch)
        of_rows = self._batching.unit == "row" and self.plan.data.source != "sharded"
        if of_rows and (source.endless or length is not None):
            for number in range(1, (n if left is None else min(n, left)) + 1):
                rows = stride if length is None else min(stride, length - position.index)
                batch = GlobalBatch(position.index, rows, (rows,), (rows,), ())
                position = advance(position, batch, self.plan, is_last=number == left)
            return self.at(position)
        trail = Iteration(position.epoch, cursor)
        ahead = attrs.evolve(self, trail=trail, reached=Reached(cursor))
        for batch in itertools.islice(ahead, n):
            position = batch.position
        return self.at(position, ahead.state())

    def state(self) -> dict[str, object] | None:
        """State of the data at the batch that iteration yielded last, for `loader.at`.

        Save it beside the position: `fx.save(..., position=batch.position,
        extra={"data": loader.state()})`; `fx.fit` does. Streams that have the state protocol
        (`state_dict` and `load_state_dict`, of the dataset or of its iterator) continue from it at
        once. It is None where the position is enough or a stream keeps no state.

        Effects:
            With `Data(source="dispatch")` or `"sharded"`, one exchange of objects for a stream.

        Example:
            >>> import fxtrain as fx, torch
            >>> from torch.utils.data import DataLoader
            >>> with fx.detect(env={}, device="cpu") as ctx:
            ...     loader = fx.shard(DataLoader(torch.arange(4), batch_size=2), ctx)
            ...     loader.state() is None
            True
        """
        if not self._source.stateful:
            return None
        position, state = self._reached.cursor
        states = [state]
        if self.plan.data.source == "sharded":
            states = ops.gather_objects(state, self.ctx)
        elif self.plan.data.source == "dispatch":
            states = [ops.broadcast_object(state, self.ctx)]
        if any(state is None for state in states):
            return None
        return {"epoch": position.epoch, "index": position.index, "states": states}

    def _stream_state(self, position: Position, state: Any) -> Any:
        """The state of this rank's stream at a position; None to read it from its start."""
        if state is None or position.is_last or not position.index:
            return None
        of = (state["epoch"], state["index"])
        if of != (position.epoch, position.index):
            raise DataError(
                f"at: the state is of epoch {of[0]}, index {of[1]}, and the position of epoch "
                f"{position.epoch}, index {position.index}. Save loader.state() with the position "
                f"of the batch that the loop has reached.",
                code="FX401",
            )
        states = state["states"]
        if self.plan.data.source != "sharded":
            return states[0]
        if len(states) != self.ctx.world_size:
            raise DataError(
                f'at: the state is of {len(states)} ranks under Data(source="sharded"), and this '
                f"context has {self.ctx.world_size} that read data. Resume with as many, or from "
                f"the start of an epoch.",
                code="FX401",
            )
        return states[self.ctx.rank]

    def __len__(self) -> int:
        """Batches left in this epoch, the same on every rank."""
        left = self._left()
        if left is None:
            raise _no_length("len", "Count batches while iterating.")
        return left

    def __iter__(self) -> Iterator[Batch[Data_co]]:
        if self._trail.passes == 1 and self._source.shuffled():
            warnings.warn(
                f"This is a second pass over epoch {self.position.epoch}, in the same shuffled "
                f"order. Use `for epoch in loader.epochs(n): for batch in epoch:`.",
                stacklevel=2,
            )
        return self._batches()

    def _batches(self) -> Iterator[Batch[Data_co]]:
        check_connected("iterating", self.ctx)
        if self.position.is_last:
            return
        trail, reached, plan, rank = self._trail, self._reached, self.plan, self.ctx.rank
        cursor = trail.start = trail.cursor()
        masks: dict[tuple[int, int], Tensor] = {}
        if cursor.position.index and cursor.state is None and self._source.reread_reason:
            ops.log(self.ctx).warning(
                "The stream %s is read again from the start of epoch %d to row %d, since %s.",
                *(type(self.dataset).__name__, cursor.position.epoch, cursor.position.index),
                self._source.reread_reason,
            )
        loaded, split, seen = self._begun(cursor), self._split, 0
        if split is not None:
            loaded = ((step, (split(shards[0]),)) for step, shards in loaded)
        for (shared, after), shards in on_device(loaded, self.ctx, plan, ahead=self._source.apart):
            data = shards[0]
            # A rank without a row gets placeholders of size 0, so that it can take part.
            size = shared.sizes[rank] or _tree.row_count(data) or self._batching.per_rank
            shape = size, shared.rows[rank]
            if shape not in masks:
                masks[shape] = valid_mask(*shape, self.ctx, plan)
            seen += 1
            if seen == 2:  # looking at the first batch only is not a pass
                trail.passes += 1
            batch = Batch(
                data=data,
                position=after.position,
                valid=masks[shape],
                rows=shared.rows,
                sizes=shared.sizes,
                plan=plan,
                run_updates=self._run_updates,
            )
            reached.batch, reached.cursor, trail.run.cursor = batch, after, after
            yield batch
        if seen == 1:
            trail.passes += 1
        if not seen and cursor.position == Position():  # once, not for each epoch
            ops.log(self.ctx).warning("Epoch 0 has no batch. %s", _NO_BATCH)

    def _left(self) -> int | None:
        """Batches from here to the end of the epoch; None if only reading them shows."""
        position = self.position
        length = self._source.length(position.epoch)
        if length is None:
            return None
        return 0 if position.is_last else self._batching.count(length - position.index)

    def _sampler_name(self) -> str:
        """The type of the sampler that orders the units; NoneType where there is none."""
        sampler = getattr(self._loader, "batch_sampler", None)
        if sampler is None or type(sampler) is BatchSampler:
            inner = self._loader if sampler is None else sampler
            sampler = getattr(inner, "sampler", None)
        return type(sampler).__name__

    def _begun(self, cursor: Cursor) -> Iterator[Loaded]:
        """The steps of an epoch from a cursor on, once all ranks have read the first of them.

        Raises:
            CollectiveError: the ranks read different data, or another rank cannot read its own.
            Exception: whatever this rank's loader raised.
        """
        steps, first, problem = self._source.run(cursor), None, None
        if self.plan.data.source != "shard" or self.ctx.world_size == 1 or self._alone:
            return steps
        asked: dict[str, Any] = dict.fromkeys(("failure", "rows", "order", "data"), "unknown")
        try:
            asked["rows"] = self._source.length(cursor.position.epoch)
            asked["data"] = text_of_dataset(self._loader.dataset)
            first = next(steps, None)
            asked["order"] = "no rows" if first is None else first[0][1].position.order
            asked["failure"] = "none"
        except Exception as error:
            asked["failure"], problem = error_text(error), error
        asked |= {"batching": self._batching, "sampler": self._sampler_name()}
        asked["position"] = cursor.position
        try:
            agree_on_plan("iterating", self.ctx, self.plan, asked, cures=_CURES)
        finally:
            if problem is not None:
                raise problem
        return steps if first is None else itertools.chain([first], steps)


def continued(
    loader: Sharded[Data_co], position: Position, state: object = None
) -> Sharded[Data_co]:
    """As `loader.at`, whose `batch` and `state()` are those of the loader too."""
    cursor = Cursor(position, loader._stream_state(position, state))
    loader._reached.cursor = cursor
    return attrs.evolve(loader, trail=Iteration(position.epoch, cursor))


def _check_count(call: str, n: Any, unit: str, *, name: str = "") -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise DataError(f"{call}({name}{n!r}): pass the number of {unit} of the run, 0 or more.")
