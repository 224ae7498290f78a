"""Pools of their own: DeepSpeed keeps groups and engines per process."""

import importlib.util
from collections.abc import Iterator

import pytest

from fxtrain.testing import Cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests where the package is absent."""
    if importlib.util.find_spec("deepspeed") is not None:
        return
    for item in items:
        if item.get_closest_marker("deepspeed"):
            item.add_marker(pytest.mark.skip(reason="deepspeed is not installed"))


@pytest.fixture(scope="session")
def clusters() -> Iterator[dict[int, Cluster]]:
    """Like the ones of every test, with the time that compiling an operator takes."""
    times = {"timeout_s": 110.0, "call_s": 115.0}
    pools = {n: Cluster(n, **times, keep_groups=True) for n in (1, 2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()
