"""Buffers in host memory that an accelerator reads."""

import contextlib
import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of this process


def pinned_buffer(nbytes: int, device_type: str) -> tuple[Tensor, str]:
    """A uint8 buffer in page-locked memory; and why it is pageable, where that was refused.

    torch's allocator of pinned memory rounds sizes up to a power of two and keeps what it freed,
    which may be twice the size, so CUDA locks the pages of the buffer itself. They are unlocked
    when the tensor that is returned is freed; copies must have ended by then. "cpu" and "mps" lock
    nothing.
    """
    if device_type in ("cpu", "mps") or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu"), ""
    if device_type != "cuda":
        buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        try:
            return buffer.pin_memory(), ""
        except RuntimeError as error:
            return buffer, str(error)
    # Whole pages, so that no other memory is in a page that is locked here.
    page = mmap.PAGESIZE
    size = -(-nbytes // page) * page
    space = torch.empty(size + page, dtype=torch.uint8, device="cpu")
    start = -space.data_ptr() % page
    buffer = space[start : start + nbytes]
    runtime: Any = torch.cuda.cudart()
    address = buffer.data_ptr()
    refused = int(runtime.cudaHostRegister(address, size, _PORTABLE))
    if refused:
        _forget_error()
        return buffer, f"CUDA error {refused}"
    weakref.finalize(buffer, runtime.cudaHostUnregister, address)
    return buffer, ""


def _forget_error() -> None:
    """Take CUDA's record of a refused call, which torch would raise at its next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
