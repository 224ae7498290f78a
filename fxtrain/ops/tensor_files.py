"""Write tensors to a file, once for all ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxtrain._reading import StrPath, path_problem, write_file
from fxtrain.errors import CheckpointError
from fxtrain.ops.same_errors import fail_together
from fxtrain.ops.transport.mismatches import check_is_context
from fxtrain.precision import is_sharded
from fxtrain.state import DistContext
from fxtrain.state.context import check_connected


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
    check_is_context("save", ctx)
    check_connected("save", ctx)
    with fail_together(ctx, f"save to {path}"):
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
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    _collect(obj, "", tensors)
    for name, tensor in tensors.items():
        value = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        address = value.untyped_storage().data_ptr()
        # The format has no tensors that share memory.
        tensors[name] = value.clone() if address in storages else value
        storages.add(address)
    return tensors


def _collect(obj: Any, path: str, tensors: dict[str, Tensor]) -> None:
    if isinstance(obj, Mapping) or (path and isinstance(obj, list | tuple)):
        items = obj.items() if isinstance(obj, Mapping) else enumerate(obj)
        for key, value in items:
            _collect(value, f"{path}.{key}" if path else str(key), tensors)
        return
    if not path:
        raise CheckpointError(
            f"save takes a dict of tensors, found {type(obj).__name__}. Name what is written: "
            f'fx.ops.save({{"x": value}}, path, ctx).'
        )
    if not isinstance(obj, Tensor):
        raise CheckpointError(
            f"{path} is a {type(obj).__name__}, and a safetensors file contains only tensors. "
            f"Pass torch.tensor(value), or write other values as JSON: "
            f"fx.ops.on_main(lambda: Path(path).write_text(json.dumps(value)), ctx)."
        )
    if is_sharded(obj):
        raise CheckpointError(
            f"{path} is a DTensor, of which this rank has only a part. Pass tensor.full_tensor(), "
            f"called on every rank; fx.weights(model) gives the full weights of a model."
        )
    if obj.layout is not torch.strided or obj.is_meta or obj.is_quantized:
        raise CheckpointError(
            f"{path} is a {obj.layout} tensor on {obj.device}, which a safetensors file cannot "
            f"hold. Save a dense tensor with values."
        )
    if path in tensors:
        raise CheckpointError(f"Two tensors are named {path!r}. Rename one of their keys.")
    tensors[path] = obj
