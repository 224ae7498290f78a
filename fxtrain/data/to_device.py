"""Batches on their way to the model: this rank's tokens of them, and the device."""

import fnmatch
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxtrain import _extensions, _tree
from fxtrain.errors import DataError
from fxtrain.ops.transport.packing import as_tensor
from fxtrain.state import CP, DistContext, Plan, token_ranges

S = TypeVar("S")
_AHEAD = 2  # batches whose kernels have not ended
_KEY = re.compile(r"\['?(.*?)'?\]|\.(\w+)")


class _Queued(deque[torch.cuda.Event]):
    """Events after the kernels of the last batches of a context, of all its loaders and epochs."""


def on_device(
    loaded: Iterator[tuple[S, Sequence[Any]]], ctx: DistContext, plan: Plan, *, ahead: bool
) -> Iterator[tuple[S, Sequence[Any]]]:
    """Steps with their data on the context's device.

    Args:
        loaded: Steps, each with this rank's data as the first entry of a sequence.
        ahead: For an XLA device, read `plan.data.prefetch` batches in advance, and move them in a
            thread.
    """
    if ctx.device.type == "cpu" or not plan.data.to_device:
        return loaded
    depth = plan.data.prefetch if ahead and ctx.device.type == "xla" else 0
    if depth:
        return _moved_ahead(loaded, ctx, plan, depth)
    if ctx.device.type == "cuda":
        return _on_copy_stream(loaded, ctx, plan)
    return ((step, (to_device(data[0], ctx, plan),)) for step, data in loaded)


def _on_copy_stream(
    loaded: Iterator[tuple[S, Sequence[Any]]], ctx: DistContext, plan: Plan
) -> Iterator[tuple[S, Sequence[Any]]]:
    """Copy to a GPU on a stream of its own: during the kernels of earlier steps, not after them.

    A copy from pageable memory makes the host wait for that stream alone. Sparse and nested
    tensors, and objects that move themselves, are copied after the kernels of earlier steps: torch
    cannot record a stream for them.

    Effects:
        The host waits for the kernels of the batch before the last one, so that memory for batches
        does not grow with how far it is ahead of the GPU.
    """
    stream, copied = torch.cuda.Stream(ctx.device), torch.cuda.Event()
    queued = ctx.comm.slot(_Queued)

    def move(leaf: Any) -> Any:
        if not _is_dense(leaf):
            with torch.cuda.stream(current):
                return _moved(leaf, ctx, plan)
        copy = _moved(leaf, ctx, plan)
        if copy is not leaf:
            # Its memory is the copy stream's: not reused before the kernels that read it end.
            copy.record_stream(current)
        return copy

    for step, data in loaded:
        if len(queued) == _AHEAD:
            queued.popleft().synchronize()
        current = torch.cuda.current_stream(ctx.device)  # the loop may change it between batches
        with stream:
            moved = _tree.map_leaves(move, data[0])
        copied.record(stream)
        copied.wait(current)
        yield step, (moved,)
        queued.append(torch.cuda.Event(blocking=True))
        queued[-1].record(torch.cuda.current_stream(ctx.device))


def _moved_ahead(
    loaded: Iterator[tuple[S, Sequence[Any]]], ctx: DistContext, plan: Plan, depth: int
) -> Iterator[tuple[S, Sequence[Any]]]:
    waiting: deque[tuple[S, Future[Any]]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="fxtrain place") as thread:
        for step, data in loaded:
            waiting.append((step, thread.submit(to_device, data[0], ctx, plan)))
            if len(waiting) > depth:
                first, sent = waiting.popleft()
                yield first, (sent.result(),)
        for step, sent in waiting:
            yield step, (sent.result(),)


def to_device(data: Any, ctx: DistContext, plan: Plan) -> Any:
    """The same data with its tensors on the context's device.

    Objects with a method `to`, such as graphs of PyG and DGL, are replaced by what it returns;
    everything else is unchanged.

    Effects:
        One copy per tensor, non-blocking from pinned memory; none on the CPU or with
        `to_device=False`, where the result is the same object.
    """
    if ctx.device.type == "xla":
        return _extensions.xla_runtime.to_xla(data, ctx)
    return _tree.map_leaves(lambda leaf: _moved(leaf, ctx, plan), data)


def _moved(leaf: Any, ctx: DistContext, plan: Plan) -> Any:
    """A leaf on the device; the same object if it is there already, or cannot be moved."""
    if not isinstance(leaf, Tensor):
        return leaf.to(ctx.device) if callable(getattr(type(leaf), "to", None)) else leaf
    pinned = plan.data.non_blocking and _is_dense(leaf) and leaf.is_pinned()
    return leaf.to(ctx.device, non_blocking=pinned)


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def with_tensors(data: Any) -> Any:
    """The same data with its NumPy arrays of numbers as tensors, which share their memory."""

    def converted(leaf: Any) -> Any:
        found = as_tensor(leaf)
        return leaf if found is None else found[0]

    return _tree.map_leaves(converted, data)


def valid_mask(size: int, real: int, ctx: DistContext, plan: Plan) -> Tensor:
    """Which rows are real, as a mask on the device of the data; padding is at the end."""
    device = ctx.device if plan.data.to_device else torch.device("cpu")
    # Compared on the host: XLA would compile a new graph for each number of real rows.
    return (torch.arange(size, device="cpu") < real).to(device, non_blocking=device.type != "cpu")


def make_splitter(ctx: DistContext, plan: Plan) -> Callable[[Any], Any] | None:
    """A function from full rows to the same tree with this rank's tokens only.

    The ranks of the context axis read the same rows, so they all find the same problems.

    Returns:
        None where sequences stay whole.
    """
    if plan.context is None or ctx.axis("context").world_size == 1:
        return None
    cuts: CP = plan.context
    axis = ctx.axis("context")

    def cut(data: Any) -> Any:
        leaves, shape = _tree.flatten(data)
        names = [_name(path) for path in _tree.leaf_paths(shape)]
        chosen = _chosen(leaves, names, cuts)
        local = [
            _own_tokens(leaf, name, axis, cuts) if name in chosen else leaf
            for leaf, name in zip(leaves, names, strict=True)
        ]
        return _tree.unflatten(shape, local)

    return cut


def _name(path: str) -> str:
    """`['inputs'][0]` as written in a plan: `inputs.0`."""
    return ".".join(key or field for key, field in _KEY.findall(path))


def _chosen(leaves: list[Any], names: list[str], config: CP) -> set[str]:
    tensors = {
        name: leaf
        for leaf, name in zip(leaves, names, strict=True)
        if isinstance(leaf, Tensor) and leaf.ndim > config.dim
    }
    known = ", ".join(f"{name or 'the batch'} {list(t.shape)}" for name, t in tensors.items())
    for pattern in config.batch:
        if not fnmatch.filter(tensors, pattern):
            raise DataError(
                f"CP(batch=...) names {pattern!r}, but no tensor of this batch with a dimension "
                f"{config.dim} has that name. It has: {known or 'none'}."
            )
    if config.batch:
        return {n for n in tensors if any(fnmatch.fnmatchcase(n, p) for p in config.batch)}
    lengths = {tensor.shape[config.dim] for tensor in tensors.values()}
    if len(lengths) != 1:
        raise DataError(
            f"CP() splits every tensor that has a dimension {config.dim}, and all must have one "
            f"length; this batch has {known or 'none'}. Name those to split: "
            f"CP(batch=('input_ids', 'labels'))."
        )
    return set(tensors)


def _own_tokens(leaf: Tensor, name: str, axis: DistContext, config: CP) -> Tensor:
    length, ranks = leaf.shape[config.dim], axis.world_size
    ranges = token_ranges(length, ranks, axis.rank, balance=config.balance)
    if ranges is None:
        of, parts = f"{name or 'the batch'} {list(leaf.shape)}", ranks * (1 + config.balance)
        each = " as two equal parts each" if config.balance else " equally"
        fewer = ", or use CP(balance=False)" if config.balance and length % ranks == 0 else ""
        raise DataError(
            f"{of} has {length} tokens along dimension {config.dim}, which {ranks} context ranks "
            f"cannot share{each}. Pad sequences to a multiple of {parts}{fewer}."
        )
    parts = [leaf.narrow(config.dim, start, count) for start, count in ranges]
    return torch.cat(parts, config.dim)
