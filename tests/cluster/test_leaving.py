"""A rank that leaves with an error does not wait for its peers."""

import threading

import pytest
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxtrain.ops import closing
from fxtrain.state import CommState
from fxtrain.state.topology import Topology


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
    monkeypatch.setattr(dist, "destroy_process_group", lambda *_: released.wait() and destroy())
    yield
    released.set()
    monkeypatch.undo()
    for thread in _left_behind():
        thread.join()


def _left_behind():
    """Threads for which a rank does not wait any more."""
    return [thread for thread in threading.enumerate() if thread.name == "fxtrain-within"]


def _close(timeout_s=5.0):
    topology = Topology(rank=1, world_size=2)
    return closing.make_close(CommState(), timeout_s, topology=topology, store=dist.HashStore())


def test_a_rank_that_leaves_with_an_error_gives_up_waiting(group, stuck):
    _close(timeout_s=0.2)(ValueError("bad"))
    assert len(_left_behind()) == 1 and dist.is_initialized()


@pytest.fixture
def aborted(monkeypatch):
    """Groups that were aborted, as if all of them were of NCCL."""
    groups = []
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", groups.append)
    return groups


def test_a_group_of_nccl_is_aborted(group, aborted):
    _close()(ValueError("bad"))
    assert aborted == [dist.group.WORLD] and dist.is_initialized()


def _opened():
    """Two groups that a context opened beside one that existed."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    state = CommState()
    state.opened_groups.extend(groups)
    return groups, state


def test_groups_beside_an_existing_one_are_aborted_too(group, aborted, stuck):
    groups, state = _opened()
    closing.make_close(state, 5.0)(ValueError("bad"))
    assert aborted == groups[::-1] and not state.opened_groups
    assert not _left_behind()


def test_groups_beside_an_existing_one_are_destroyed_without_an_error(group):
    groups, state = _opened()
    closing.make_close(state, 5.0)(None)
    assert dist.is_initialized() and not state.opened_groups
    assert all(one not in dist.distributed_c10d._world.pg_map for one in groups)


def test_a_rank_that_leaves_without_an_error_destroys_its_groups(group):
    _close()(None)
    assert not dist.is_initialized()
