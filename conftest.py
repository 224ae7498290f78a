"""Pools of real ranks, shared by every test of a session."""

import os
from collections.abc import Iterator

import pytest

from fxtrain.testing import Cluster


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What pytest-xdist keeps together: a file, and all tests on real ranks, so no pool twice.

    What takes longest comes first, so that no process is left alone with it.
    """
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ranks" if _on_ranks(item) else item.location[0]))
    items.sort(key=lambda item: (not _on_ranks(item), "launched" not in item.location[0]))


def _on_ranks(item: pytest.Item) -> bool:
    return "clusters" in getattr(item, "fixturenames", ())


def _patience() -> float:
    """How many times longer than on an idle machine ranks wait for each other.

    Processes that are ready to run for each core, at most 6. `TEST_PATIENCE` overrides it.
    """
    if given := os.environ.get("TEST_PATIENCE"):
        return float(given)
    return min(max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0), 6.0)


@pytest.fixture(scope="session")
def clusters() -> Iterator[dict[int, Cluster]]:
    """One pool per world size; its workers start with the first call."""
    patience = _patience()
    times = {"timeout_s": 5.0 * patience, "call_s": 40.0 * patience}
    pools = {n: Cluster(n, **times) for n in (1, 2, 4)}
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
