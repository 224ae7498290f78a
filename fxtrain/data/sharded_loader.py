"""The sharded loader that users hold."""

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fxtrain import _tree
from fxtrain._arguments import known_arguments
from fxtrain._errors import DataError
from fxtrain._other_names import call_hint
from fxtrain.data.already_sharded import presharded_source
from fxtrain.data.dispatch import dispatch_source
from fxtrain.data.iterations import Iteration
from fxtrain.data.rank_slices import Layout
from fxtrain.data.sequence_slices import make_splitter
from fxtrain.data.sources import RowSlots, Source, row_source, stream_source
from fxtrain.data.to_device import on_device, valid_mask
from fxtrain.data.user_loader import read_loader
from fxtrain.data.windows import Cursor, Step, to_epoch
from fxtrain.ops.plan_agreement import check_same_plan, plan_for
from fxtrain.state import Batch, DistContext, Plan, Position, check_connected

__all__ = ["Sharded", "every_row", "shard"]


class _NoLengthError(DataError, TypeError):
    """`list(loader)` asks for a length first, and does without one after a TypeError."""


@attrs.frozen(kw_only=True, eq=False)
class Sharded:
    """A loader that yields this rank's part of every global batch; see `shard`.

    Equality and hash are by identity, since the loader inside is torch's.

    Attributes:
        ctx: The ranks that share the data.
        plan: The plan that it follows.
    """

    ctx: DistContext = attrs.field(repr=False)
    plan: Plan = attrs.field(repr=False)
    _source: Source = attrs.field(repr=False, alias="source")
    _layout: Layout = attrs.field(repr=False, alias="layout")
    _loader: DataLoader[Any] = attrs.field(repr=False, alias="loader")
    _split: Callable[[Any], Any] | None = attrs.field(default=None, repr=False, alias="cut")
    _trail: Iteration = attrs.field(factory=lambda: Iteration(Cursor(Position())), alias="trail")

    @property
    def dataset(self) -> Any:
        """The dataset of the loader that was sharded."""
        return self._loader.dataset

    @property
    def batch_size(self) -> int | None:
        """Rows on this rank in a full batch; None if a batch sampler or the data decides."""
        return self._layout.per_rank if self._layout.unit == "row" else None

    @property
    def number(self) -> int:
        """The number of this epoch, from 0."""
        return self.position.epoch

    @property
    def batch(self) -> Batch:
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
        if self._trail.batch is None:
            raise DataError("batch: this loader has yielded no batch yet. Iterate it first.")
        return self._trail.batch

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
        _check_epochs("total_updates", n)
        length = self._source.length()
        if length is None:
            raise _NoLengthError(
                "total_updates: this loader has no length, because its dataset or sampler has none "
                "or its ranks see only their own rows. Count updates by batch.position.updates."
            )
        batches, every = self._layout.count(length), self.plan.accumulate
        return n * -(-batches // every) if self.plan.flush else n * batches // every

    @property
    def position(self) -> Position:
        """The cursor at which iteration starts.

        For an epoch that has not begun, `samples` and `updates` count what has been seen so far.
        """
        return self._trail.cursor().position

    def epochs(self, n: int) -> Iterator["Sharded"]:
        """One loader per epoch: the rest of this one, then the others up to epoch n.

        A loop that leaves an epoch early (`break`), or skips it, continues with the next one;
        `samples` and `updates` count only the rows seen. An accumulation window that `break`
        leaves open continues with the first batches of the next epoch.

        Args:
            n: Epochs of the whole run, including those before a restart.

        Example:
            >>> import fxtrain as fx, torch
            >>> from torch.utils.data import DataLoader
            >>> with fx.detect(env={}, device="cpu") as ctx:
            ...     loader = fx.shard(DataLoader(torch.arange(4), batch_size=2), ctx)
            ...     [batch.position.updates for epoch in loader.epochs(2) for batch in epoch]
            [1, 2, 3, 4]
        """
        _check_epochs("epochs", n)
        return self._epochs(n)

    def _epochs(self, n: int) -> Iterator["Sharded"]:
        cursor, trail = self._trail.cursor(), None
        if self._is_over():
            cursor = to_epoch(cursor, cursor.position.epoch + 1)
        for number in range(cursor.position.epoch, n):
            trail = Iteration(to_epoch(cursor, number) if trail else cursor, trail)
            yield attrs.evolve(self, trail=trail)

    def at(self, position: Position) -> "Sharded":
        """The same loader from a cursor on; the cursor may come from another world size.

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
        # A position does not record what a window contains that was opened elsewhere.
        held = 0 if position.micro == 0 else None
        return attrs.evolve(self, trail=Iteration(Cursor(position, held)))

    if not TYPE_CHECKING:  # for a type checker, every name would exist

        def __getattr__(self, name: str) -> NoReturn:
            hint = "" if name.startswith("_") else call_hint(name)
            raise AttributeError(f"A sharded loader has no attribute {name!r}.{hint}")

    def __len__(self) -> int:
        """Batches left in this epoch, the same on every rank."""
        try:
            left = self._left()
        except DataError as error:  # iterating raises it on every rank
            raise _NoLengthError(str(error)) from error
        if left is None:
            raise _NoLengthError(
                "len: this loader has no length, because its dataset or sampler has none or "
                "its ranks see only their own rows. Count batches while iterating."
            )
        return 0 if self.position.is_last else self._layout.count(left)

    def __iter__(self) -> Iterator[Batch]:
        if self._trail.passes == 1 and self._source.shuffled():
            warnings.warn(
                f"This is a second pass over epoch {self.position.epoch}, in the same shuffled "
                f"order. Use `for epoch in loader.epochs(n): for batch in epoch:`.",
                stacklevel=2,
            )
        return self._batches()

    def _batches(self) -> Iterator[Batch]:
        check_connected("iterating", self.ctx)
        if self.position.is_last:
            return
        self._agree()
        cursor = self._trail.begin()
        masks: dict[tuple[int, int], Tensor] = {}
        loaded, split, seen = self._source.run(cursor), self._split, 0
        if split is not None:
            loaded = ((step, (split(found[0]),)) for step, found in loaded)
        for step, found in on_device(loaded, self.ctx, self.plan, ahead=self._source.apart):
            batch = self._batch(step, found[0], masks)
            self._trail.reached = cursor = cursor.after(step)
            self._trail.batch = batch
            seen += 1
            if seen == 2:  # looking at the first batch only is not a pass
                self._trail.passes += 1
            yield batch
        if seen == 1:
            self._trail.passes += 1

    def _batch(self, step: Step, data: Any, masks: dict[tuple[int, int], Tensor]) -> Batch:
        slot, rank = step.slot, self.ctx.rank
        # A rank without a row gets placeholders of size 0, so that it can take part.
        size = slot.sizes[rank] or _tree.row_count(data) or self._layout.per_rank
        shape = size, slot.rows[rank]
        valid = masks.get(shape)
        if valid is None:
            valid = masks[shape] = valid_mask(*shape, self.ctx, self.plan)
        return Batch(
            data=data,
            position=step.position,
            valid=valid,
            rows=slot.rows,
            sizes=slot.sizes,
            window_rows=step.window_rows,
            plan=self.plan,
        )

    def _left(self) -> int | None:
        """Units from here to the end of the epoch; None if only reading tells."""
        length = self._source.length()
        return None if length is None else length - self.position.index

    def _is_over(self) -> bool:
        """Whether nothing remains of the epoch."""
        if self.position.is_last or self.position.index == 0:
            return self.position.is_last
        left = self._left()
        return left is not None and self._layout.count(left) == 0

    def _agree(self) -> None:
        """Check, before the first batch, that all ranks are about to read the same."""
        if self.plan.data.source == "shard" and self.ctx.world_size > 1:
            problem = None
            try:
                rows: Any = self._source.length()
            except DataError as error:  # raised below, together with the other ranks
                rows, problem = f"unknown ({error})", error
            asked = {"rows": rows, "layout": self._layout, "position": self.position}
            check_same_plan("iterating", self.ctx, self.plan, asked)
            if problem is not None:
                raise problem


def _check_epochs(call: str, n: Any) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise DataError(f"{call}({n!r}): pass the number of epochs of the run, 0 or more.")


@known_arguments(DataError)
def shard(loader: DataLoader[Any], ctx: DistContext, plan: Plan | None = None) -> Sharded:
    """Split a loader over the ranks.

    Order, rows and cursor do not depend on the world size: global batch k of W ranks contains
    the next W · batch size rows of the epoch's order, and rank r gets its r-th part. The order is
    a function of the plan's seed and the epoch; a `generator` of the loader is not used.

    Args:
        loader: Any torch DataLoader: map-style or iterable, with any sampler or batch sampler.
            Workers, collate function, pinning and all other settings are kept;
            `drop_last=True` acts as `even="drop"`.
        ctx: The ranks; data is split over `ctx.axis("data")`, and sequences over the context
            axis where the plan says so.
        plan: `batch`, `even`, `seed`, `accumulate`, `flush`, `data` and `context` are used; by
            default the plan of the launch, or else `fx.Plan()`.

    Effects:
        None here, except one broadcast with `Data(source="dispatch")`. Iterating starts the
        loader's workers and, once per epoch, compares the plans and what the ranks are about to
        read; dispatched and already sharded data exchange one message per global batch.

    Raises:
        DataError: the loader, or its batch size, cannot be split as requested; on every rank.
            While iterating: a sequence not divisible by the context ranks, on all of those.
        PlanError: the ranks pass different plans; on every rank, when iterating starts or, with
            `Data(source="dispatch")`, here.
        CollectiveError: the ranks differ in rows, layout or position; likewise.

    Example:
        >>> import fxtrain as fx, torch
        >>> from torch.utils.data import DataLoader
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     for batch in fx.shard(DataLoader(torch.arange(3), batch_size=2), ctx):
        ...         batch.data.tolist(), batch.position.index
        ([0, 1], 2)
        ([2], 3)
    """
    _check_types(loader, ctx, plan)
    return _shard(loader, ctx, plan_for("shard", ctx, plan))


def every_row(loader: Sharded | DataLoader[Any], ctx: DistContext, plan: Plan) -> Sharded:
    """A loader that yields every row of the data once, without padding: for metrics.

    A rank without a row in a global batch gets a stand-in of size 0, as under `even="uneven"`.

    Args:
        loader: A sharded loader, whose own plan and position count, or a torch DataLoader.
        plan: For a torch DataLoader.

    Raises:
        DataError: the loader cannot be split, or it drops the last batch.
    """
    sharded = isinstance(loader, Sharded)
    given, plan = (loader._loader, loader.plan) if sharded else (loader, plan)
    _check_types(given, ctx, plan)
    found = _shard(given, ctx, attrs.evolve(plan, even="uneven"))
    if found._layout.even == "drop":
        raise DataError(
            "evaluate: a metric is computed over every row of the data, and this loader leaves "
            "rows out (drop_last=True). Use DataLoader(..., drop_last=False)."
        )
    return found.at(loader.position) if sharded else found


def _shard(loader: DataLoader[Any], ctx: DistContext, plan: Plan) -> Sharded:
    data = ctx.axis("data")
    everyone = range(data.world_size)
    if plan.data.source == "dispatch" and data.world_size > 1:
        source, layout = dispatch_source(
            lambda: _source(loader, data.world_size, plan, everyone), data, plan
        )
    elif plan.data.source == "sharded":
        source, layout = presharded_source(loader, data, plan)
    else:
        source, layout = _source(loader, data.world_size, plan, everyone[data.rank : data.rank + 1])
    cut = make_splitter(ctx, plan)
    return Sharded(ctx=data, plan=plan, source=source, layout=layout, loader=loader, cut=cut)


def _source(
    loader: DataLoader[Any], world_size: int, plan: Plan, ranks: range
) -> tuple[Source, Layout]:
    """A loader read for some of the ranks."""
    reading = read_loader(loader, world_size, plan)
    if isinstance(loader.dataset, IterableDataset):
        return stream_source(loader, reading.layout, plan, ranks), reading.layout
    return row_source(loader, RowSlots(reading, plan.seed), plan, ranks), reading.layout


def _check_types(loader: Any, ctx: Any, plan: Any) -> None:
    if isinstance(loader, Sharded):
        raise DataError("shard: this loader is sharded already. Pass the DataLoader itself.")
    if not isinstance(loader, DataLoader):
        raise DataError(
            f"shard takes a torch DataLoader, found {type(loader).__name__}. For example: "
            f"fx.shard(DataLoader(dataset, batch_size=32, shuffle=True), ctx, plan)."
        )
    if not isinstance(ctx, DistContext):
        raise DataError(
            f"shard: ctx is a {type(ctx).__name__}, not a context from fx.detect(). The order "
            f"is fx.shard(loader, ctx, plan)."
        )
    if plan is not None and not isinstance(plan, Plan):
        raise DataError(
            f"shard: plan is a {type(plan).__name__}, not an fx.Plan. For example: "
            f"fx.shard(loader, ctx, fx.Plan(seed=7))."
        )
    check_connected("shard", ctx)
