"""Apply a function to items that ranks share out among themselves."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, overload

from fxtrain.errors import CollectiveError, DataError
from fxtrain.ops.objects import agree
from fxtrain.ops.same_errors import fail_together
from fxtrain.ops.splitting import length_of, select, split
from fxtrain.ops.transport.exchange import CallState
from fxtrain.state import DistContext
from fxtrain.state.context import check_connected

_POLL_S = 0.02
_Places = list[int]
K = TypeVar("K")
R = TypeVar("R")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _Items(Protocol[T_co]):
    """A sequence, a tensor, an array or a dataset."""

    def __getitem__(self, index: int, /) -> T_co: ...


@overload
def map(
    fn: Callable[[T], R],
    items: _Items[T],
    ctx: DistContext,
    *,
    batch: None = None,
    order: Literal["static", "dynamic"] = "static",
) -> list[R]: ...
@overload
def map(
    fn: Callable[[dict[K, Any]], R],
    items: Mapping[K, object],
    ctx: DistContext,
    *,
    batch: None = None,
    order: Literal["static", "dynamic"] = "static",
) -> list[R]: ...
@overload
def map(
    fn: Callable[[T], Sequence[R]],
    items: T,
    ctx: DistContext,
    *,
    batch: int,
    order: Literal["static", "dynamic"] = "static",
) -> list[R]: ...
def map(
    fn: Callable[[Any], Any],
    items: Any,
    ctx: DistContext,
    *,
    batch: int | None = None,
    order: Literal["static", "dynamic"] = "static",
) -> list[Any]:
    """Apply a function to every item exactly once, on any number of ranks.

    For inference: each rank has a model of its own, or calls one whose forward no other rank joins.

    Args:
        fn: Called with one item. With `batch=n`: with up to n items, in the type of `items`;
            returns one result per item. It must not call collectives of this context.
        items: What `ops.split` takes: a sequence, a tensor or array, a dataset, or a dict of these;
            the same on every rank.
        batch: Items per call; the last call of a rank may get fewer.
        order: static: each rank has consecutive items, as `ops.split` gives them; dynamic: a rank
            takes the next ones when it is done, for items that take different times.

    Returns:
        The results in the order of the items, on every rank.

    Effects:
        One exchange at the end, and one before for the arguments; with "dynamic", a request to the
        store per call of `fn`. Ranks wait for each other as long as some call of `fn` ends within
        the context's `timeout_s`.

    Raises:
        DataError: `fn` failed or returned another number of results; on every rank, with the items.
        CollectiveError: the ranks pass different arguments.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.map(lambda words: [len(word) for word in words], ["a", "bcd"], ctx, batch=8)
        [1, 3]
    """
    check_connected("map", ctx)
    count = _checked(items, batch, order)
    agree((count, batch, order), ctx, name="what to map (items, batch, order)")
    taken: dict[int, Any] = {}
    key = f"{ctx.comm.name}/map/{ctx.comm.slot(CallState).count}"
    with fail_together(ctx) as together:
        together.value = taken
        try:
            for places in _shares(count, ctx, batch or 1, order, key):
                taken.update(zip(places, _call(fn, items, places, batch, ctx), strict=True))
                _set(ctx, f"{key}/calls", 1)
        except DataError:
            _set(ctx, f"{key}/next", count)  # no rank takes another item
            _wait_for_others(ctx, key)
            raise
        _wait_for_others(ctx, key)
    results: dict[int, Any] = {}
    for part in together.values:
        results |= part
    if len(results) != count:
        raise CollectiveError(f"map: {count - len(results)} of {count} items were left out.")
    return [results[place] for place in range(count)]


def _checked(items: Any, batch: Any, order: Any) -> int:
    if batch is not None and (type(batch) is not int or batch < 1):
        raise DataError(f"map(batch={batch!r}): choose a whole number of at least 1, or None.")
    if order not in ("static", "dynamic"):
        raise DataError(f"map(order={order!r}): choose 'static' or 'dynamic'.")
    return length_of(items)


def _shares(count: int, ctx: DistContext, size: int, order: str, key: str) -> Iterator[_Places]:
    """The items of each call of the function on this rank."""
    if order == "static" or ctx.world_size == 1:
        assigned = split(range(count), ctx)
        for start in range(0, len(assigned), size):
            yield list(assigned[start : start + size])
        return
    while (start := (ctx.comm.store.add(f"{key}/next", 1) - 1) * size) < count:
        yield list(range(start, min(start + size, count)))


def _call(
    fn: Callable[[Any], Any], items: Any, places: _Places, batch: int | None, ctx: DistContext
) -> list[Any]:
    which = f"item {places[0]}" if len(places) == 1 else f"items {places[0]} to {places[-1]}"
    chosen = select(items, places)
    try:
        results = fn(chosen) if batch is not None else [fn(_only(chosen))]
        outputs = list(results)
    except Exception as error:
        text = f"map: {which} failed on rank {ctx.rank}: {type(error).__name__}: {error}"
        raise DataError(text) from error
    if len(outputs) != len(places):
        raise DataError(
            f"map: for {which}, the function returned {len(outputs)} results on rank "
            f"{ctx.rank}. With batch=..., return a list with one for each item."
        )
    return outputs


def _only(tree: Any) -> Any:
    """The one item of a share."""
    return {key: _only(entry) for key, entry in tree.items()} if isinstance(tree, dict) else tree[0]


def _set(ctx: DistContext, key: str, number: int) -> None:
    """Add to a number that all ranks see."""
    if ctx.world_size > 1:
        ctx.comm.store.add(key, number)


def _wait_for_others(ctx: DistContext, key: str) -> None:
    """Wait until all ranks are done, or none has finished a call within the context's timeout.

    The exchange that follows names a rank that is not there.
    """
    if ctx.world_size == 1:
        return
    store = ctx.comm.store
    done = store.add(f"{key}/done", 1)
    calls, since = store.add(f"{key}/calls", 0), time.monotonic()
    while done < ctx.world_size and time.monotonic() - since < ctx.comm.timeout_s:
        time.sleep(_POLL_S)
        done, now = store.add(f"{key}/done", 0), store.add(f"{key}/calls", 0)
        if now != calls:
            calls, since = now, time.monotonic()
