"""Records what real tensors do, to compare a dry run with it."""

import time
from contextlib import contextmanager

import torch
from torch._guards import active_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode

from fxtrain.profiling.rehearsal import load_in_process
from fxtrain.profiling.watching import recording

_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
_DEVICE = torch.ops.prim.device.default  # without effect


class _RealValues(TorchDispatchMode):
    """Calls `record` after each operator, as the mode of a dry run does."""

    record = None
    after_collective = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # DTensors are unwrapped first; their local tensors are dispatched here later.
        # Operations inside another fake mode only compute shapes.
        if any(not _is_plain(kind) for kind in types):
            return NotImplemented
        if self.after_collective:
            # A thread of gloo needs the interpreter's lock to release the tensors that it sent.
            time.sleep(0.001)
            self.after_collective -= 1
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.after_collective = 4
        if func is not _DEVICE and active_fake_mode() is None:
            self.record(func, args, kwargs or {}, out)
        return out


def _is_plain(kind):
    """Whether tensors of a class have memory of their own and no dispatch of their own."""
    return kind.__torch_dispatch__ is _NO_DISPATCH or kind.__name__ == "FakeTensor"


@contextmanager
def recording_real(watch):
    """Record a loop that trains for real."""
    mode = _RealValues()
    with load_in_process(watch), recording(watch, mode), mode:
        yield
