"""torch's fake tensors as the values of other stages, and as those that will be received."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fxtrain import _tree
from fxtrain._errors import PlanError

__all__ = ["Hollow", "Mixed", "pretended"]


class Mixed(Exception):
    """A value of another stage met one of this stage."""


class _Shapes(FakeTensorMode):
    """Tensors without values, which do not mix with those of another mode."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in _tree.flatten((args, kwargs or {}))[0]:
            if isinstance(leaf, FakeTensor) and leaf.fake_mode is not self:
                raise Mixed
        return super().__torch_dispatch__(func, types, args, kwargs)


class Hollow(_Shapes):
    """Values of other stages: shapes only, and never written into a tensor of this one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and any(map(self.made, _tree.flatten((args, kwargs or {}))[0])):
            for argument, value in zip(func._schema.arguments, args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                    raise PlanError(
                        f"{func} writes what an earlier stage computes into a tensor that this "
                        f"stage makes for itself, which would lose it"
                    )
        return super().__torch_dispatch__(func, types, args, kwargs)

    def made(self, leaf: Any) -> bool:
        """Whether a leaf is a value of another stage."""
        return isinstance(leaf, FakeTensor) and leaf.fake_mode is self


def pretended() -> Callable[[Any], Tensor]:
    """Stand-ins for what will be received, of a mode of their own.

    Modes do not mix, which finds a value of another stage that reaches this one on another way
    than through its first module.
    """
    mode = _Shapes()

    def make(like: Any) -> Tensor:
        with mode:
            made = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return made.requires_grad_(like.requires_grad)

    return make
