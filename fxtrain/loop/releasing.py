"""Free the memory of models and optimizers that are no longer needed."""

import ctypes
import gc
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxtrain import _extensions
from fxtrain.backends.core.optimizers import HostOptimizer, local_optimizer
from fxtrain.errors import PlanError
from fxtrain.state import DistContext, Wrapped
from fxtrain.state.wrapped import check_open

if TYPE_CHECKING:
    from fxtrain._extensions import Memory


def release(*objects: Wrapped | nn.Module | torch.optim.Optimizer) -> "tuple[Memory, Memory]":
    """Free what models and optimizers hold in memory on this rank.

    An optimizer loses its states, its parameter groups and the gradients of its parameters. A
    module loses its gradients, and its parameters and buffers are replaced by tensors on the meta
    device. A wrapped model loses both, and its handle is closed. None of them can be used
    afterwards.

    Not freed are tensors to which something else refers: another model with the same parameters,
    a variable such as the last output or loss (whose graph holds activations), an exception's
    traceback. FSDP's shards, DDP's buckets, DeepSpeed's engine and what Offload streams belong to
    the handle: drop your own names, `del model, net`, and call `fx.release()` again.

    Args:
        objects: Models from `fx.wrap`, modules and optimizers; without any, only garbage is
            collected and caches are emptied.

    Returns:
        Memory of this rank when it was called, and when it returned: torch's allocations on an
        accelerator, the resident memory of the process on a CPU.

    Effects:
        Collects garbage, empties the cache of the device, and on Linux returns free memory of the
        process to the system. No traffic; ranks may call it apart.

    Raises:
        PlanError: an object is something else, or inside `fx.gathered`; nothing was freed then.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     net = torch.nn.Linear(2, 1)
        ...     model = fx.wrap(net, ctx)
        ...     before, after = fx.release(model)
        >>> before.now > 0, net.weight.device
        (True, device(type='meta'))
    """
    for target in objects:
        if not isinstance(target, Wrapped | nn.Module | torch.optim.Optimizer):
            raise PlanError(
                f"release takes wrapped models, modules and optimizers, found "
                f"{type(target).__name__}. A tensor is freed when nothing refers to it: use del."
            )
        if isinstance(target, Wrapped) and target.status.closed == "gathered":
            check_open(target, "release", PlanError)
    ctx = _context(objects)
    before = _extensions.memory(ctx)
    for target in objects:
        _release(target)
    empty_cache(ctx.device)
    return before, _extensions.memory(ctx)


def empty_cache(device: torch.device) -> None:
    """Collect garbage, and return memory that the allocators keep to the device and the host."""
    gc.collect()
    if device.type not in ("cpu", "meta", "xla"):
        torch.get_device_module(device).empty_cache()
    # The C library of Linux keeps freed tensors of up to 32 MiB in its heap.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _context(objects: tuple[Any, ...]) -> DistContext:
    """The context of the first wrapped model; without one, of the device of this process."""
    wrapped = next((target for target in objects if isinstance(target, Wrapped)), None)
    if wrapped is not None:
        return wrapped.ctx
    device = torch.accelerator.current_accelerator(check_available=True)
    return DistContext(device=device or torch.device("cpu"))


def _release(target: Any) -> None:
    if isinstance(target, Wrapped):
        target.status.closed = "release"
        target.status.others.clear()
        for part in (*target.optimizers, target.module):
            _release(part)
    elif isinstance(target, nn.Module):
        _empty_module(target)
    else:
        _empty_optimizer(target)


def _empty_optimizer(optimizer: torch.optim.Optimizer) -> None:
    for part in (optimizer, local_optimizer(optimizer)):
        part.state.clear()
        for group in part.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
            group["params"] = []
        if isinstance(part, HostOptimizer):
            part.forget()


@torch.no_grad()
def _empty_module(module: nn.Module) -> None:
    # What bitsandbytes has beside parameters.
    for _, part, _ in list(_extensions.quantized_layers(module)):
        own = vars(part)
        own |= {name: None for name in ("quant_state", "_copy") if name in own}
        own |= {"state": type(own["state"])()} if "state" in own else {}
    empty: dict[int, Any] = {}  # tied tensors stay tied
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensor.grad = None
                    tensors[name] = empty.setdefault(id(tensor), _meta(tensor))


def _meta(tensor: Any) -> Any:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
