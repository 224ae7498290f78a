"""What a dry run changes in torch and libraries, since its tensors have no values."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from fxtrain.ops.splitting import chunk_of
from fxtrain.profiling.fake_tensors import FakeValuesMode
from fxtrain.profiling.watching import LoopRecorder

_TORCHAO = ("torchao.optim.subclass_4bit", "torchao.optim.subclass_8bit")
_TABLES = ("get_qmap_signed", "get_qmap_unsigned")


@contextmanager
def load_in_process(watch: LoopRecorder) -> Iterator[None]:
    """Make data loaders load in this process, while recorded.

    Fake tensors cannot be sent between processes.
    """

    class Reading(_SingleProcessDataLoaderIter):
        def _next_data(self) -> Any:
            with watch.loading():
                return super()._next_data()

    def read_here(loader: Any) -> Any:
        kept = loader.num_workers, loader.timeout
        loader.num_workers, loader.timeout = 0, 0
        try:
            return Reading(loader)
        finally:
            loader.num_workers, loader.timeout = kept

    with _replaced(DataLoader, "_get_iterator", read_here):
        yield


@contextmanager
def swappable(fakes: FakeValuesMode) -> Iterator[None]:
    """Allow `module.to(...)` to swap parameters.

    torch raises if a weak reference to one exists, and its fake mode keeps some.
    """
    usual = torch.utils.swap_tensors

    def swap(one: Any, other: Any) -> None:
        fakes.forget_origins()
        usual(one, other)

    with _replaced(torch.utils, "swap_tensors", swap):
        yield


@contextmanager
def lazy_chunks() -> Iterator[None]:
    """Make FSDP2 create only the chunks of a parameter that it uses.

    It creates one for each rank, and uses this rank's and the first.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    with _replaced(_fsdp_param, "_chunk_with_empty", _Chunks):
        yield


@contextmanager
def formattable() -> Iterator[None]:
    """Make `f"{loss:.3f}"` read a value, as for any zero-dimensional tensor."""
    usual = torch.Tensor.__format__

    def write(tensor: torch.Tensor, spec: str) -> str:
        if isinstance(tensor, FakeTensor) and tensor.dim() == 0:
            return format(tensor.item(), spec)
        return usual(tensor, spec)

    with _replaced(torch.Tensor, "__format__", write):
        yield


class _Chunks:
    """A tensor's chunks, each created on access."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._num_chunks, self._dim = tensor, num_chunks, dim

    def __getitem__(self, index: int) -> torch.Tensor:
        return chunk_of(self._tensor, self._num_chunks, self._dim, index)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    usual = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, usual)


@contextmanager
def real_tables() -> Iterator[None]:
    """Around a dry run: the tables that torchao and bitsandbytes keep have values afterwards.

    A table that is computed without values would silently spoil training in the same process.
    """
    before = _cached()
    for table in before:
        table()
    try:
        yield
    finally:
        for table in _cached():
            if table not in before:
                table.cache_clear()
        kept: dict[str, Any] = getattr(sys.modules.get("bitsandbytes.functional"), "name2qmap", {})
        for name in [name for name, table in kept.items() if isinstance(table, FakeTensor)]:
            del kept[name]


def _cached() -> list[Any]:
    """torchao's cached functions, if they are imported."""
    homes = [sys.modules[home] for home in _TORCHAO if home in sys.modules]
    return [getattr(home, name) for home in homes for name in _TABLES]
