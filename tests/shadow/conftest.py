"""Pools of ranks on the device "shadow", in which a tensor that was left on the CPU is an error."""

from collections.abc import Iterator

import pytest

from fxtrain.testing import Cluster

PRELOAD = ("tests.shadow.device",)


def _pool(n: int) -> Iterator[Cluster]:
    pool = Cluster(n, timeout_s=30.0, call_s=120.0, device="shadow", preload=PRELOAD)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def one() -> Iterator[Cluster]:
    """One rank."""
    yield from _pool(1)


@pytest.fixture(scope="session")
def two() -> Iterator[Cluster]:
    """Two ranks."""
    yield from _pool(2)
