"""Record what code does with tensors, without doing it, and compute single results later."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["DeferredOps", "ReadValues"]

_ITEM = torch.ops.aten._local_scalar_dense.default


class _Op(NamedTuple):
    """A recorded operation: its tensors are on the meta device, or constants with values."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


class DeferredOps(TorchDispatchMode):
    """Runs operations on the meta device, and records them.

    Tensors are told apart by their storage, so that views, `.data` and in-place operations are
    found however code got hold of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[_Op] = []
        self.written: dict[int, list[int]] = {}  # storage → numbers of the operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is _ITEM:  # code that decides by a value
            return self.values([args[0]])[0].item()
        tensors = _tensors((args, given))
        if any(not one.is_meta for one in _written(func, args)):
            metas = [one for one in tensors if one.is_meta]
            known = dict(zip(map(id, metas), self.values(metas), strict=True))
            args, given = tree_map_only(Tensor, lambda one: known.get(id(one), one), (args, given))
            return func(*args, **given)
        if tensors and not any(one.is_meta for one in tensors):
            return func(*args, **given)  # values that code has already, such as `torch.tensor`
        # Constants as they are now: code may change them later.
        args, given = tree_map_only(
            Tensor, lambda one: one if one.is_meta else one.clone(), (args, given)
        )
        if any(argument.name == "device" for argument in func._schema.arguments):
            given["device"] = torch.device("meta")
        meta = tree_map_only(Tensor, lambda one: one.to("meta"), (args, given))
        out = func(*meta[0], **meta[1])
        self._record(_Op(func, args, given, out))
        return out

    def values(self, wanted: list[Tensor]) -> list[Tensor]:
        """The values of tensors on the CPU, at this moment of the recording.

        Effects:
            Runs the recorded operations that contribute to them. Random ones draw from the
            generator of the CPU, whose state is restored.
        """
        needed: set[int] = set()
        waiting = [_storage(tensor) for tensor in wanted]
        seen: set[int] = set()
        while waiting:
            storage = waiting.pop()
            if storage in seen:
                continue
            seen.add(storage)
            for number in self.written.get(storage, ()):
                needed.add(number)
                op = self.tape[number]
                waiting += [_storage(one) for one in _tensors((op.args, op.kwargs)) if one.is_meta]
        real: dict[int, torch.UntypedStorage] = {}
        with (
            _disable_current_modes(),
            torch.random.fork_rng(devices=[]),
        ):
            for number in sorted(needed):
                self._run(self.tape[number], real)
            return [_view(tensor, real) for tensor in wanted]

    def _record(self, op: _Op) -> None:
        number = len(self.tape)
        self.tape.append(op)
        changed = [*_tensors(op.out), *_written(op.func, op.args)]
        for storage in {_storage(tensor) for tensor in changed}:
            self.written.setdefault(storage, []).append(number)

    def _run(self, op: _Op, real: dict[int, torch.UntypedStorage]) -> None:
        args, kwargs = tree_map_only(Tensor, lambda one: _view(one, real), (op.args, op.kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        found = op.func(*args, **kwargs)
        for meta, value in zip(_tensors(op.out), _tensors(found), strict=True):
            if _storage(meta) not in real:
                home = torch.empty(meta.untyped_storage().nbytes(), dtype=torch.uint8, device="cpu")
                real[_storage(meta)] = home.untyped_storage()
                _view(meta, real).copy_(value)


class ReadValues(TorchFunctionMode):
    """Gives code the values of recorded tensors where it asks for all of them at once."""

    def __init__(self, ops: DeferredOps) -> None:
        super().__init__()
        self.ops = ops

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.tolist, Tensor.numpy) and args[0].is_meta:
            args = (*self.ops.values([args[0].detach()]), *args[1:])
        return func(*args, **(kwargs or {}))


def _written(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """The arguments that an operation changes in place."""
    return [
        value
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if isinstance(value, Tensor)
        and argument.alias_info is not None
        and argument.alias_info.is_write
    ]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _view(tensor: Tensor, real: dict[int, torch.UntypedStorage]) -> Tensor:
    """The tensor with values; a constant has them."""
    if not tensor.is_meta:
        return tensor
    made = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return made.set_(real[_storage(tensor)], tensor.storage_offset(), tensor.shape, tensor.stride())
