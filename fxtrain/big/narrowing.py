"""Hold parameters in one dtype and compute in another."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fxtrain.errors import PlanError


@attrs.frozen(kw_only=True, eq=False)
class Narrowed:
    """A module whose parameters are held in a narrow dtype.

    Attributes:
        module: The module, changed in place; call it as before.
        changed: Names of the parameters that are held in the narrow dtype.
        kept: Names of the floating-point parameters that are not.
        bytes_before: Bytes of all parameters before.
        bytes_after: Bytes of all parameters now.
        undo: Removes the hooks and gives parameters their dtypes back; see `widen`.
    """

    module: nn.Module
    changed: tuple[str, ...]
    kept: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    undo: Callable[[], None] = attrs.field(repr=False)


def narrow(
    module: nn.Module,
    *,
    storage: str | torch.dtype = "float8_e4m3fn",
    compute: str | torch.dtype = "bfloat16",
    keep: Iterable[str] = ("norm", "embed"),
    keep_kinds: Iterable[str] = (),
) -> Narrowed:
    """Hold a module's parameters in one dtype, and compute in another.

    Before a submodule runs, its parameters are converted; afterwards the converted ones are
    dropped, so that one submodule at a time takes the memory of the wider dtype. Inputs keep
    their dtype. Gradients reach inputs and parameters that are not held narrow, such as
    adapters.

    Args:
        module: The module; it is changed in place.
        storage: Dtype in which parameters are held; float8 has 2 or 3 bits of precision.
        compute: Dtype in which submodules compute.
        keep: Regular expressions; parameters in whose names one is found keep their dtype.
        keep_kinds: Class names of submodules whose parameters keep their dtype.

    Effects:
        Parameters that are held narrow lose precision, and do not require gradients any more.
        Tied parameters stay tied, and keep their dtype if one of their names does.

    Raises:
        PlanError: a dtype, a pattern or a class name is invalid, or nothing is left to hold
            narrow.

    Example:
        >>> import fxtrain as fx, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        >>> narrowed = fx.big.narrow(net, storage="bfloat16", compute="float32")
        >>> net[0].weight.dtype, net(torch.ones(1, 8)).dtype
        (torch.bfloat16, torch.float32)
        >>> fx.big.widen(narrowed)[0].weight.dtype
        torch.float32
    """
    small, wide = _dtype("storage", storage), _dtype("compute", compute)
    if small.itemsize >= wide.itemsize:
        raise PlanError(
            f"narrow: storage {small} takes as many bytes as compute {wide}. Swap them."
        )
    named = list(module.named_parameters(remove_duplicate=False))
    kept = _kept(module, named, tuple(keep), set(keep_kinds))
    floating = {id(parameter): parameter for _, parameter in named if parameter.is_floating_point()}
    chosen = {
        key: parameter
        for key, parameter in floating.items()
        if key not in kept and parameter.dtype.itemsize > small.itemsize
    }
    if not chosen:
        raise PlanError(
            f"narrow: no parameter of {type(module).__name__} is left to hold in {small}. Pass "
            f"other patterns in keep=..."
        )
    count = _bytes(module)
    restore = _hold(chosen.values(), small)
    handles = [
        handle
        for part in module.modules()
        if (places := _places(part, chosen))
        for handle in _hook(part, places, wide)
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()
        restore()

    return Narrowed(
        module=module,
        changed=tuple(name for name, parameter in named if id(parameter) in chosen),
        kept=tuple(
            name
            for name, parameter in named
            if id(parameter) in floating and id(parameter) not in chosen
        ),
        bytes_before=count,
        bytes_after=_bytes(module),
        undo=undo,
    )


def widen(narrowed: Narrowed) -> nn.Module:
    """Give the parameters of a narrowed module their dtypes back, and return the module.

    Effects:
        Removes the hooks. Values stay rounded to the narrow dtype.

    Example:
        >>> import fxtrain as fx, torch
        >>> net = torch.nn.Linear(2, 2)
        >>> fx.big.widen(fx.big.narrow(net)) is net
        True
    """
    narrowed.undo()
    return narrowed.module


def _dtype(what: str, given: str | torch.dtype) -> torch.dtype:
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise PlanError(
            f"narrow({what}={given!r}): choose a floating-point dtype, such as 'bfloat16'."
        )
    return dtype


def _hold(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> Callable[[], None]:
    """Convert parameters in place; returns a function that restores their dtypes, once."""
    before = [(parameter, parameter.dtype, parameter.requires_grad) for parameter in parameters]
    for parameter, _, _ in before:
        parameter.requires_grad = False
        parameter.data = parameter.data.to(dtype)

    def restore() -> None:
        while before:
            parameter, own, trained = before.pop()
            parameter.data = parameter.data.to(own)
            parameter.requires_grad = trained

    return restore


def _kept(
    module: nn.Module, named: list[tuple[str, nn.Parameter]], keep: tuple[str, ...], kinds: set[str]
) -> set[int]:
    """The parameters that keep their dtype, by identity."""
    try:
        patterns = [re.compile(pattern) for pattern in keep]
    except re.error as error:
        raise PlanError(f"narrow(keep=...): {error.pattern!r}: {error}.") from None
    there = {type(part).__name__ for part in module.modules()}
    if unknown := sorted(kinds - there):
        raise PlanError(
            f"narrow(keep_kinds=...): the model has no module of the class {', '.join(unknown)}. "
            f"It has {', '.join(sorted(there)[:20])}."
        )
    kept = {
        id(parameter) for name, parameter in named if any(part.search(name) for part in patterns)
    }
    for inner in module.modules():
        if type(inner).__name__ in kinds:
            kept.update(map(id, inner.parameters()))
    return kept


def _places(
    part: nn.Module, chosen: dict[int, nn.Parameter]
) -> list[tuple[dict[str, Any], str, nn.Parameter]]:
    """Where a module finds the parameters that it computes with."""
    # The forward of MultiheadAttention reads the weights of its child without calling it.
    parts = part.modules() if isinstance(part, nn.MultiheadAttention) else [part]
    return [
        (vars(owner), name, parameter)
        for owner in parts
        for name, parameter in owner._parameters.items()
        if parameter is not None and id(parameter) in chosen
    ]


def _hook(
    part: nn.Module, places: list[tuple[dict[str, Any], str, nn.Parameter]], wide: torch.dtype
) -> tuple[RemovableHandle, RemovableHandle]:
    def widen_weights(*_: Any) -> None:
        # An attribute hides the parameter of the same name. It is a tensor of its own, so that
        # backward finds it as forward left it.
        for own, name, parameter in places:
            own[name] = parameter.to(wide)

    def drop(*_: Any) -> None:
        for own, name, _parameter in places:
            own.pop(name, None)

    return (
        part.register_forward_pre_hook(widen_weights),
        part.register_forward_hook(drop, always_call=True),
    )


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
