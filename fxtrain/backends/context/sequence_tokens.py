"""Positions of a rank's tokens under context parallelism, and gathering them in order."""

from typing import TypeVar

import torch
from torch import Tensor

from fxtrain import _tree
from fxtrain.errors import StepError
from fxtrain.ops.collectives import gather
from fxtrain.state import DistContext, Plan, Wrapped, token_ranges

T = TypeVar("T")


def token_positions(count: int, model: Wrapped) -> Tensor:
    """The positions of this rank's tokens in their sequence.

    Args:
        count: Tokens per sequence on this rank; the full sequence has `count` tokens on each
            rank of the context axis.

    Returns:
        int64, shape (count,), on the context's device; 0, 1, 2, … if sequences are not split.

    Raises:
        StepError: the tokens were not split as the model's plan requires.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.token_positions(3, fx.wrap(torch.nn.Linear(2, 1), ctx))
        tensor([0, 1, 2])
    """
    return positions_of(count, model.ctx, model.plan)


def join_tokens(tree: T, model: Wrapped, *, dim: int = 1) -> T:
    """Gather the tokens of all ranks of the context axis, in the order of the full sequence.

    Args:
        tree: Nested containers of tensors; the same structure, shapes and dtypes on every rank
            of the context axis.
        dim: The token dimension of the tensors.

    Returns:
        A new tree, equal on those ranks, without gradient.

    Effects:
        One gather over the context axis; none if sequences are not split.

    Raises:
        CollectiveError: the ranks disagree, or one never joins; on every rank.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        ...     fx.ops.join_tokens(torch.tensor([[1, 2, 3]]), model)
        tensor([[1, 2, 3]])
    """
    axis = model.ctx.axis("context")
    if axis.world_size == 1:
        return tree

    def sorted_again(tensor: Tensor) -> Tensor:
        count = tensor.shape[0] // axis.world_size
        ranks = range(axis.world_size)
        places = [positions_of(count, model.ctx, model.plan, rank=rank) for rank in ranks]
        order = torch.cat(places).argsort().to(tensor.device)
        return tensor.index_select(0, order).movedim(0, dim)

    first = _tree.map_tensors(lambda x: x.detach().movedim(dim, 0).contiguous(), tree)
    return _tree.map_tensors(sorted_again, gather(first, axis))


def positions_of(count: int, ctx: DistContext, plan: Plan, *, rank: int | None = None) -> Tensor:
    """The positions of the tokens of a rank of the context axis; by default of this rank."""
    axis, config = ctx.axis("context"), plan.context
    index = axis.rank if rank is None else rank
    balance = config is not None and config.balance
    ranges = token_ranges(count * axis.world_size, axis.world_size, index, balance=balance)
    if ranges is None:
        raise StepError(
            f"Each rank has two chunks of equal length of every sequence, but found {count} "
            f"tokens. Split batches with fx.shard(loader, ctx, plan) and the model's plan."
        )
    parts = [torch.arange(start, start + size, device="cpu") for start, size in ranges]
    return torch.cat(parts).to(ctx.device)
