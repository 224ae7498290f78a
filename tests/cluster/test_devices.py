"""Which device a rank uses, where the launcher shows it one device or all of the node."""

import types

import pytest
import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxtrain.errors import ContextError
from fxtrain.ops import devices
from fxtrain.state.topology import Topology


@pytest.fixture
def cuda(monkeypatch):
    """CUDA as torch shows it, with the number of devices that the test sets."""
    found = types.SimpleNamespace(count=1, uuids={}, selected=[])
    accelerator = torch.accelerator
    monkeypatch.setattr(
        accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(accelerator, "device_count", lambda: found.count)
    monkeypatch.setattr(accelerator, "set_device_index", found.selected.append)
    return found


def _rank(rank, per_node=4, world_size=8):
    local = rank % per_node
    return Topology(rank=rank, world_size=world_size, local_rank=local, local_world_size=per_node)


def _device(rank, requested=None):
    return devices.find_device(requested, {}, _rank(rank))[0]


def test_a_rank_takes_the_device_of_its_local_rank(cuda):
    cuda.count = 4
    assert _device(6) == torch.device("cuda:2")
    assert _device(6, "cuda:1") == torch.device("cuda:1")
    assert cuda.selected == [2, 1]


def test_a_rank_that_sees_one_device_takes_it(cuda):
    assert _device(7) == torch.device("cuda:0")


def test_too_few_devices_are_an_error(cuda):
    cuda.count = 2
    with pytest.raises(ContextError, match="needs cuda:3, but this node has 2 cuda devices"):
        _device(3)


def test_the_device_of_an_existing_group_is_used(cuda):
    cuda.count = 4
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        dist.group.WORLD.bound_device_id = torch.device("cuda:3")
        assert _device(0) == torch.device("cuda:3")
        assert _device(0, "cuda:1") == torch.device("cuda:1")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shared", [False, True])
def test_two_ranks_of_a_node_on_one_device_are_named(shared, monkeypatch):
    store = dist.HashStore()
    for rank in (4, 5, 7):
        store.set(f"device/{rank}", "GPU-5" if shared else f"GPU-{rank}")
    store.set("device/0", "GPU-6")  # of another node, so whatever it says does not count
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="GPU-6")
    )
    place = (_rank(6), torch.device("cuda:0"), store, 1.0)
    if shared:
        store.set("device/5", "GPU-6")
        with pytest.raises(ContextError, match=r"Ranks 5, 6 of this node .*GPU-6"):
            devices.check_own_device(*place)
    else:
        devices.check_own_device(*place)
        assert store.get("device/6") == b"GPU-6"
