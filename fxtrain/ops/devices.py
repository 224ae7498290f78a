"""The device of a rank, and its random generators."""

import platform
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fxtrain import _extensions
from fxtrain._display import counted
from fxtrain.errors import ContextError, PlanError
from fxtrain.state import DistContext
from fxtrain.state.topology import Topology


def find_device(
    requested: str | torch.device | None, env: Mapping[str, str], topology: Topology
) -> tuple[torch.device, int]:
    """The device of this rank, and the number of devices that it drives."""
    if _extensions.xla_runtime.wants_xla(requested, env):
        return _extensions.xla_runtime.start_runtime(requested, env, topology)
    return _pick_device(requested, topology), 1


def _pick_device(requested: str | torch.device | None, topology: Topology) -> torch.device:
    world = dist.group.WORLD
    if requested is None and world is not None:  # the device for which a group exists already
        requested = world.bound_device_id
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
    index = wanted.index
    if index is None:
        # Some launchers show each rank only its own device (`srun --gpus-per-task=1`, or one entry
        # in CUDA_VISIBLE_DEVICES), so that every rank finds it at index 0.
        index = 0 if count == 1 else _index(topology)
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


def _index(topology: Topology) -> int:
    """The index of this rank's device, of several.

    Beside a process group that exists already it is the current device, as torch's communicators
    take it: scripts call `torch.cuda.set_device` before. If this rank's is the first, the script
    may have left all ranks there: then it counts if the others of its machine have other ones.
    """
    if dist.group.WORLD is None:
        return topology.local_rank
    current, host = torch.accelerator.current_device_index(), platform.node()
    if dist.get_backend() == "fake":  # whose store keeps nothing
        return current or topology.local_rank
    library: Any = dist.distributed_c10d
    store = library._get_default_store()  # torch has no public access to it
    store.set(f"fxtrain/current/{topology.rank}", f"{current} {host}")
    if current or not topology.local_rank:
        return current
    keys = [f"fxtrain/current/{rank}" for rank in range(topology.world_size)]
    entries = [entry.decode().split(" ", 1) for entry in store.multi_get(keys)]
    indices = [index for index, other in entries if other == host]
    return current if len(set(indices)) == len(indices) else topology.local_rank


def check_own_device(
    topology: Topology, device: torch.device, store: Any, timeout_s: float
) -> None:
    """Check that no other rank of this node uses the same GPU: CUDA's are compared in the store."""
    if device.type != "cuda":
        return
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    store.set(f"device/{topology.rank}", uuid)
    first = topology.rank - topology.local_rank
    node = range(max(first, 0), min(first + topology.local_world_size, topology.world_size))
    keys = {rank: f"device/{rank}" for rank in node}
    store.wait(list(keys.values()), timedelta(seconds=timeout_s))
    same = [rank for rank, key in keys.items() if store.get(key).decode() == uuid]
    if len(same) > 1:
        raise ContextError(
            f"Ranks {', '.join(map(str, same))} of this node use the same device {device} "
            f"({uuid}), and NCCL needs one device per rank. Launch one rank per visible device, "
            f"or make one device visible to each rank (CUDA_VISIBLE_DEVICES).",
            code="FX104",
        )


def as_scalar(value: Any, like: Tensor) -> Tensor:
    """A number or tensor with the dtype and on the device of another tensor, detached.

    The host does not wait for the device. The number is copied, since XLA would compile a new graph
    for each value of a number that a kernel writes.
    """
    if isinstance(value, Tensor):
        scalar = value.detach().to(like.dtype)
    else:
        scalar = torch.tensor(value, dtype=like.dtype, device="cpu")
    return scalar.to(like.device, non_blocking=like.device.type != "cpu")


def device_random_state(ctx: DistContext) -> Tensor | None:
    """The state of the device's random generator: bytes, or a number for XLA.

    None if the device has no separate generator.
    """
    if ctx.device.type in ("cpu", "meta"):
        return None
    if ctx.device.type == "xla":
        state = _extensions.xla_runtime.xla_random_state(ctx)
        signed = state - (1 << 64) if state >> 63 else state  # the same 64 bits
        return torch.tensor(signed, device="cpu")
    return torch.get_device_module(ctx.device).get_rng_state(ctx.device).cpu()


def set_device_random_state(ctx: DistContext, state: Tensor) -> None:
    """Restore a state of the device's random generator that `device_random_state` returned.

    The state of another device type is ignored.
    """
    if ctx.device.type == "xla":
        if state.dtype == torch.int64:
            _extensions.xla_runtime.seed_device(int(state) % (1 << 64), ctx)
    elif ctx.device.type not in ("cpu", "meta") and state.dtype == torch.uint8:
        torch.get_device_module(ctx.device).set_rng_state(state, ctx.device)


def synchronize(ctx: DistContext) -> None:
    """Wait until copies from the context's device have arrived."""
    # Copies from an XLA device to the host are synchronous.
    if ctx.device.type not in ("cpu", "meta", "xla"):
        torch.accelerator.synchronize(ctx.device)


def seed(value: int, ctx: DistContext, *, per_rank: bool = False) -> int:
    """Seed Python's, NumPy's (if it is imported) and torch's generators.

    Args:
        value: The seed of the run, 0 to 2**63 - 1.
        per_rank: Use a different seed on each rank, for example for dropout or augmentation; by
            default all ranks use the same, for example to initialize a model.

    Returns:
        The seed that this rank used.

    Effects:
        Changes the process's global generators and those of the context's device.

    Raises:
        PlanError: the seed is not an int in this range.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.seed(7, ctx)
        7
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise PlanError(f"seed({value!r}): not a seed. Pass an int from 0 to 2**63 - 1.")
    rank_seed = value + ctx.rank if per_rank else value
    torch.manual_seed(rank_seed)
    seed_host(rank_seed)
    if ctx.device.type == "xla":
        _extensions.xla_runtime.seed_device(rank_seed, ctx)
    return rank_seed


def seed_host(value: int) -> None:
    """Seed Python's, torch's CPU and NumPy's (if it is imported) generators."""
    random.seed(value)
    # torch.manual_seed would also queue work on every accelerator at each call.
    torch.default_generator.manual_seed(value)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed([value & 0xFFFFFFFF, value >> 32])


def host_random_state() -> tuple[Any, ...]:
    """The state of torch's CPU, Python's and NumPy's (if it is imported) generators."""
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state(legacy=False) if numpy else None
    return torch.default_generator.get_state(), random.getstate(), of_numpy


def set_host_random_state(state: tuple[Any, ...]) -> None:
    """Restore what `host_random_state` returned."""
    torch.default_generator.set_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])


@contextmanager
def fork_rng(ctx: DistContext, value: int | None = None) -> Iterator[None]:
    """Run a block without affecting the random generators outside it.

    Args:
        value: Seed for the block; None starts from the current state of the generators.

    Effects:
        Saves and restores Python's, NumPy's (if imported) and torch's CPU and device
        generators.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     _ = fx.ops.seed(1, ctx)
        ...     with fx.ops.fork_rng(ctx, 5):
        ...         inside = torch.rand(1)
        ...     after = torch.rand(1)
        ...     _ = fx.ops.seed(1, ctx)
        ...     bool(torch.rand(1) == after)
        True
    """
    host, device = host_random_state(), device_random_state(ctx)
    try:
        if value is not None:
            seed(value, ctx)
        yield
    finally:
        set_host_random_state(host)
        if device is not None:
            set_device_random_state(ctx, device)
