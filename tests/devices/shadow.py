"""Importing this module makes "shadow" a device of torch, built from shadow.cpp on first use.

A process has one such device, and it becomes torch's accelerator, so only processes of their own
import this module.
"""

import contextlib
import os
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.utils.cpp_extension import load

FOLDER = Path(__file__).parent
BUILD = FOLDER.parents[1] / ".shadow"


def build():
    """The compiled module; compiling takes about 20 s, once."""
    BUILD.mkdir(exist_ok=True)
    return load(
        "shadow_device",
        [str(FOLDER / "shadow.cpp")],
        extra_cflags=["-O0", "-g0", "-DUSE_C10D_GLOO"],
        build_directory=str(BUILD),
    )


class _Module:
    """What torch asks of `torch.shadow`."""

    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = staticmethod(lambda device: None)
    get_device_name = staticmethod(lambda device=None: "shadow")
    synchronize = staticmethod(lambda device=None: torch.accelerator.synchronize(device))
    Stream = staticmethod(lambda priority=0: torch.Stream("shadow"))
    Event = staticmethod(lambda **_: torch.Event("shadow"))
    current_stream = staticmethod(lambda device=None: torch.accelerator.current_stream(device))
    stream = staticmethod(contextlib.nullcontext)
    memory_stats = staticmethod(lambda device=None: {})
    empty_cache = staticmethod(lambda: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])

    def __init__(self, generator):
        self._generator = generator

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        self._generator.manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device=None):
        return self._generator.get_state()

    def set_rng_state(self, state, device=None):
        self._generator.set_state(state)


def _register():
    # The ninja of this environment, which torch looks for in the path.
    os.environ["PATH"] = os.pathsep.join([str(Path(os.sys.executable).parent), os.environ["PATH"]])
    compiled = build()
    torch.utils.rename_privateuse1_backend("shadow")
    torch._register_device_module("shadow", _Module(compiled.default_generator()))
    torch.utils.generate_methods_for_privateuse1_backend()

    def connect(store, rank, size, timeout):
        return compiled.host_gloo(dist.ProcessGroupGloo(store, rank, size, timeout))

    def queue(store, rank, size, timeout):
        return compiled.ordered(dist.ProcessGroupGloo(store, rank, size, timeout))

    # Pools say which one they use: versions of torch differ in which of them is the default.
    dist.Backend.register_backend("hostgloo", connect, devices=["shadow"])
    dist.Backend.register_backend("ordered", queue, devices=["shadow"])
    # FSDP assigns to `.data`, which torch allows between the CPU and devices of its own only.
    _fsdp_init._move_states_to_device = _move_states


def _move_states(parameters, buffers, device):
    for tensor in (*parameters, *buffers):
        if tensor.device != device:
            moved = tensor.detach().to(device)
            if isinstance(tensor, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)


_register()
