"""Replicas that train independently between averages: their configs, and when to average."""

from typing import Literal

import attrs

from fxtrain._record import above, at_least, between, record
from fxtrain.state.position import Position


@record
class LocalSGD:
    """Every replica trains independently, and all are averaged every few updates.

    With `every=1` and plain SGD this is DDP within rounding. With one replica it has no effect.

    Attributes:
        every: Optimizer updates between averages. The end of an epoch also averages.
        warmup: First updates of the run that all replicas make together, as under DDP.
    """

    kind: Literal["local_sgd"] = attrs.field(default="local_sgd", init=False)
    every: int = attrs.field(validator=at_least(1))
    warmup: int = attrs.field(default=0, validator=at_least(0))


@record
class DiLoCo:
    """Like `LocalSGD`, but an outer SGD moves the parameters towards the average.

    The mean change of the replicas since the last round is the negative of its gradient. With
    `outer_lr=1` and `outer_momentum=0` this is `LocalSGD`.

    Attributes:
        every: Optimizer updates in a round. The end of an epoch also ends one.
        warmup: First updates of the run that all replicas make together, as under DDP.
        outer_lr: Learning rate of the outer SGD.
        outer_momentum: Its momentum.
        nesterov: Whether to use Nesterov momentum.
    """

    kind: Literal["diloco"] = attrs.field(default="diloco", init=False)
    every: int = attrs.field(validator=at_least(1))
    warmup: int = attrs.field(default=0, validator=at_least(0))
    outer_lr: float = attrs.field(default=0.7, validator=above(0))
    outer_momentum: float = attrs.field(
        default=0.9, validator=between(0, 1, open_low=False, words="of at least 0 and below 1")
    )
    nesterov: bool = True


def is_alone(local: LocalSGD | DiLoCo, position: Position) -> bool:
    """Whether each replica makes the update of the batch before a position independently.

    Example:
        >>> import fxtrain as fx
        >>> is_alone(fx.LocalSGD(every=4, warmup=2), fx.Position(updates=2, micro=1))
        True
    """
    return position.updates + (position.micro > 0) > local.warmup


def round_begins(local: LocalSGD | DiLoCo, position: Position) -> bool:
    """Whether the warm-up ends at a position."""
    return position.updates == local.warmup and position.micro == 0


def round_ends(local: LocalSGD | DiLoCo, position: Position) -> bool:
    """Whether replicas are averaged at a position: every few updates, and where the data ends.

    Example:
        >>> import fxtrain as fx
        >>> local = fx.LocalSGD(every=4, warmup=2)
        >>> [n for n in range(12) if round_ends(local, fx.Position(updates=n))]
        [6, 10]
        >>> round_ends(local, fx.Position(updates=7, is_last=True))
        True
    """
    if not is_alone(local, position):
        return False
    made = position.updates - local.warmup
    return position.is_last or (position.micro == 0 and made % local.every == 0)
