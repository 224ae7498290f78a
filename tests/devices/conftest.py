"""Pools of ranks on devices that are not the CPU.

"shadow" is compiled for these tests (shadow.cpp) and runs anywhere: a tensor that was left on the
CPU is an error there, as on a GPU. "cuda" needs a GPU. Two ranks use NCCL where there are two GPUs,
and share one through gloo otherwise, since NCCL refuses that.
"""

from collections.abc import Iterator

import pytest
import torch

from fxtrain.testing import Cluster

# Importing it makes its device the accelerator of the process; only ranks do.
collect_ignore = ["shadow.py"]

DEVICES = [
    pytest.param("shadow", marks=pytest.mark.shadow),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


def _pool(n: int, device: str) -> Iterator[Cluster]:
    preload = ("tests.devices.shadow",) if device == "shadow" else ()
    shared = device == "cuda" and torch.cuda.device_count() < n
    library = "gloo" if shared else None
    pool = Cluster(n, timeout_s=30.0, call_s=120.0, device=device, preload=preload, library=library)
    yield pool
    pool.close()


@pytest.fixture(scope="session", params=DEVICES)
def one(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One rank."""
    yield from _pool(1, request.param)


@pytest.fixture(scope="session", params=DEVICES)
def two(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two ranks."""
    yield from _pool(2, request.param)


@pytest.fixture(scope="session")
def nccl() -> Iterator[Cluster]:
    """One rank in a group of NCCL, which a context of one rank does not open."""
    pool = Cluster(1, timeout_s=30.0, call_s=120.0, device="cuda", library="cpu:gloo,cuda:nccl")
    yield pool
    pool.close()
