"""What a loader runs of the user's code: its random generators, and its errors."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fxtrain._words import canonical_text
from fxtrain.errors import DataError

# How torch's messages begin for an error inside a worker, and for a worker that ended.
_CAUGHT = "Caught "
_ENDED = "DataLoader worker"


def seed_all(key: int) -> None:
    """Seed Python's, torch's CPU and NumPy's (if it is imported) generators."""
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


class _MissingRowError(DataError, IndexError):
    """A row that does not exist; still an IndexError, as the dataset raised."""


@contextmanager
def named_errors(loader: DataLoader[Any]) -> Iterator[None]:
    """Name the errors of reading a loader in the block.

    Raises:
        DataError: a worker process ended, or the dataset has fewer rows than its length. Any
            other error of the dataset is raised unchanged.
    """
    try:
        yield
    except IndexError as error:
        if isinstance(loader.dataset, IterableDataset):
            raise
        dataset: Any = loader.dataset
        reason = str(error).strip().rpartition("\n")[2]
        raise _MissingRowError(
            f"iterating: {type(dataset).__name__} raised IndexError: {reason}. len(dataset) is "
            f"{len(dataset)}. If it has fewer rows, return their number from __len__; if a sampler "
            f"chose the row, make it choose from those."
        ) from error
    except (OSError, EOFError, RuntimeError) as error:
        if not loader.num_workers or not _worker_ended(error):
            raise
        raise DataError(
            f"iterating: a worker process of this DataLoader (num_workers={loader.num_workers}) "
            f"ended while reading. The system kills workers when memory runs out, and a crash in "
            f"native code ends them: use fewer workers or smaller batches, or num_workers=0 to see "
            f"the crash in this process.",
            code="FX402",
        ) from error


def _worker_ended(error: Exception) -> bool:
    """Whether torch lost a worker; an error that a dataset raised there reads differently."""
    text = str(error)
    if text.startswith(_CAUGHT):
        return False
    if isinstance(error, FileNotFoundError):  # a worker's socket has no name in this process
        return error.filename is None
    return isinstance(error, ConnectionError | EOFError) or text.startswith(_ENDED)
