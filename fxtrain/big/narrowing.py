"""Hold parameters in one dtype and compute in another."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fxtrain.errors import PlanError


def narrow(
    module: nn.Module,
    *,
    storage: str | torch.dtype = "float8_e4m3fn",
    compute: str | torch.dtype = "bfloat16",
    keep: Iterable[str] = ("norm", "embed"),
    keep_kinds: Iterable[str] = (),
) -> Callable[[], None]:
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

    Returns:
        A function that removes the hooks and gives parameters their dtypes back, once. Values stay
        rounded to the narrow dtype.

    Effects:
        Parameters that are held narrow lose precision, and do not require gradients any more.
        Tied parameters stay tied, and keep their dtype if one of their names does.

    Raises:
        PlanError: a dtype, a pattern or a class name is invalid, or nothing is left to hold narrow.

    Example:
        >>> import fxtrain as fx, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        >>> widen = fx.big.narrow(net, storage="bfloat16", compute="float32")
        >>> net[0].weight.dtype, net(torch.ones(1, 8)).dtype
        (torch.bfloat16, torch.float32)
        >>> widen()
        >>> net[0].weight.dtype
        torch.float32
    """
    small, wide = _dtype("storage", storage), _dtype("compute", compute)
    if small.itemsize >= wide.itemsize:
        raise PlanError(
            f"narrow: storage {small} takes as many bytes as compute {wide}. Swap them."
        )
    named = list(module.named_parameters(remove_duplicate=False))
    kept = _kept(module, tuple(keep), set(keep_kinds))
    chosen = {
        id(parameter): parameter
        for _, parameter in named
        if parameter.is_floating_point()
        and id(parameter) not in kept
        and parameter.dtype.itemsize > small.itemsize
    }
    if not chosen:
        raise PlanError(
            f"narrow: no parameter of {type(module).__name__} is left to hold in {small}. Pass "
            f"other patterns in keep=..."
        )
    before = [(one, one.dtype, one.requires_grad) for one in chosen.values()]
    for parameter, _, _ in before:
        parameter.requires_grad = False
        parameter.data = parameter.data.to(small)
    handles = [
        handle
        for part in module.modules()
        if (places := _places(part, chosen))
        for handle in _hook(part, places, wide)
    ]

    def widen() -> None:
        for handle in handles:
            handle.remove()
        while before:
            parameter, dtype, trained = before.pop()
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad = trained

    return widen


def _dtype(what: str, given: str | torch.dtype) -> torch.dtype:
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise PlanError(
            f"narrow({what}={given!r}): choose a floating-point dtype, such as 'bfloat16'."
        )
    return dtype


def _kept(module: nn.Module, keep: tuple[str, ...], kinds: set[str]) -> set[int]:
    """The parameters that keep their dtype, by identity."""
    try:
        patterns = [re.compile(pattern) for pattern in keep]
    except re.error as error:
        raise PlanError(f"narrow(keep=...): {error.pattern!r}: {error}.") from None
    if unknown := sorted(kinds - {type(part).__name__ for part in module.modules()}):
        raise PlanError(f"narrow(keep_kinds=...): the model has no {', '.join(unknown)}.")
    named = module.named_parameters(remove_duplicate=False)
    kept = {id(one) for name, one in named if any(pattern.search(name) for pattern in patterns)}
    for part in module.modules():
        if type(part).__name__ in kinds:
            kept.update(map(id, part.parameters()))
    return kept


def _places(part: nn.Module, chosen: dict[int, nn.Parameter]) -> list[tuple[str, str]]:
    """Where a module finds parameters that it computes with: the child that has it, and its name.

    By name, so that the hooks of a copy of the module find those of the copy.
    """
    # The forward of MultiheadAttention reads the weights of its child without calling it, and
    # nothing calls a ParameterList.
    whole = isinstance(part, nn.MultiheadAttention)
    lists = nn.ParameterList, nn.ParameterDict
    children = [(n, one) for n, one in part.named_children() if whole or isinstance(one, lists)]
    return [
        (child, name)
        for child, owner in (("", part), *children)
        for name, parameter in owner._parameters.items()
        if parameter is not None and id(parameter) in chosen
    ]


def _hook(
    part: nn.Module, places: list[tuple[str, str]], wide: torch.dtype
) -> tuple[RemovableHandle, RemovableHandle]:
    def widen_weights(part: nn.Module, *_: Any) -> None:
        # An attribute hides the parameter of the same name. It is a tensor of its own, so that
        # backward finds it as forward left it.
        for child, name in places:
            owner = part.get_submodule(child)
            vars(owner)[name] = vars(owner)["_parameters"][name].to(wide)

    def drop(part: nn.Module, *_: Any) -> None:
        for child, name in places:
            vars(part.get_submodule(child)).pop(name, None)

    return (
        part.register_forward_pre_hook(widen_weights),
        part.register_forward_hook(drop, always_call=True),
    )
