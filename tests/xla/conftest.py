"""Pools of their own: a process has one XLA runtime, with or without SPMD."""

import importlib.util
from collections.abc import Iterator

import pytest

from fxtrain.testing import Cluster

# Most of these tests' time goes into compiling programs that run a few times.
ALONE = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
# Four devices in one process: two copies of parameters that are split in two.
SPMD = ALONE | {"CPU_NUM_DEVICES": "4", "FXTRAIN_PLAN__MESH": "replicate=2,shard=2"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests where the package is absent."""
    if importlib.util.find_spec("torch_xla") is not None:
        return
    for item in items:
        if item.get_closest_marker("xla"):
            item.add_marker(pytest.mark.skip(reason="torch_xla is not installed"))


def _pool(env: dict[str, str]) -> Iterator[Cluster]:
    pool = Cluster(1, timeout_s=60.0, call_s=300.0, device="xla", env=env)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def alone() -> Iterator[Cluster]:
    """One process with one device."""
    yield from _pool(ALONE)


@pytest.fixture(scope="session")
def spmd() -> Iterator[Cluster]:
    """One process with four devices."""
    yield from _pool(SPMD)


@pytest.fixture(params=["alone", "spmd"])
def device(request: pytest.FixtureRequest) -> Cluster:
    """Each pool in turn."""
    return request.getfixturevalue(request.param)
