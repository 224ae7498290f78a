"""Tables that libraries compute at first use and keep for the process."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

_TORCHAO = ("torchao.optim.subclass_4bit", "torchao.optim.subclass_8bit")
_TABLES = ("get_qmap_signed", "get_qmap_unsigned")


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
