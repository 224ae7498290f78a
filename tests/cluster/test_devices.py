"""Which device a rank uses, where the launcher shows it one device or all of the node."""

import platform
import types

import pytest
import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxtrain.ops import devices
from fxtrain.state.topology import Topology
from tests._errors import raises_code


@pytest.fixture
def cuda(monkeypatch):
    """CUDA as torch shows it, with the number of devices that the test sets."""
    found = types.SimpleNamespace(count=1, uuids={}, selected=[], current=0)
    accelerator = torch.accelerator
    monkeypatch.setattr(
        accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(accelerator, "device_count", lambda: found.count)
    monkeypatch.setattr(accelerator, "set_device_index", found.selected.append)
    monkeypatch.setattr(accelerator, "current_device_index", lambda: found.current)
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
    with raises_code("FX104", "2 cuda"):
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


# Of rank 1, and of rank 0 on the same machine or on another one; then the device of rank 1.
CURRENT = {
    "chosen": (3, "0 here", 3),
    "in another order": (0, "1 here", 0),
    "left alone": (0, "0 here", 1),
    "of another machine": (0, "0 there", 0),
}


@pytest.mark.parametrize("name", CURRENT)
def test_the_current_device_beside_an_existing_group_is_used(cuda, name, monkeypatch):
    cuda.count = 4
    cuda.current, other, wanted = CURRENT[name]
    monkeypatch.setattr(platform, "node", lambda: "here")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dist.distributed_c10d._get_default_store().set("fxtrain/current/0", other)
        place = Topology(rank=1, world_size=2, local_rank=1, local_world_size=2)
        assert devices.find_device(None, {}, place)[0] == torch.device("cuda", wanted)
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
        with raises_code("FX104", "GPU-6"):
            devices.check_own_device(*place)
    else:
        devices.check_own_device(*place)
        assert store.get("device/6") == b"GPU-6"
