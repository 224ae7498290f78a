"""Outputs of the modules of two models on the same data, compared while they are computed."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxtrain import _tree
from fxtrain.errors import PlanError

OUTPUTS = ""  # the name of the model's own outputs

# By module: sums of squares of the difference and of the reference, and the largest difference.
Sums = dict[str, tuple[float, float, float]]


@contextmanager
def recorded(module: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collect copies of the outputs of every submodule, one per call."""
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str, value: Tensor) -> None:
        seen.setdefault(name, []).append(value.clone())

    with _watched(module, keep):
        yield seen


@contextmanager
def compared(module: nn.Module, seen: dict[str, list[Tensor]], sums: Sums) -> Iterator[None]:
    """Compare the outputs of submodules with those of the same names, call by call."""
    calls: dict[str, int] = {}

    def compare(name: str, value: Tensor) -> None:
        call = calls[name] = calls.get(name, -1) + 1
        if call < len(others := seen.get(name, [])):
            add_error(sums, name, others[call], value)

    with _watched(module, compare):
        yield


@contextmanager
def _watched(module: nn.Module, take: Callable[[str, Tensor], None]) -> Iterator[None]:
    def hook(name: str) -> Callable[..., None]:
        def run(part: nn.Module, inputs: Any, output: Any) -> None:
            if (value := _first_tensor(output)) is not None:
                take(name, value.detach())

        return run

    handles = [
        part.register_forward_hook(hook(name)) for name, part in module.named_modules() if name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(output: Any) -> Tensor | None:
    leaves, _ = _tree.flatten(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return tensors[0] if tensors else None


def add_error(sums: Sums, name: str, reference: Tensor, value: Tensor) -> None:
    """Add the difference of two outputs to the sums of a module.

    Raises:
        PlanError: the shapes differ.
    """
    if reference.shape != value.shape:
        raise PlanError(
            f"quality.compare: {name or 'the output of the model'} has shape "
            f"{list(reference.shape)} under the reference and {list(value.shape)} under this plan. "
            f"Compare plans under which the model computes the same tensors."
        )
    wide = reference.float()
    difference = wide - value.float()
    noise, signal, largest = sums.get(name, (0.0, 0.0, 0.0))
    if difference.numel():
        noise += float(torch.linalg.vector_norm(difference)) ** 2
        signal += float(torch.linalg.vector_norm(wide)) ** 2
        maximum = float(difference.abs().max())
        largest = maximum if math.isnan(maximum) else max(largest, maximum)
    sums[name] = noise, signal, largest


def innermost(names: list[str]) -> list[str]:
    """Names that are not parents of others, in the same order.

    Example:
        >>> innermost(["block", "block.linear", "head"])
        ['block.linear', 'head']
    """
    parents = {
        ".".join(parts[:length])
        for parts in (name.split(".") for name in names)
        for length in range(1, len(parts))
    }
    return [name for name in names if name not in parents]
