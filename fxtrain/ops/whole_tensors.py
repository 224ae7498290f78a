"""The tensors of a module by name: which are tied, which part is local, full ones, and files."""

import functools
import importlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parameter import is_lazy

from fxtrain import _extensions
from fxtrain._reading import StrPath, path_problem, write_file
from fxtrain.errors import CheckpointError
from fxtrain.ops.same_errors import fail_together
from fxtrain.state import DistContext, TensorIndex, Weight
from fxtrain.state.context import check_connected


def weights_of(module: nn.Module) -> dict[str, Weight]:
    """Every tensor of a module by name, none copied: those of its state dict, then all others."""
    stored = _extensions.stored_tensors(module)
    weights = {plain_name(name): weight_of(value) for name, value in stored.items()}
    known = {id(value) for value in stored.values()}
    known |= {id(part.weight) for _, part, _ in _extensions.quantized_layers(module)}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if id(tensor) not in known:
                weights.setdefault(plain_name(name), attrs.evolve(weight_of(tensor), stored=False))
    return weights


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a DTensor, without importing the package that defines it."""
    return hasattr(tensor, "placements") and hasattr(tensor, "full_tensor")


def weight_of(tensor: Any) -> Weight:
    """The record of a tensor, a DTensor, or what else a state dict contains; callers check it."""
    return Weight(
        like=tensor,
        shape=() if is_lazy(tensor) else tuple(getattr(tensor, "shape", ())),
        dtype=getattr(tensor, "dtype", torch.uint8),
        key=identity(tensor) if isinstance(tensor, Tensor) else id(tensor),
        gather=functools.partial(full_values, tensor),
        fill=functools.partial(_fill, tensor),
    )


def plain_name(name: str) -> str:
    """A name without the prefixes that compiling a submodule adds."""
    return name.replace("_orig_mod.", "")


def without_compile(module: nn.Module) -> nn.Module:
    """The module inside the wrapper that `torch.compile(module)` returns; any other as it is."""
    while isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
        module = inner
    return module


def local_values(tensor: Any) -> Tensor:
    """This rank's part of a tensor that may be a DTensor, sharing memory, without a gradient."""
    local: Any = (tensor.to_local() if is_sharded(tensor) else tensor).detach()
    # torchao's weights that are gathered in float8 have no memory of their own.
    casts = type(local).__name__ == "WeightWithDynamicFloat8CastTensor"
    return local._tensor if casts else local


def local_part(tensor: Any) -> Any:
    """This rank's tensor of a DTensor, in whatever class it is; any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # else a view of it
        return tensor.to_local()


def identity(tensor: Tensor) -> Hashable:
    """A key that is equal for two tensors only if they are the same values in memory."""
    if is_sharded(tensor) or is_lazy(tensor) or tensor.layout is not torch.strided:
        return id(tensor)
    if tensor.is_meta or tensor.numel() == 0 or tensor.data_ptr() == 0:
        return id(tensor)
    where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.is_neg(), tensor.is_conj())
    return (*where, tuple(tensor.shape), tensor.stride())


def part_of(tensor: Any) -> TensorIndex | None:
    """The indices, by dimension, of a DTensor's local part; None for a plain tensor.

    torch distributes a tensor of indices in the same way, without traffic.
    """
    if not is_sharded(tensor):
        return None
    # Imported already, since there is a DTensor; otherwise the import takes over a second.
    package = importlib.import_module("torch.distributed.tensor")
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"A DTensor with placements {tensor.placements} has only partial sums on each rank. "
            f"Redistribute it to Shard or Replicate first."
        )
    return tuple(_rows(tensor, dim, package) for dim in range(tensor.ndim))


def _rows(tensor: Any, dim: int, package: Any) -> slice | Tensor:
    size = tensor.shape[dim]
    along = [
        placement
        if getattr(placement, "dim", None) in (dim, dim - tensor.ndim)
        else package.Replicate()
        for placement in tensor.placements
    ]
    if all(placement.is_replicate() for placement in along):
        return slice(0, size)
    numbers = torch.arange(size, device="cpu").reshape(
        [-1 if d == dim else 1 for d in range(tensor.ndim)]
    )
    laid = package.distribute_tensor(numbers, tensor.device_mesh, along, src_data_rank=None)
    indices = laid.to_local().flatten().cpu()
    start, stop = (int(indices[0]), int(indices[-1]) + 1) if len(indices) else (0, 0)
    return slice(start, stop) if stop - start == len(indices) else indices


@torch.no_grad()
def full_values(tensor: Any) -> Tensor:
    """All values of a tensor without a gradient; gathers a DTensor on the ranks of its mesh."""
    full: Any = tensor.detach()
    if not is_sharded(full):
        return full
    device, mesh = full.device, full.device_mesh
    libraries = dist.get_backend_config(mesh.get_group(0))
    if device.type != "cpu" and f"{device.type}:gloo" in libraries:
        # torch's gather of a DTensor crashes over gloo on a GPU (2.11).
        full = _shards_on("cpu", full)
    elif device.type == "cpu" and "cpu:" not in libraries:  # offloaded; a group of NCCL alone
        full = _shards_on(mesh.device_type, full)
    # Shards of shards are gathered first, each in a call of its own: torch cannot merge these
    # gathers with those of the other dimensions, and logs so.
    placements = [*full.placements]
    for dim, placement in enumerate(placements):
        if hasattr(placement, "split_factor"):
            package = importlib.import_module("torch.distributed.tensor")
            placements[dim] = package.Replicate()
            full = full.redistribute(placements=placements)
    return full.full_tensor().to(device)


def _shards_on(kind: str, tensor: Any) -> Any:
    """The same shards on a kind of device, in a mesh of that kind."""
    package = importlib.import_module("torch.distributed.tensor")
    mesh = tensor.device_mesh
    if mesh.device_type != kind:
        mesh = package.DeviceMesh.from_group(
            mesh.get_all_groups(),
            kind,
            mesh=mesh.mesh,
            mesh_dim_names=mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim))),
        )
    return package.DTensor.from_local(
        tensor.to_local().to(kind),
        mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def set_values(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor other memory; it stays the same object, for ties and optimizers."""
    if not tensor.is_meta:
        tensor.data = value
        return
    fresh = value
    if isinstance(tensor, nn.Parameter):
        fresh = nn.Parameter(value, requires_grad=tensor.requires_grad)
    vars(fresh).update(vars(tensor))
    if type(tensor) is type(fresh) is nn.Parameter and weakref.getweakrefs(tensor):
        # torch refuses, but these stay valid: recurrent layers have some to their weights.
        torch._C._swap_tensor_impl(tensor, fresh)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        torch.utils.swap_tensors(tensor, fresh)


@torch.no_grad()
def _fill(tensor: Any, read: Callable[[TensorIndex | None], Tensor]) -> None:
    value = read(part_of(tensor))
    local_values(tensor).copy_(value)


def save(obj: object, path: StrPath, ctx: DistContext) -> None:
    """Write a nested container of tensors to a safetensors file, on rank 0 only.

    Every rank calls it, and the value of rank 0 is written; the other ranks may pass None. With
    `ctx.axis("node")`, the first rank of each machine writes its value, for example to a local
    disk. A run's models, optimizers and position belong in a checkpoint (`fx.save`), and a
    model's weights in an export (`fx.export`).

    Args:
        obj: Dicts, lists and tuples of tensors, nested arbitrarily. A tensor is named by its keys
            and indices, joined by dots: `{"mean": {"loss": x}}` is stored as `mean.loss`.
        path: The file. Missing parent folders are created.
        ctx: The ranks that call it.

    Effects:
        Rank 0 copies the tensors to host memory, writes a new file and renames it: a file of that
        name is replaced completely or not at all. One exchange of packets; none at one rank.

    Raises:
        CheckpointError: rank 0's value contains something other than tensors, or the file cannot
            be written; on every rank.

    Example:
        >>> import fxtrain as fx, safetensors.torch, tempfile, torch
        >>> path = f"{tempfile.mkdtemp()}/statistics.safetensors"
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.save({"mean": torch.zeros(2), "bins": [torch.ones(3)]}, path, ctx)
        >>> sorted(safetensors.torch.load_file(path))
        ['bins.0', 'mean']
    """
    check_connected("save", ctx)
    with fail_together(ctx, f"save to {path}", src=0):
        if ctx.rank == 0:
            if problem := path_problem(path):
                raise CheckpointError(f"save(path=...): {problem}.")
            tensors = _on_host(obj)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_file(path, _to_bytes(tensors))


def _to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save as to_bytes  # not needed by `import fxtrain`

    try:
        return to_bytes(dict(tensors), {"format": "pt"})
    except KeyError as error:
        raise CheckpointError(
            f"A safetensors file has no dtype {error}. Convert the tensor first: tensor.to(dtype), "
            f"or torch.view_as_real(tensor) for complex numbers."
        ) from None


def _on_host(obj: Any) -> dict[str, Tensor]:
    """The tensors of a container by name, each with memory of its own."""
    if not isinstance(obj, Mapping):
        raise CheckpointError(
            f"save takes a dict of tensors, found {type(obj).__name__}. Name what is written: "
            f'fx.ops.save({{"x": value}}, path, ctx).'
        )
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, leaf in _named(obj):
        if name in tensors:
            raise CheckpointError(f"Two tensors are named {name!r}. Rename one of their keys.")
        if problem := _problem(leaf):
            raise CheckpointError(f"{name} is a {problem}")
        value = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous()
        address = value.untyped_storage().data_ptr()
        # The format has no tensors that share memory.
        tensors[name] = value.clone() if address in storages else value
        storages.add(address)
    return tensors


def _named(obj: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What nested containers hold, by their keys and indices."""
    if not isinstance(obj, Mapping | list | tuple):
        yield path, obj
        return
    for key, value in obj.items() if isinstance(obj, Mapping) else enumerate(obj):
        yield from _named(value, f"{path}.{key}" if path else str(key))


def _problem(leaf: Any) -> str:
    """Why a value cannot be written, with what to do; empty if it can."""
    if not isinstance(leaf, Tensor):
        return (
            f"{type(leaf).__name__}, and a safetensors file contains only tensors. "
            f"Pass torch.tensor(value), or write other values as JSON: "
            f"fx.ops.on_main(lambda: Path(path).write_text(json.dumps(value)), ctx)."
        )
    if is_sharded(leaf):
        return (
            "DTensor, of which this rank has only a part. Pass tensor.full_tensor(), "
            "called on every rank; fx.weights(model) gives the full weights of a model."
        )
    if leaf.layout is not torch.strided or leaf.is_meta or leaf.is_quantized:
        return (
            f"{leaf.layout} tensor on {leaf.device}, which a safetensors file cannot hold. Save a "
            f"dense tensor with values."
        )
    return ""
