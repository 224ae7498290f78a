"""Measurements that tests make on a GPU, and their replacements on another device.

`FXTRAIN_GPU_TESTS_ON=cpu` (or `shadow`) runs the tests marked `gpu` on that device, so that their
code has run before a GPU is at hand. What only CUDA can measure is then replaced or left out.
"""

import os
import time
import warnings
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fxtrain as fx
from fxtrain import ops

STAND_IN = os.environ.get("FXTRAIN_GPU_TESTS_ON", "")
DEVICE = STAND_IN or "cuda"
WHERE = "cpu" if STAND_IN else "cuda"  # launched programs
LIBRARIES = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo", "shadow": "cpu:gloo,shadow:hostgloo"}
CYCLES = 2_000_000_000  # of a GPU in a second, about

# Messages of torch that are no fault here: the pools make every warning an error.
EXPECTED = (
    "Synchronization debug mode is a prototype",
    "TensorFloat32 tensor cores",
    "Please use the new API settings to control TF32",
    "Not enough SMs to use max_autotune",
    "The CUDA Graph is empty",
    "Warning: Profiler clears events",
    "Online softmax is disabled",
)


def gpus():
    """The number of GPUs; 8 where another device replaces them."""
    return 8 if STAND_IN else torch.cuda.device_count()


def many_ranks():
    """An even number of ranks, for meshes of two axes: of GPUs, and four in a rehearsal."""
    return 4 if STAND_IN else min(torch.cuda.device_count(), 8) // 2 * 2


def is_gpu(ctx):
    return ctx.device.type == "cuda"


def expect_warnings():
    """Let pass, until the end of a call of a pool, what torch says about CUDA and about itself."""
    # Compiling imports parts of torch that torch itself advises against.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
    for message in EXPECTED:
        warnings.filterwarnings("ignore", message=f".*{message}")


def synchronize(ctx):
    if ctx.device.type != "cpu":
        torch.accelerator.synchronize(ctx.device)


def keep_busy(ctx, seconds):
    """Start a kernel that runs for some seconds; returns at once."""
    if is_gpu(ctx):
        torch.cuda._sleep(int(seconds * CYCLES))


@contextmanager
def no_waits(ctx):
    """A block in which it is an error that the host waits for the device."""
    if not is_gpu(ctx):
        yield
        return
    expect_warnings()
    torch.cuda.synchronize(ctx.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class _Waits(TorchDispatchMode):
    """Counts operators whose result is on the host, or has a shape that depends on values."""

    READS = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.bincount.default,
        torch.ops.aten.equal.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.nonzero.default,
    )

    def __init__(self, device):
        super().__init__()
        self.device, self.count = device.type, 0

    def _is_on(self, tensor, kind):
        return isinstance(tensor, torch.Tensor) and tensor.device.type == kind

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.count += self._is_on(args[0], self.device) and self._is_on(out, "cpu")
        elif func is torch.ops.aten.copy_.default:
            self.count += self._is_on(args[1], self.device) and self._is_on(args[0], "cpu")
        elif func in self.READS:
            self.count += self._is_on(args[0], self.device)
        return out


def waits(ctx, run):
    """How often the host waits for the device in a call; 0 on a CPU, which has none."""
    if ctx.device.type == "cpu":
        run()
        return 0
    if not is_gpu(ctx):
        with _Waits(ctx.device) as seen:
            run()
        return seen.count
    expect_warnings()
    synchronize(ctx)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(each.message) for each in told)


class _Operators(TorchDispatchMode):
    """Counts operators that compute; views launch no kernel."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and func is not torch.ops.aten.detach.default
        return func(*args, **(kwargs or {}))


def kernels(ctx, run):
    """How many kernels a call launches; without a GPU, how many operators compute in it."""
    run()
    if not is_gpu(ctx):
        with _Operators() as seen:
            run()
        return seen.count
    synchronize(ctx)
    expect_warnings()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        run()
        synchronize(ctx)
    events = [one for one in trace.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not one.name.startswith(("Memcpy", "Memset")) for one in events)


def allocations(ctx, run):
    """How many blocks of device memory a call takes from torch's allocator."""
    if not is_gpu(ctx):
        return 0
    run()
    before = torch.cuda.memory_stats(ctx.device)["allocation.all.allocated"]
    run()
    return torch.cuda.memory_stats(ctx.device)["allocation.all.allocated"] - before


def differ_once_verified(ctx):
    """Rank 0 reads the result of a call that was verified before, and rank 1 makes another one.

    Returns:
        The text of the error and the seconds until then; none and 0 without an error.
    """
    mine = torch.ones(4, device=ctx.device)
    ops.reduce(mine, ctx, op="sum")
    ops.barrier(ctx)
    began = time.monotonic()
    try:
        if ctx.rank == 0:
            float(ops.reduce(mine, ctx, op="sum")[0])
        ops.barrier(ctx)
    except fx.CollectiveError as error:
        return str(error), time.monotonic() - began
    return "", 0.0
