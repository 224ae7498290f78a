"""Host buffers of background saves and of streamed units, with CUDA's runtime replaced."""

import mmap
from types import SimpleNamespace

import pytest
import torch

from fxtrain.backends.offload.streaming import DeviceCopies
from fxtrain.checkpoint import background
from fxtrain.ops.pinned_buffers import pinned_buffer
from fxtrain.state import DistContext


@pytest.fixture
def runtime(monkeypatch):
    """CUDA's runtime, which refuses to pin memory while `refused` is not 0."""
    calls, unread = [], []  # CUDA keeps the error of a call until a kernel is launched
    found = SimpleNamespace(calls=calls, unread=unread, refused=0)

    def register(*place):
        calls.append(("register", *place))
        unread.extend([found.refused] if found.refused else [])
        return found.refused

    def launch(*_, **__):
        if unread:
            raise RuntimeError(f"CUDA error {unread.pop()}")

    found.cudaHostRegister = register
    found.cudaHostUnregister = lambda address: calls.append(("unregister", address))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch, "zeros", launch)
    return found


@pytest.mark.parametrize("refused", [0, 2])
def test_the_buffer_of_a_save_is_pinned_where_it_is(refused, runtime, caplog):
    runtime.refused = refused
    ctx = DistContext(device=torch.device("cuda", 0))
    buffer = background._buffer(ctx, 3 << 20)
    address = buffer.data_ptr()
    assert background._buffer(ctx, 1 << 20) is buffer  # used again
    assert not runtime.unread
    assert runtime.calls == [("register", address, 3 << 20, 1)]
    del buffer
    ctx.comm.slot(background.CheckpointState).buffer = None
    assert runtime.calls[1:] == ([] if refused else [("unregister", address)])
    assert ("memory is not pinned" in caplog.text) == bool(refused)


@pytest.mark.parametrize("nbytes", [1, mmap.PAGESIZE, mmap.PAGESIZE + 1])
def test_whole_pages_are_pinned_and_no_power_of_two(nbytes, runtime):
    buffer, refused = pinned_buffer(nbytes, "cuda")
    ((_, address, size, _),) = runtime.calls
    assert (buffer.numel(), refused) == (nbytes, "")
    assert address % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
    assert nbytes <= size < nbytes + mmap.PAGESIZE
    assert buffer.untyped_storage().nbytes() >= address - buffer.data_ptr() + size


@pytest.mark.parametrize("pin", [True, False])
def test_streamed_units_stay_pageable_after_a_refusal(pin, runtime, caplog):
    runtime.refused = 2
    copies = DeviceCopies(units=(), prefetch=0, pin=pin)
    copies.streams[torch.device("cuda", 0)] = SimpleNamespace(synchronize=lambda: None)
    sizes = [copies.host_buffer(size << 20).numel() >> 20 for size in (3, 5, 1)]
    assert sizes == [3, 5, 1]
    assert len(runtime.calls) == len(caplog.records) == int(pin)
    assert ("Offload(pin=True): 3 MiB of host memory could not be pinned" in caplog.text) == pin


def test_streamed_units_are_pinned_until_they_are_closed(runtime):
    unit = SimpleNamespace(host=None)
    copies = DeviceCopies(units=(unit,), prefetch=0, pin=True)
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(len(runtime.calls)))
    copies.streams[torch.device("cuda", 0)] = stream
    unit.host = copies.host_buffer(3 << 20)
    copies.close()
    assert [call[0] for call in runtime.calls] == ["register", "unregister"]
    assert waited == [1]  # copies have ended when pages are unlocked
