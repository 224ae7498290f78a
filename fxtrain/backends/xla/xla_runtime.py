"""torch_xla's runtime, for contexts on XLA devices.

No other module below the strategies calls the package, which is imported only for such a context.
"""

import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fxtrain import _tree
from fxtrain._optional import optional
from fxtrain.errors import ContextError, MissingPackageError
from fxtrain.ops.rendezvous_store import first_line
from fxtrain.state import DistContext, Mesh
from fxtrain.state.topology import Topology

_PACKAGE = "torch_xla"
_DEVICES = "PJRT_DEVICE"
# Names of the runtime's axes; SpmdFullyShardedDataParallel requires the second name.
_AXES = ("data", "fsdp")


def wants_xla(requested: str | torch.device | None, env: Mapping[str, str]) -> bool:
    """Whether a context uses XLA: requested by argument, or selected by PJRT's variable."""
    if requested is None:
        return _DEVICES in env
    return str(requested).split(":")[0] == "xla"


def import_xla(part: str = "", *, needed_by: str = "XLA") -> ModuleType:
    """torch_xla, or a module of it, such as `runtime`; one built for another torch is refused."""
    if _PACKAGE not in sys.modules:
        _check_versions(needed_by)
    optional(_PACKAGE, extra="xla", needed_by=needed_by)
    return importlib.import_module(f"{_PACKAGE}.{part}" if part else _PACKAGE)


def _check_versions(needed_by: str) -> None:
    """Compare versions before importing: otherwise the import fails on an undefined symbol."""
    try:
        version = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return  # `optional` reports it
    if version.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise MissingPackageError(
            f"{needed_by} needs the torch_xla that is built for torch {torch.__version__}, but "
            f"{version} is installed. Install the same version of both, in a separate environment: "
            f"pip install torch=={version} torch_xla=={version}",
            name=_PACKAGE,
        )


def start_runtime(
    requested: str | torch.device | None, env: Mapping[str, str], topology: Topology
) -> tuple[torch.device, int]:
    """Start the runtime; return the device of this process and how many devices it drives.

    A single process with several devices drives them as one (SPMD), unless the request names one
    by number. The device type and SPMD are selected for the whole process, as torch_xla does.
    """
    named = f"device={str(requested)!r}" if requested is not None else f"{_DEVICES}={env[_DEVICES]}"
    xla = import_xla(needed_by=f"detect with {named}")
    runtime = import_xla("runtime")
    index = None if requested is None else torch.device(requested).index
    try:
        if _DEVICES in env:
            runtime.set_device_type(env[_DEVICES])
        count = runtime.addressable_runtime_device_count()
    except RuntimeError as error:
        raise ContextError(
            f"detect: torch_xla has no device for {_DEVICES}={env.get(_DEVICES, 'unset')}: "
            f"{first_line(error)} Set {_DEVICES} to TPU or CPU before the process starts.",
            code="FX104",
        ) from error
    if index is not None and index >= count:
        raise ContextError(
            f"detect(device={str(requested)!r}): this process has {count} XLA devices, numbered "
            f"from xla:0. Omit the number to use all of them.",
            code="FX104",
        )
    if runtime.process_count() > 1 and topology.world_size == 1:
        raise ContextError(
            f"detect: the XLA runtime has {runtime.process_count()} processes, but this process "
            f"found a world size of 1. Start one process for each device with torch_xla.launch; on "
            f"a pod, set TPU_WORKER_ID and TPU_WORKER_HOSTNAMES on every host."
        )
    several = count > 1 and index is None
    if several and topology.world_size > 1:
        raise ContextError(
            f"detect: this process is one of {topology.world_size} and drives {count} XLA "
            f"devices. SPMD over several processes is not supported: start one process for "
            f"each device with torch_xla.launch, or a single process."
        )
    if several and not runtime.is_spmd():
        with warnings.catch_warnings():
            # Replicating existing tensors is correct: every device has the same values.
            warnings.filterwarnings("ignore", message="Replicating tensors already initialized")
            runtime.use_spmd()
    return xla.device(None if several else index), count if several else 1


def replicate(topology: Topology, device: torch.device) -> int:
    """Connect the processes of a run, one for each device; return the rank of this one.

    The rank is the runtime's, which orders collectives; the launcher's may differ.
    """
    runtime = import_xla("runtime")
    model = import_xla("core.xla_model")
    import_xla("distributed.xla_backend")  # makes "xla" known to torch.distributed
    model.set_replication(device, [device])
    rank, world_size = int(runtime.global_ordinal()), runtime.global_device_count()
    if world_size != topology.world_size:
        raise ContextError(
            f"detect: the launcher started {topology.world_size} processes, but the XLA runtime "
            f"has {world_size} devices. Start one process for each device with "
            f"torch_xla.launch, which configures the runtime."
        )
    return rank


def register_subgroups(group: Any, device: torch.device, parts: list[list[int]]) -> None:
    """Give a group of some ranks the list of all groups, which an XLA collective needs."""
    backend = group if hasattr(group, "_mesh") else group._get_backend(device)
    backend._mesh = parts


def spmd_mesh(mesh: Mesh) -> Any:
    """The devices of one process as torch_xla's mesh of data × fsdp."""
    spmd = import_xla("distributed.spmd")
    sizes = (mesh.replicate, mesh.shard)
    return spmd.Mesh(list(range(mesh.replicate * mesh.shard)), sizes, _AXES)


def batch_sharding(tensor: Tensor) -> tuple[Any, ...]:
    """The sharding of a batch tensor: its first dimension over all devices."""
    return (_AXES, *[None] * (tensor.ndim - 1)) if tensor.ndim else ()


def to_xla(tree: Any, ctx: DistContext) -> Any:
    """Copy a tree to the XLA device, in one transfer per number of tensor dimensions.

    Under SPMD each device gets its rows only.
    """
    leaves, shape = _tree.flatten(tree)
    groups: dict[int, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.device != ctx.device:
            groups.setdefault(leaf.ndim, []).append(place)
    model = import_xla("core.xla_model")
    mesh = spmd_mesh(ctx.mesh) if ctx.devices > 1 else None
    for places in groups.values():
        tensors = [leaves[place].detach().as_subclass(Tensor).cpu() for place in places]
        sharding = None
        if mesh is not None and tensors[0].ndim:
            sharding = import_xla("distributed.spmd").ShardingSpec(mesh, batch_sharding(tensors[0]))
        sent = model.send_cpu_data_to_device(tensors, ctx.device, sharding)
        for place, tensor in zip(places, sent, strict=True):
            leaves[place] = tensor
    return _tree.unflatten(shape, leaves)


def mean(tensors: list[Tensor], ranks: int) -> None:
    """Average tensors over all replicas in place, in one collective of the graph."""
    model = import_xla("core.xla_model")
    model.all_reduce(model.REDUCE_SUM, tensors, scale=1.0 / ranks, pin_layout=False)


def mark_step() -> None:
    """End the graph that was traced so far, and let the device run it."""
    import_xla().sync()


def compilations() -> int:
    """Graphs that this process has compiled so far."""
    return import_xla("debug.metrics").counter_value("UncachedCompile") or 0


def seed_device(value: int, ctx: DistContext) -> None:
    """Seed the device's generator, which torch.manual_seed does not."""
    import_xla("core.xla_model").set_rng_state(value, str(ctx.device))


def xla_random_state(ctx: DistContext) -> int:
    """The state of the device's generator, an unsigned number; it changes at each mark_step."""
    return import_xla("core.xla_model").get_rng_state(str(ctx.device))
