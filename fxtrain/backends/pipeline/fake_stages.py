"""torch's fake tensors for values of other stages, for inputs to receive, and for own values."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fxtrain import _tree
from fxtrain.errors import PlanError


class StagesMixedError(Exception):
    """A value of another stage was combined with one of this stage."""


class _FakeTensors(FakeTensorMode):
    """Tensors without values, which do not mix with those of any mode but `OwnFakes`."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, shape = _tree.flatten((args, kwargs or {}))
        if any(isinstance(leaf, FakeTensor) and leaf.fake_mode is not self for leaf in leaves):
            args, kwargs = _tree.unflatten(shape, list(map(self._twin, leaves)))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def made(self, leaf: Any) -> bool:
        """Whether a leaf belongs to this mode."""
        return isinstance(leaf, FakeTensor) and leaf.fake_mode is self

    def _twin(self, leaf: Any) -> Any:
        """A leaf of this mode for one of `OwnFakes` or of a dry run, where all tensors are fake."""
        if not isinstance(leaf, FakeTensor) or leaf.fake_mode is self:
            return leaf
        if isinstance(leaf.fake_mode, _FakeTensors) and not isinstance(leaf.fake_mode, OwnFakes):
            raise StagesMixedError
        with self:
            return torch.empty_strided(
                leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
            )

    def like(self, tensor: Any, device: torch.device) -> Tensor:
        """A tensor of this mode with a device, and the shape and dtype of another tensor."""
        with self:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return fake.requires_grad_(tensor.requires_grad)


class ReceivedFakes(_FakeTensors):
    """Placeholders for what a stage receives from the previous one.

    Modes do not mix, which detects a value of another stage that reaches this one by another way
    than through its first module.
    """


class OtherStageFakes(_FakeTensors):
    """Values of other stages: shapes only, never written into a tensor of this stage."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and any(map(self.made, _tree.flatten((args, kwargs or {}))[0])):
            for argument, value in zip(func._schema.arguments, args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and isinstance(value, Tensor) and not self.made(value):
                    raise PlanError(
                        f"{func} writes what an earlier stage computes into a tensor that this "
                        f"stage creates itself, which would lose it"
                    )
        return super().__torch_dispatch__(func, types, args, kwargs)


class OwnFakes(_FakeTensors):
    """A stage's own values where only shapes matter; they mix with all others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in _tree.flatten((args, kwargs or {}))[0]:
            if isinstance(leaf, FakeTensor) and isinstance(
                leaf.fake_mode, OtherStageFakes | ReceivedFakes
            ):
                with leaf.fake_mode:
                    return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)
