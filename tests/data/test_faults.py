"""What goes wrong while a loader reads is a DataError that says what to do."""

import gc
import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import fxtrain as fx
from fxtrain.state import DistContext
from tests._errors import raises_code


@pytest.fixture(autouse=True)
def ended_workers(monkeypatch):
    """Ends the workers of loaders that failed here, for which torch waits 5 s in whatever test
    happens to collect garbage.
    """
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    yield
    gc.collect()


class Claims(Dataset):
    """A dataset of ten rows that says another length."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index >= 10:
            raise IndexError(f"row {index} of 10")
        return torch.tensor([float(index)])


class Dies(Dataset):
    """Its worker is killed while it reads a later row."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4)


class Missing(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise FileNotFoundError(2, "no such file", f"row-{index}")


def _read(dataset, **settings):
    return list(fx.shard(DataLoader(dataset, batch_size=4, **settings), DistContext()))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_of_fewer_rows_than_it_says(workers):
    with raises_code("FX400", "IndexError") as e:
        _read(Claims(16), num_workers=workers)
    assert "len(dataset) is 16" in str(e.value) and "__len__" in str(e.value)
    assert isinstance(e.value, IndexError)


@pytest.fixture
def no_handler(monkeypatch):
    """Without torch's handler of SIGCHLD, which raises wherever this process is at that time."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", True)
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, handler)


def test_a_worker_that_is_killed(no_handler):
    with raises_code("FX402", "DataLoader", "num_workers=1"):
        _read(Dies(), num_workers=1)


def test_a_worker_of_which_torchs_handler_says_that_it_was_killed(monkeypatch):
    def fail(_):
        raise RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed. ")

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_next_data", fail)
    with raises_code("FX402", "DataLoader", "num_workers=1"):
        _read(Claims(8), num_workers=1)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_dataset_raises_otherwise_stays_its_own(workers):
    with pytest.raises(FileNotFoundError) as caught:
        _read(Missing(), num_workers=workers)
    assert not isinstance(caught.value, fx.FxError)


class Stops(Dataset):
    """Row 5 is the next one of an iterator that has ended."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index if index != 5 else next(iter(()))


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(12))


def _collate(rows):
    return [row if row != 5 else next(iter(())) for row in rows]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset, how", [(Stops(), {}), (Numbers(), {"collate_fn": _collate})])
def test_an_iterator_that_ends_within_the_data_does_not_end_the_epoch(dataset, how, workers):
    with raises_code("FX402", "StopIteration"):
        _read(dataset, num_workers=workers, **how)
