"""The work of an operator: FLOPs, and bytes that it reads and writes."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fxtrain.profiling.fake_tensors import leaves_of
from fxtrain.state import Operator

Phase = Literal["forward", "backward", "update"]
Call = tuple[str, Phase, str, int, int]  # name, phase, dtype, FLOPs, bytes

_aten = torch.ops.aten
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")
# They launch no kernel: memory without values, and a value for the host.
_FREE = {
    "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "empty", "empty_like",
    "empty_permuted", "empty_strided", "equal", "lift_fresh_copy", "new_empty", "new_empty_strided",
    "resize_", "set_",
}  # fmt: skip
# They read as much of their first argument as they return.
_LOOK_UPS = {"embedding", "gather", "index", "index_select", "all_gather_copy_in"}
# They write their first argument without reading it.
_OVERWRITE = {"_foreach_copy_", "_foreach_zero_", "copy_", "fill_", "normal_", "uniform_", "zero_"}
# torch.utils.flop_counter has formulas for the kernels of GPUs.
_CPU_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (_aten._scaled_dot_product_flash_attention),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _aten._scaled_dot_product_flash_attention_backward
    ),
}


def operator_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """Name, dtype, FLOPs and bytes of one call of an operator; None if it launches no kernel."""
    name = func.overloadpacket.__name__
    if func.is_view or name in _FREE or func.namespace in _COLLECTIVES:
        return None
    written = _tensors(kwargs.get("out", out))
    inputs = _tensors((args, {key: value for key, value in kwargs.items() if key != "out"}))
    if not written:  # an operator over lists of tensors, in place
        written = _tensors(args[:1])
    first = _tensors(args[:1])
    if not written:  # marks of a profiler
        return None
    read = sum(map(_size, inputs.values()))
    size = sum(map(_size, written.values()))
    if name in _OVERWRITE:
        read -= sum(map(_size, first.values()))
    elif name == "all_gather_copy_in":  # FSDP2 copies this rank's shard into a buffer for all
        read = size = sum(map(_size, first.values()))
    elif name in _LOOK_UPS:
        read += size - sum(map(_size, first.values()))
    dtypes = (t.dtype for t in inputs.values() if t.dtype.is_floating_point)
    dtype = next(dtypes, None)
    named = _DTYPES.get(dtype, str(dtype).removeprefix("torch.")) if dtype else ""
    named = "fp8" if named.startswith("float8") else named
    return name, named, _flops(func, args, kwargs, out), read + size


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of products; those of other operators do not take the time of a device."""
    packet = func.overloadpacket
    if packet.__name__ == "_grouped_mm":
        return 2 * out.numel() * args[0].shape[-1]
    formula = flop_registry.get(_CPU_ATTENTION.get(packet, packet))
    if formula is None:
        return 0
    flops = formula(*args, **kwargs, out_val=out)
    named = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False))
    # Kernels skip blocks above the diagonal.
    return flops // 2 if (named | kwargs).get("is_causal") else flops


def _tensors(values: Any) -> dict[int, Tensor]:
    """Tensors in a structure, each once."""
    leaves = [values] if isinstance(values, Tensor) else leaves_of(values)
    return {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor's values; those of an expanded one are in memory once."""
    size = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes()) if 0 in tensor.stride() else size


def operators(calls: Iterable[Call]) -> tuple[Operator, ...]:
    """Calls counted by all that they have in common, most work first."""
    rows = [
        Operator(name=name, phase=phase, dtype=dtype, flops=flops, bytes=size, count=count)
        for (name, phase, dtype, flops, size), count in Counter(calls).items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.count * row.flops, -row.count * row.bytes)))
