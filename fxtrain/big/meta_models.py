"""Build models without memory for their parameters."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from fxtrain.errors import PlanError

N = TypeVar("N", bound=nn.Module)


def empty(
    build: Callable[[], N],
    *,
    buffers: Literal["real", "meta"] = "real",
    device: str | torch.device = "meta",
    dtype: torch.dtype | None = None,
) -> N:
    """Build a model whose parameters have no values, and mostly no memory.

    Each parameter moves to the meta device when its module registers it, before it is
    initialized, so that at most one at a time takes memory. Buffers, and tensors that are plain
    attributes of modules, are those of a model that was built as usual: rotary frequencies, masks
    and running statistics. One that is computed from a parameter has no values. Tied parameters
    stay tied.

    Args:
        build: Builds the model: a class, or `lambda: AutoModel.from_config(config)`.
        buffers: real computes them, on `device`, or on the CPU for the meta device; meta leaves
            them without values.
        device: Where parameters are. "meta" takes no memory; any other device has memory for
            them, without defined values.
        dtype: Of floating-point parameters, and torch's default while `build` runs; None leaves
            both.

    Effects:
        None on random generators. A buffer with random values has those of the CPU's generator.

    Raises:
        PlanError: `buffers` is something else.

    Example:
        >>> import fxtrain as fx, torch
        >>> net = fx.big.empty(lambda: torch.nn.BatchNorm1d(3))
        >>> net.weight.device.type, net.running_var
        ('meta', tensor([1., 1., 1.]))
    """
    if buffers not in ("real", "meta"):
        raise PlanError(f"empty(buffers={buffers!r}): choose 'real' or 'meta'.")
    with (
        _default_dtype(dtype),
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        _parameters_on_meta(),
    ):
        module = build()
    home = torch.device(device)
    values = torch.device("cpu") if home.type == "meta" else home
    moved: dict[int, Tensor] = {}

    def move(tensors: dict[str, Any], to: torch.device, dtype: torch.dtype | None) -> None:
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and not is_lazy(tensor):
                if id(tensor) not in moved:
                    moved[id(tensor)] = _moved(tensor, to, dtype)
                tensors[name] = moved[id(tensor)]

    for part in module.modules():
        move(part._parameters, home, dtype)
        move(part._buffers, torch.device("meta") if buffers == "meta" else values, None)
        move(vars(part), values, None)
    return module


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device as a module of this thread registers it."""
    thread = threading.get_ident()
    memo = WeakIdKeyDictionary()  # a parameter that two modules share is one on meta, too

    def on_meta(_: nn.Module, __: str, parameter: Any) -> Any:
        if threading.get_ident() != thread or parameter is None:
            return None
        if parameter.is_meta or is_lazy(parameter):
            return None
        if parameter not in memo:
            memo[parameter] = _moved(parameter, torch.device("meta"), None)
        return memo[parameter]

    handle = register_module_parameter_registration_hook(on_meta)
    try:
        yield
    finally:
        handle.remove()


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """A tensor on a device; a parameter that leaves the meta device has no defined values."""
    if dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    if tensor.is_meta and device.type != "meta" and not isinstance(tensor, nn.Parameter):
        return tensor  # computed from a parameter
    if tensor.device == device and tensor.dtype == dtype:
        return tensor
    if not isinstance(tensor, nn.Parameter):
        return tensor.to(device)
    parameter = nn.Parameter(
        torch.empty_like(tensor, device=device, dtype=dtype), requires_grad=tensor.requires_grad
    )
    vars(parameter).update(vars(tensor))
    return parameter
