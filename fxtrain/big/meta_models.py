"""Build models without memory for their parameters."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from fxtrain._errors import PlanError
from fxtrain.big.deferred_ops import DeferredOps, ReadValues

__all__ = ["empty"]

N = TypeVar("N", bound=nn.Module)


def empty(
    build: Callable[[], N],
    *,
    buffers: Literal["real", "meta"] = "real",
    device: str | torch.device = "meta",
    dtype: torch.dtype | None = None,
) -> N:
    """Build a model whose parameters have no values, and mostly no memory.

    The code of the model runs on the meta device. Buffers, and tensors that are plain attributes
    of modules, are computed afterwards: rotary frequencies, masks and running statistics are those
    of a model that was built as usual. Tied parameters stay tied.

    Args:
        build: Builds the model: a class, or `lambda: AutoModel.from_config(config)`.
        buffers: real computes them, on `device`, or on the CPU for the meta device; meta leaves
            them without values too.
        device: Where parameters are. "meta" takes no memory; any other device has memory for
            them, without defined values.
        dtype: Of floating-point parameters, and torch's default while `build` runs; None leaves
            both.

    Effects:
        None on random generators. A buffer with random values has those of the CPU's generator.

    Raises:
        PlanError: `build` returns something else, or an argument is invalid.

    Example:
        >>> import fxtrain as fx, torch
        >>> net = fx.big.empty(lambda: torch.nn.BatchNorm1d(3))
        >>> net.weight.device.type, net.running_var
        ('meta', tensor([1., 1., 1.]))
    """
    if buffers not in ("real", "meta"):
        raise PlanError(f"empty(buffers={buffers!r}): choose 'real' or 'meta'.")
    ops = DeferredOps()
    with _default_dtype(dtype), torch.random.fork_rng(devices=[]), ops, ReadValues(ops):
        module = build()
    if not isinstance(module, nn.Module):
        raise PlanError(
            f"empty: the function returned a {type(module).__name__}. Pass a function that builds "
            f"a torch.nn.Module."
        )
    home = torch.device(device)
    _fill_buffers(module, ops, buffers, home)
    memo: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in memo:
                    memo[id(parameter)] = _moved(parameter, home, dtype)
                part._parameters[name] = memo[id(parameter)]
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


def _fill_buffers(module: nn.Module, ops: DeferredOps, buffers: str, home: torch.device) -> None:
    """Compute all tensors of modules but parameters, each once."""
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for part in module.modules():
        held: list[dict[str, Any]] = [vars(part)]
        if buffers == "real":
            held.append(part._buffers)
        places += [
            (owner, name, tensor)
            for owner in held
            for name, tensor in owner.items()
            if isinstance(tensor, Tensor) and tensor.is_meta
        ]
    distinct = {id(tensor): tensor for _, _, tensor in places}
    values = ops.values(list(distinct.values()))
    target = torch.device("cpu") if home.type == "meta" else home
    ready = {
        key: value.to(target).requires_grad_(value.requires_grad)
        for key, value in zip(distinct, values, strict=True)
    }
    for owner, name, tensor in places:
        owner[name] = ready[id(tensor)]


def _moved(parameter: nn.Parameter, home: torch.device, dtype: torch.dtype | None) -> nn.Parameter:
    wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    if parameter.device == home and parameter.dtype == wanted:
        return parameter
    moved = nn.Parameter(
        torch.empty_like(parameter, device=home, dtype=wanted),
        requires_grad=parameter.requires_grad,
    )
    vars(moved).update(vars(parameter))
    return moved
