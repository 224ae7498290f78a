"""Pools of real ranks, shared by every test of a session."""

from collections.abc import Iterator

import pytest

from fxtrain.testing import Cluster


@pytest.fixture(scope="session")
def clusters() -> Iterator[dict[int, Cluster]]:
    """One pool per world size; its workers start with the first call."""
    pools = {n: Cluster(n) for n in (1, 2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session", params=[1, 2, 4], ids=lambda n: f"world{n}")
def cluster(request: pytest.FixtureRequest, clusters: dict[int, Cluster]) -> Cluster:
    """Each pool in turn."""
    return clusters[request.param]


@pytest.fixture(scope="session")
def pair(clusters: dict[int, Cluster]) -> Cluster:
    """The pool of two ranks."""
    return clusters[2]
