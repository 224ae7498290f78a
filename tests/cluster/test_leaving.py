"""A rank that leaves with an error does not wait for its peers."""

import threading
import time

import pytest
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxtrain.ops import closing
from fxtrain.state import Topology


@pytest.fixture
def group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def stuck(monkeypatch):
    """A `destroy_process_group` that waits for peers, as NCCL's does."""
    released, destroy = threading.Event(), dist.destroy_process_group
    monkeypatch.setattr(dist, "destroy_process_group", lambda: released.wait(60) and destroy())
    yield
    released.set()
    monkeypatch.undo()
    for thread in threading.enumerate():
        if thread.name == "fxtrain-abort":
            thread.join()


def _close(timeout_s=0.2):
    topology = Topology(rank=1, world_size=2)
    return closing.make_close(topology, dist.HashStore(), timeout_s)


def test_a_rank_that_leaves_with_an_error_gives_up_waiting(group, stuck):
    started = time.monotonic()
    _close()(ValueError("bad"))
    assert time.monotonic() - started < 30


def test_a_group_of_nccl_is_aborted(group, monkeypatch):
    aborted = []
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(
        dist.distributed_c10d, "_abort_process_group", lambda: aborted.append("abort")
    )
    _close()(ValueError("bad"))
    assert aborted == ["abort"] and dist.is_initialized()


def test_a_rank_that_leaves_without_an_error_destroys_its_groups(group):
    _close()(None)
    assert not dist.is_initialized()
