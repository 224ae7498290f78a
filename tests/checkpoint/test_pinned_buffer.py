"""The host buffer of background saves in page-locked memory, with CUDA's runtime replaced."""

from types import SimpleNamespace

import pytest
import torch

from fxtrain.checkpoint import host_copies
from fxtrain.state import DistContext


@pytest.mark.parametrize("refused", [0, 2])
def test_the_buffer_of_cuda_is_pinned_where_it_is(refused, monkeypatch, caplog):
    calls = []
    unread = []  # CUDA keeps the error of a call until a kernel is launched, and torch raises it

    def register(*place):
        calls.append(("register", *place))
        unread.extend([refused] if refused else [])
        return refused

    def launch(*_, **__):
        if unread:
            raise RuntimeError(f"CUDA error {unread.pop()}")

    runtime = SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=lambda address: calls.append(("unregister", address)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", launch)
    monkeypatch.setattr(host_copies, "_accelerated", lambda _: True)
    ctx = DistContext(device=torch.device("cuda", 0))
    buffer = host_copies._buffer(ctx, 3 << 20)
    address = buffer.data_ptr()
    assert host_copies._buffer(ctx, 1 << 20) is buffer  # used again
    assert not unread
    assert calls == [("register", address, 3 << 20, 0)]
    del buffer
    ctx.comm.state.save_buffer = None
    assert calls[1:] == ([] if refused else [("unregister", address)])
    assert ("3 MiB of host memory could not be pinned" in caplog.text) == bool(refused)
