"""Run torch operators without values: floats have only shapes, integers keep their values."""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # pyright: ignore
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    disable_fake_tensor_cache,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fxtrain._tree import map_leaves

_aten, _c10d = torch.ops.aten, torch.ops.c10d
_DEVICE = torch.ops.prim.device.default
_LARGEST = 1 << 26  # bytes of integers that keep their values
_SURELY_SMALL = 1 << 12  # bytes of inputs below which the size of the output is not checked
# Libraries whose frames are not the user's code.
_LIBRARIES = (
    "torch", "torchao", "bitsandbytes", "fxtrain", "contextlib", "runpy", "importlib", "_pytest",
    "pluggy",
)  # fmt: skip
# The function of torchao and of bitsandbytes that computes a table of constants for their states.
_TABLES = "create_dynamic_map"
# Predicates of unknown values that are false, as they are for finite numbers.
_NO = {"ne", "eq", "lt", "gt", "le", "ge", "isnan", "isinf", "any"}


class FakeValuesMode(TorchDispatchMode):
    """While active, floating-point tensors are torch's fake tensors, of any size.

    Integers and booleans on the CPU that are not computed from floats are real: indices,
    lengths, labels and orders determine what a program does, and are small. The values of all
    other tensors are unknown: a read returns 0, or for a boolean what finite numbers would
    give, and is recorded.

    Attributes:
        peeks: Number of reads of unknown values, by file and line of the user's code ("" inside a
            library) and the value that was returned instead.
        fakes: torch's mode of all fake tensors.
        record: (operator, args, kwargs, result) → None: called after each operator. A second mode
            would cost as much as this one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peeks: Counter[tuple[str, str]] = Counter()
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.record: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None] = _nothing

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented
        if func is _DEVICE:
            # Half of all calls; a fake tensor has its device without its mode.
            known = isinstance(args[0], FakeTensor)
            return args[0].device if known else func(*args, **kwargs)
        if active_fake_mode() is not None:
            return func(*args, **kwargs)
        run = _SPECIAL.get(func)
        if run is None:
            c10d = func.namespace == "c10d"
            run = FakeValuesMode.travel if c10d else FakeValuesMode.usual
        out = run(self, func, args, kwargs)
        self.record(func, args, kwargs, out)
        return out

    def usual(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator with values if they are integers, and without values otherwise."""
        leaves = leaves_of((args, kwargs))
        floats = False
        for leaf in leaves:
            if isinstance(leaf, FakeTensor):
                if leaf.fake_mode is not self.fakes:
                    with leaf.fake_mode:  # from code that only computes shapes
                        return func(*args, **kwargs)
                floats = True
        if floats:  # most operators
            return self.fake(func, args, kwargs)
        if _is_integer_op(func, leaves, kwargs) and self._is_small(func, args, kwargs):
            return map_leaves(self._forget, func(*args, **kwargs))
        return self.fake(func, args, kwargs)

    def forget_origins(self) -> None:
        """Drop torch's weak references from real tensors to their fake ones."""
        self.fakes.fake_tensor_converter.meta_converter.tensor_memo.clear()

    def fake(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator for shapes only."""
        # As `with self.fakes: func(*args, **kwargs)`, without a second way through the dispatcher.
        out: Any = self.fakes.dispatch(func, (), args, kwargs)
        if isinstance(out, Tensor) and out.dtype == torch.bool and out.numel() == 1:
            out._fxtrain_answer = _answer(func, args)  # type: ignore[attr-defined]
        return out

    def _is_small(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a result is small enough to keep its values; a mask or one-hot may be huge."""
        inputs = [t.nbytes for t in leaves_of((args, kwargs)) if isinstance(t, Tensor)]
        if inputs and max(inputs) <= _SURELY_SMALL:
            return True
        try:
            with self.fakes:
                out = func(*args, **kwargs)
        except DynamicOutputShapeException:
            return True  # at most as large as the inputs
        return sum(t.nbytes for t in leaves_of(out) if isinstance(t, Tensor)) <= _LARGEST

    def _forget(self, leaf: Any) -> Any:
        known = not isinstance(leaf, Tensor) or _is_integer(leaf.dtype)
        return leaf if known else self.fakes.from_tensor(leaf)

    def peek(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a substitute for an unknown value, and record the read."""
        tensor = args[0]
        if not isinstance(tensor, FakeTensor) or tensor.fake_mode is not self.fakes:
            return func(*args, **kwargs)
        if tensor.constant is not None:
            return tensor.constant.item()
        if func is _aten.equal.default or tensor.dtype == torch.bool:
            substitute: Any = getattr(tensor, "_fxtrain_answer", True)
        elif tensor.dtype.is_complex:
            substitute = 0j
        else:
            substitute = 0.0 if tensor.dtype.is_floating_point else 0
        self.peeks[user_place(), repr(substitute)] += 1
        return substitute

    def index(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an indexing operator; a mask with values becomes indices, so the shape is known."""
        indices: list[Any] = []
        for index in args[1]:
            known = isinstance(index, Tensor) and not isinstance(index, FakeTensor)
            if known and index.dtype in (torch.bool, torch.uint8):
                indices.extend(index.nonzero().unbind(1))
            else:
                indices.append(index)
        return self.usual(func, (args[0], indices, *args[2:]), kwargs)

    def travel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a collective of the fake group.

        Disables torch's cache, whose key would contain the shapes of all tensors (one per rank)
        and never hits.
        """
        with disable_fake_tensor_cache(self.fakes):
            return func(*args, **kwargs)

    def scatter(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a scatter, whose root passes a tensor for each rank.

        The group gets meta tensors, because processing fake ones is slow.
        """
        tensors = {id(t): t for row in (args[0], *args[1]) for t in row}
        if not all(isinstance(tensor, FakeTensor) for tensor in tensors.values()):
            return self.travel(func, args, kwargs)
        metas = {
            key: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            for key, t in tensors.items()
        }
        outputs, *inputs = [[metas[id(t)] for t in row] for row in (args[0], *args[1])]
        _, work = func(outputs, inputs, *args[2:], **kwargs)
        return args[0], work

    def finish(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an all-reduce, and return a handle with its tensors.

        DDP's reducer, in C++, reads them; the handle of the fake group has none.
        """
        tensors, _ = self.travel(func, args, kwargs)
        future = torch.futures.Future()
        future.set_result(list(args[0]))
        work = _create_work_from_future(future)
        return tensors, work.boxed()


def leaves_of(value: Any) -> list[Any]:
    """What is in the lists, tuples and dicts that an operator takes or returns."""
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in leaves_of(part)]
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves_of(part)]
    return [value]


def user_place() -> str:
    """File and line of the innermost frame of user code; "" if fxtrain itself reads the value."""
    frame = sys._getframe(1)  # noqa: TID251 - for messages
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("fxtrain.") and not name.startswith("fxtrain.profiling."):
            return ""
        if frame.f_code.co_name == _TABLES and is_library(name):
            return ""
        if not is_library(name):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_library(module: str) -> bool:
    """Whether a module belongs to a library rather than to the user."""
    return module.split(".")[0] in _LIBRARIES


_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _is_integer_op(func: Any, leaves: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator takes or creates only integers on the CPU."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(isinstance(t, FakeTensor) or not _is_integer(t.dtype) for t in tensors):
        return False
    dtypes = [leaf for leaf in leaves if isinstance(leaf, torch.dtype)]
    devices = [t.device for t in tensors] + [d for d in (kwargs.get("device"),) if d is not None]
    if not all(map(_is_integer, dtypes)) or any(device.type != "cpu" for device in devices):
        return False
    return bool(tensors or dtypes) or func.overloadpacket in _INTEGER_FACTORIES


def _nothing(*_: Any) -> None:
    pass


def _answer(func: Any, args: tuple[Any, ...]) -> bool:
    name = func.overloadpacket.__name__
    if name in ("bitwise_not", "logical_not"):
        return not getattr(args[0], "_fxtrain_answer", True)
    return name not in _NO


# Factories that return integers by default.
_INTEGER_FACTORIES = {_aten.randperm, _aten.arange, _aten.randint}

_SPECIAL: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: FakeValuesMode.peek,
    _aten.equal.default: FakeValuesMode.peek,
    _aten.index.Tensor: FakeValuesMode.index,
    _aten.index_put.default: FakeValuesMode.index,
    _aten.index_put_.default: FakeValuesMode.index,
    _c10d.allreduce_.default: FakeValuesMode.finish,
    _c10d.scatter_.default: FakeValuesMode.scatter,
    # torch's fake implementation returns a new tensor; a real wait returns the same one.
    torch.ops._c10d_functional.wait_tensor.default: lambda self, func, args, kwargs: args[0],
}
