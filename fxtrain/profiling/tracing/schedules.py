"""When a profile starts and stops: a pure function of its settings."""

import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

from fxtrain.state import Profile

__all__ = ["Action", "Transition", "transitions"]

Action = Literal["prepare", "start", "mark", "stop"]


class Transition(NamedTuple):
    """Something to do before a step.

    Attributes:
        step: Number of the step, from 0.
        action: prepare: warm up; start: record; mark: the next recorded step begins; stop: the
            cycle is complete.
    """

    step: int
    action: Action


def transitions(profile: Profile) -> Iterator[Transition]:
    """What to do before which step, in order; without end for a profile of the whole block.

    Example:
        >>> import fxtrain as fx
        >>> profile = fx.Profile(skip_first=5, wait=1, warmup=2, active=2)
        >>> [tuple(one) for one in transitions(profile)]
        [(6, 'prepare'), (8, 'start'), (9, 'mark'), (10, 'stop')]
    """
    if profile.active is None:
        yield from (Transition(0, "prepare"), Transition(0, "start"))
        yield from (Transition(step, "mark") for step in itertools.count(1))
        return
    step = profile.skip_first
    for _ in range(profile.repeat):
        step += profile.wait
        yield Transition(step, "prepare")
        step += profile.warmup
        yield Transition(step, "start")
        for _ in range(profile.active - 1):
            step += 1
            yield Transition(step, "mark")
        step += 1
        yield Transition(step, "stop")
