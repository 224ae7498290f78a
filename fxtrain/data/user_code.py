"""Random generators of the user's code that a loader runs."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxtrain._words import canonical_text


def seed_all(key: int) -> None:
    """Seed Python's, torch's CPU and NumPy's (if it is imported) generators.

    Args:
        key: From 0 to 2**63 - 1.
    """
    random.seed(key)
    # torch.manual_seed would also queue work on every accelerator at each call.
    torch.default_generator.manual_seed(key)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed([key & 0xFFFFFFFF, key >> 32])


class BorrowedGenerators:
    """Separate generators for code that draws from the global ones.

    Code inside `with lent():` continues from the state in which the last such block ended.
    Outside, the process's generators are unaffected by it.

    Args:
        key: Initial seed, from 0 to 2**63 - 1.
    """

    def __init__(self, key: int) -> None:
        self._key = key
        self._inside: tuple[Any, ...] | None = None
        self._start: tuple[Any, ...] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        outside = _states()
        if self._inside is None:
            seed_all(self._key)
            self._start = _states()
        else:
            _restore(self._inside)
        try:
            yield
        finally:
            self._inside = _states()
            _restore(outside)

    def again(self) -> "BorrowedGenerators":
        """The same generators in their initial state."""
        return BorrowedGenerators(self._key)

    @property
    def used(self) -> bool:
        """Whether any number has been drawn so far."""
        if self._start is None or self._inside is None:
            return False
        torch_0, python_0, numpy_0 = self._start
        torch_1, python_1, numpy_1 = self._inside
        return not (
            torch_0.equal(torch_1)
            and python_0 == python_1
            and (numpy_0 is None or canonical_text(numpy_0) == canonical_text(numpy_1))
        )


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return (
        torch.default_generator.get_state(),
        random.getstate(),
        numpy.random.get_state(legacy=False) if numpy else None,
    )


def _restore(states: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])
