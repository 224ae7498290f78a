"""Errors of torch's loader, reworded to say what to do."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from fxtrain.errors import DataError

# How torch's messages begin for an error inside a worker, and for a worker that ended.
_CAUGHT = "Caught "
_ENDED = "DataLoader worker"


class _MissingRowError(DataError, IndexError):
    """A row that does not exist; still an IndexError, as the dataset raised."""


def reading(
    loader: DataLoader[Any], over: Iterable[Any], asked: Callable[[], str] = str
) -> Iterator[Any]:
    """Yield what a loader reads.

    Args:
        loader: The user's.
        over: The same loader over other indices, which does the reading.
        asked: Description of the rows being read; empty for a stream.

    Raises:
        DataError: a worker process ended, or the dataset has fewer rows than its length. Any
            other error of the dataset is raised unchanged.
    """
    try:
        yield from over
    except IndexError as error:
        if not asked():
            raise
        raise _MissingRowError(_no_row(loader, asked(), error)) from error
    except (OSError, EOFError, RuntimeError) as error:
        if not loader.num_workers or not _worker_ended(error):
            raise
        raise DataError(
            f"iterating: a worker process of this DataLoader (num_workers={loader.num_workers}) "
            f"ended while reading ({type(error).__name__}: {_first(error)}). The system kills "
            f"workers when memory runs out, and a crash in native code ends them: use fewer "
            f"workers or smaller batches, or num_workers=0 to see the crash in this process.",
            code="FX402",
        ) from error


def safe_length(units: Any) -> int:
    """The length of a dataset or sampler.

    Raises:
        DataError: its `__len__` returns an invalid number.
        TypeError: it has no length.
    """
    try:
        return len(units)
    except (ValueError, OverflowError) as error:
        raise DataError(
            f"len: the length of the {type(units).__name__} of this loader cannot be used "
            f"({error}). Return the number of rows from __len__ of the dataset or the sampler: "
            f"an integer, 0 or more."
        ) from error


def _no_row(loader: DataLoader[Any], asked: str, error: IndexError) -> str:
    dataset = type(loader.dataset).__name__
    return (
        f"iterating: {dataset} raised IndexError while reading {asked}: {_last(error)}. "
        f"len(dataset) is {safe_length(loader.dataset)}. If {dataset} has fewer rows, return their "
        f"number from __len__; if a sampler chose the row, make it choose from those."
    )


def _worker_ended(error: Exception) -> bool:
    """Whether torch lost a worker; an error that a dataset raised there reads differently."""
    text = str(error)
    if text.startswith(_CAUGHT):
        return False
    if isinstance(error, FileNotFoundError):  # a worker's socket has no name in this process
        return error.filename is None
    return isinstance(error, ConnectionError | EOFError) or text.startswith(_ENDED)


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no more is known"])[0].rstrip(".")


def _last(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["IndexError"])[-1].rstrip(".")
