"""The device of a rank, and its random generator."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fxtrain._display import counted
from fxtrain.errors import ContextError
from fxtrain.ops import xla_runtime
from fxtrain.state import DistContext
from fxtrain.state.topology.checks import Topology


def find_device(
    requested: str | torch.device | None, env: Mapping[str, str], topology: Topology
) -> tuple[torch.device, int]:
    """The device of this rank, and the number of devices that it drives."""
    if xla_runtime.wants_xla(requested, env):
        return xla_runtime.start_runtime(requested, env, topology)
    return _pick_device(requested, topology), 1


def _pick_device(requested: str | torch.device | None, topology: Topology) -> torch.device:
    requested = _bound_device() if requested is None else requested
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if requested is None and accelerator is None:
        return torch.device("cpu")
    try:
        wanted = torch.device(requested) if requested is not None else accelerator
    except RuntimeError as error:
        raise ContextError(
            f"detect(device={requested!r}): not a device. {error}", code="FX104"
        ) from error
    assert wanted is not None
    if wanted.type in ("cpu", "meta"):
        return torch.device(wanted.type)
    if accelerator is None or wanted.type != accelerator.type:
        available = "only the CPU" if accelerator is None else f"{accelerator.type} and the CPU"
        raise ContextError(
            f"detect(device={str(wanted)!r}): torch finds {available} on this machine. Omit device "
            f"to use what is available, or check the driver and the build of torch.",
            code="FX104",
        )
    if wanted.type == "mps":
        return wanted
    count = torch.accelerator.device_count()
    index = _own_index(topology, count) if wanted.index is None else wanted.index
    if index >= count:
        raise ContextError(
            f"Rank {topology.rank} (local rank {topology.local_rank}) needs "
            f"{wanted.type}:{index}, but this node has "
            f"{counted(count, f'{wanted.type} device')}. Launch at most {counted(count, 'rank')} "
            f"per node.",
            code="FX104",
        )
    torch.accelerator.set_device_index(index)
    return torch.device(wanted.type, index)


def _bound_device() -> torch.device | None:
    """The device that an existing process group was opened for (`device_id`); None without one."""
    world = dist.group.WORLD
    return None if world is None else world.bound_device_id


def _own_index(topology: Topology, count: int) -> int:
    """The index of this rank's device among those that the process sees.

    Where a launcher shows each rank only its own device (`srun --gpus-per-task=1`, or one entry
    in CUDA_VISIBLE_DEVICES), every rank finds it at index 0.
    """
    return 0 if count == 1 else topology.local_rank


def check_own_device(
    topology: Topology, device: torch.device, store: Any, timeout_s: float
) -> None:
    """Check that no other rank of this node uses the same GPU.

    Effects:
        Under CUDA, one key in the store, and one read for each other rank of the node.

    Raises:
        ContextError: another rank has the same device; on the ranks of this node.
    """
    if device.type != "cuda":
        return
    mine = str(torch.cuda.get_device_properties(device).uuid)
    store.set(f"device/{topology.rank}", mine)
    first = topology.rank - topology.local_rank
    node = range(max(first, 0), min(first + topology.local_world_size, topology.world_size))
    keys = {rank: f"device/{rank}" for rank in node}
    store.wait(list(keys.values()), timedelta(seconds=timeout_s))
    same = [rank for rank, key in keys.items() if store.get(key).decode() == mine]
    if len(same) > 1:
        raise ContextError(
            f"Ranks {', '.join(map(str, same))} of this node use the same device {device} "
            f"({mine}), and NCCL needs one device per rank. Launch one rank per visible device, "
            f"or make one device visible to each rank (CUDA_VISIBLE_DEVICES).",
            code="FX104",
        )


def as_scalar(value: Any, like: Tensor) -> Tensor:
    """A number or tensor with the dtype and on the device of another tensor, detached.

    The host does not wait for the device. The number is copied, since XLA would compile a new graph
    for each value of a number that a kernel writes.
    """
    if isinstance(value, Tensor):
        found = value.detach().to(like.dtype)
    else:
        found = torch.tensor(value, dtype=like.dtype, device="cpu")
    return found.to(like.device, non_blocking=like.device.type != "cpu")


def device_random_state(ctx: DistContext) -> Tensor | None:
    """The state of the device's random generator: bytes, or a number for XLA.

    None if the device has no separate generator.
    """
    if ctx.device.type in ("cpu", "meta"):
        return None
    if ctx.device.type == "xla":
        state = xla_runtime.random_state(ctx)
        signed = state - (1 << 64) if state >> 63 else state  # the same 64 bits
        return torch.tensor(signed, device="cpu")
    return _module(ctx).get_rng_state(ctx.device).cpu()


def set_device_random_state(ctx: DistContext, state: Tensor) -> None:
    """Restore a state of the device's random generator that `device_random_state` returned.

    The state of another device type is ignored.
    """
    if ctx.device.type == "xla":
        if state.dtype == torch.int64:
            xla_runtime.seed(int(state) % (1 << 64), ctx)
    elif ctx.device.type not in ("cpu", "meta") and state.dtype == torch.uint8:
        _module(ctx).set_rng_state(state, ctx.device)


def synchronize(ctx: DistContext) -> None:
    """Wait until copies from the context's device have arrived."""
    # Copies from an XLA device to the host are synchronous.
    if ctx.device.type not in ("cpu", "meta", "xla"):
        torch.accelerator.synchronize(ctx.device)


def _module(ctx: DistContext) -> Any:
    """torch's module of a device type, such as torch.cuda."""
    return torch.get_device_module(ctx.device)
