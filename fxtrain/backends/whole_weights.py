"""Full weights of a model during training: one by one, or all at once in its module."""

import fnmatch
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxtrain import ops
from fxtrain.backends.core.module_changes import unknown_patterns
from fxtrain.errors import CollectiveError, FxError, PlanError
from fxtrain.ops.same_errors import fail_together
from fxtrain.ops.whole_tensors import plain_name
from fxtrain.state import DistContext, Weight, Wrapped
from fxtrain.state.wrapped import check_open

N = TypeVar("N", bound=nn.Module)
_Ranks = Literal["all", "main"]
_STAYS, _LEAVES = "takes the next tensor", "has left its loop"
_TOGETHER = 64 << 20  # bytes of small tensors that ranks gather after one exchange


def weights(
    model: Wrapped,
    *,
    names: Iterable[str] | None = None,
    device: str | torch.device | None = None,
    ranks: _Ranks = "all",
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over a model's full weights, one at a time, under every strategy.

    They are the tensors of the state dict of the user's module, with its names, order and
    original dtypes; a tied weight is yielded under each of its names. Under DeepSpeed they are
    the full-precision masters. Every rank gets the same values: where replicas differ (buffers, and
    everything under `Plan.local`), those of the first replica.

    All ranks must iterate up to the same tensor. Tensors are gathered ahead, up to 64 MiB at a
    time, and a loop that one rank leaves is detected there. The model is not changed, and an
    accumulation window may be open.

    Args:
        model: From `fx.wrap`.
        names: Names, or patterns such as `"*.norm.weight"`; by default all.
        device: Where to put the tensors; by default the model's device.
        ranks: Which ranks get them. With "main", the loop's body runs on rank 0 only, and the
            other ranks only take part in the gathering.

    Yields:
        A name and a new tensor, which the caller may keep or change.

    Effects:
        Memory for two full tensors, or 64 MiB of smaller ones, in addition to what the caller
        keeps. Traffic: FSDP and TP all-gather each tensor, a pipeline broadcasts it from the stage
        that holds it, ZeRO 1 to 3 send each parameter once, and replicas only send buffers. Between
        ranks, one exchange of packets at the start, and one per 64 MiB.

    Raises:
        PlanError: a name or pattern matches no tensor, or the model was unwrapped.
        CollectiveError: the ranks request different tensors, or another rank left its loop earlier
            than this one.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        ...     {name: list(tensor.shape) for name, tensor in fx.weights(model, device="cpu")}
        {'weight': [1, 2], 'bias': [1]}
    """
    _check(model, ranks, "weights")
    wanted = None if names is None else [names] if isinstance(names, str) else list(names)
    ops.agree((wanted, ranks), model.ctx, name="what to gather (names, ranks)")
    stored = {
        name: weight for name, weight in model.strategy.weights(model).items() if weight.stored
    }
    chosen = _chosen(stored, wanted)
    where = model.ctx.device if device is None else torch.device(device)
    return _one_by_one(model, chosen, where, ranks)


@overload
def gathered(model: Wrapped[N], *, ranks: Literal["all"] = "all") -> AbstractContextManager[N]: ...
@overload
def gathered(model: Wrapped[N], *, ranks: Literal["main"]) -> AbstractContextManager[N | None]: ...
@contextmanager
def gathered(model: Wrapped[Any], *, ranks: _Ranks = "all") -> Iterator[Any]:
    """Lend the user's module with full, plain weights: for `generate` or `save_pretrained`.

    Inside the block the module is as it was before wrapping, without the strategy's hooks, and its
    weights are copies, as `fx.weights` yields them. Changes that the block makes to weights,
    buffers, modes (`eval`), submodules or attributes of the module, lists and dicts among them, are
    dropped at its end: module, shards and gradients are then bitwise as before, optimizers are
    untouched, and an open accumulation window is still open. An average of weights may be loaded
    into the module for an evaluation.

    Args:
        model: From `fx.wrap`. Inside the block, calling or training it is an error.
        ranks: Which ranks get the module. With "main", the others get None, and wait at the end of
            the block for rank 0, at most for the context's timeout.

    Yields:
        The module that was passed to `fx.wrap`; None on the other ranks with `ranks="main"`.

    Effects:
        Memory for the full model on each rank that gets it, in addition to training's, also in a
        pipeline, whose ranks otherwise hold only their stages. Traffic as of `fx.weights`, without
        its exchanges, and one exchange at the end of the block.

    Raises:
        PlanError: the model was unwrapped, or is already gathered.
        Exception: the block failed on a rank; on every rank, as in `fx.ops.fail_together`.

    Example:
        >>> import fxtrain as fx, torch
        >>> net = torch.nn.Linear(2, 1)
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(net, ctx)
        ...     with fx.gathered(model) as whole, torch.no_grad():
        ...         whole is net, whole(torch.ones(3, 2)).shape
        (True, torch.Size([3, 1]))
    """
    _check(model, ranks, "gathered")
    ops.agree(ranks, model.ctx, name="ranks that get the module")
    keep = ranks == "all" or model.ctx.is_main
    whole = _collect(model, keep=keep)
    with fail_together(model.ctx), _install_weights(model, whole):
        del whole  # its memory is free when the block ends
        yield model.module if keep else None


def _check(model: Any, ranks: Any, call: str) -> None:
    if not isinstance(model, Wrapped):
        raise PlanError(
            f"{call} takes a model from fx.wrap, found {type(model).__name__}. A module that is "
            f"not wrapped has its weights in module.state_dict()."
        )
    check_open(model, call, PlanError)
    if ranks not in ("all", "main"):
        raise PlanError(f"{call}(ranks={ranks!r}): choose 'all' or 'main'.")


def _chosen(every: dict[str, Weight], patterns: list[str] | None) -> dict[str, Weight]:
    if patterns is not None:
        if problems := unknown_patterns(
            patterns, list(every), field="weights(names=...)", what="tensor"
        ):
            raise PlanError("\n".join(problems))
        every = {
            name: weight
            for name, weight in every.items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        }
    for name, weight in every.items():
        _check_values(name, weight)
    return {name: weight for name, weight in every.items() if isinstance(weight.like, Tensor)}


def _check_values(name: str, weight: Weight) -> None:
    if weight.here and (is_lazy(weight.like) or getattr(weight.like, "is_meta", False)):
        raise PlanError(
            f"{name} has no values yet. Run a lazy module once before wrapping it, and fill a "
            f"model on the meta device with fx.load_model."
        )


def _one_by_one(
    model: Wrapped, chosen: Mapping[str, Weight], device: torch.device, ranks: _Ranks
) -> Iterator[tuple[str, Tensor]]:
    ctx = model.ctx
    keep = ranks == "all" or ctx.is_main
    groups = _groups(chosen, _TOGETHER if ctx.world_size > 1 else 0)
    for number, names in enumerate(groups):
        check_open(model, "weights", PlanError)
        if not _all_continue(ctx, names[0], ranks):
            return
        values = [(name, _copy(chosen[name], device, keep=keep)) for name in names]
        while values:
            name, value = values.pop(0)
            check_open(model, "weights", PlanError)
            if value is not None:
                try:
                    yield name, value
                except GeneratorExit:
                    if number + 1 < len(groups):  # nobody waits after the last of them
                        _announce_stop(ctx)
                    raise
                del value


def _groups(weights: Mapping[str, Weight], most: int) -> list[list[str]]:
    """Names of tensors that are gathered together: up to so many bytes, or one that has more."""
    groups: list[list[str]] = []
    room = -1
    for name, weight in weights.items():
        nbytes = math.prod(weight.shape) * weight.dtype.itemsize
        if nbytes > room:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= nbytes
    return groups


def _all_continue(ctx: DistContext, name: str, ranks: _Ranks) -> bool:
    """Whether every rank takes the next tensor; with "main", rank 0 decides.

    Raises:
        CollectiveError: another rank left its loop, and this one did not.
    """
    if ctx.world_size == 1:
        return True
    words = ops.gather_objects(_STAYS, ctx)
    gone = [rank for rank, word in enumerate(words) if word != _STAYS]
    if gone and ranks == "all":
        raise CollectiveError(
            f"weights: rank {', '.join(map(str, gone))} left the loop before {name!r}, which this "
            f"rank requests. All ranks must iterate up to the same tensor: break on all of them, "
            f"or choose tensors with names=."
        )
    return not gone


def _announce_stop(ctx: DistContext) -> None:
    """Refuse the next tensor that the other ranks request, since this rank takes no more."""
    if ctx.world_size == 1:
        return
    try:
        ops.gather_objects(_LEAVES, ctx)
    except FxError as error:
        # The loop has ended, perhaps with an error of its own, which must not be hidden.
        ops.log(ctx).debug("weights: no rank received the break: %s", error, everyone=True)


@torch.no_grad()
def _copy(weight: Weight, device: torch.device, *, keep: bool) -> Tensor | None:
    whole = weight.gather()
    return whole.detach().to(device, copy=True) if keep else None


def _collect(model: Wrapped, *, keep: bool) -> dict[tuple[str, str], Tensor]:
    """Full copies of a module's tensors: (module path, name in it) → tensor."""
    weights = model.strategy.weights(model)
    known = {id(weight.like): weight for weight in weights.values() if weight.here}
    for name, weight in weights.items():
        _check_values(name, weight)
    copies: dict[Hashable, Tensor | None] = {}
    places: dict[tuple[str, str], Tensor] = {}
    for path, part in model.module.named_modules():
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            name = plain_name(f"{path}.{key}" if path else key)
            weight = known.get(id(tensor)) if name not in weights else weights[name]
            if weight is None:
                continue  # nothing there, such as the bias that a layer lacks
            if weight.key not in copies:
                copies[weight.key] = _fresh(weight, model.ctx.device, keep=keep)
            if (value := copies[weight.key]) is not None:
                places[path, key] = value
    return places


def _fresh(weight: Weight, device: torch.device, *, keep: bool) -> Tensor | None:
    value = _copy(weight, device, keep=keep)
    if value is None or not isinstance(weight.like, nn.Parameter):
        return value
    return nn.Parameter(value, requires_grad=weight.like.requires_grad)


@contextmanager
def _install_weights(model: Wrapped, whole: dict[tuple[str, str], Tensor]) -> Iterator[None]:
    """Close the handle and, if there are full weights, put them into the bare module."""
    put_back = model.hide_changes()
    model.status.closed = "gathered"
    try:
        parts = dict(model.module.named_modules())
        while whole:
            (path, key), value = whole.popitem()
            part = parts[path]
            tensors: dict[str, Any] = part._parameters if key in part._parameters else part._buffers
            tensors[key] = value
            del value
        yield
    finally:
        put_back()
        model.status.closed = ""
