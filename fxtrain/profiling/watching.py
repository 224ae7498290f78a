"""Record the operations, collectives, modules and updates of a training loop from outside.

Tests record real tensors in the same way, to compare a dry run with a real one.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as registry
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fxtrain.ops.standing import wrapped_models
from fxtrain.precision.quantizing import live_tensors
from fxtrain.profiling.fake_tensors import FakeValuesMode, leaves_of
from fxtrain.profiling.operators import Call, Phase, operator_call
from fxtrain.state import Memory, Traffic, Wrapped
from fxtrain.state.dry_runs import PARTS

# Kinds by the beginning of the names of torch's operators: those of c10d, and the functional ones,
# which call the former below a dispatch mode, so that none is counted twice.
_KINDS = {
    **dict.fromkeys(("allgather", "all_gather"), "all_gather"),
    **dict.fromkeys(("allreduce", "all_reduce"), "all_reduce"),
    **dict.fromkeys(("alltoall", "all_to_all", "shard_dim_alltoall"), "all_to_all"),
    **dict.fromkeys(("barrier", "monitored_barrier"), "barrier"),
    **dict.fromkeys(("recv", "irecv"), "recv"),
    **dict.fromkeys(("send", "isend"), "send"),
    **{kind: kind for kind in ("broadcast", "gather", "reduce_scatter", "reduce", "scatter")},
}
# c10d operators of these kinds take their output first.
_OUTPUT_FIRST = ("all_gather", "all_to_all", "gather", "reduce_scatter", "scatter")
_BATCH = "_c10d_functional::batch_p2p_ops"
_P2P_KINDS = {"isend": "send", "irecv": "recv"}


@attrs.frozen
class RecordedCall:
    """One call of a collective: kind and bytes as in `Traffic`."""

    kind: str
    ranks: tuple[int, ...]  # global ones, which take part
    label: str  # torch's description of their group, such as "mesh_shard"; often generic
    bytes: int


@functools.cache
def _kind(operator: str) -> str:
    """The kind of collective that an operator is; empty for other operators."""
    space, _, name = operator.partition("::")
    if space not in ("c10d", "_c10d_functional", "_dtensor"):
        return ""
    starts = (start for start in _KINDS if name.lstrip("_").startswith(start))
    return _KINDS.get(next(starts, ""), "")


def sent(operator: str, args: tuple[Any, ...]) -> list[tuple[str, int]]:
    """Kind and bytes of each collective that an operator performs; empty for most."""
    if operator == _BATCH:
        return [
            (_P2P_KINDS[way], _bytes(tensor)) for way, tensor in zip(args[0], args[3], strict=True)
        ]
    kind = _kind(operator)
    if not kind:
        return []
    value = args[operator.startswith("c10d::") and kind in _OUTPUT_FIRST]
    return [(kind, 0 if kind == "barrier" else _bytes(value))]


def collectives(func: Any, args: tuple[Any, ...]) -> list[RecordedCall]:
    """The collectives that an operator performs, each with its group."""
    return [
        RecordedCall(kind, *_group(func, args), size)
        for kind, size in sent(func._schema.name, args)
    ]


def sum_calls(
    calls: Iterable[RecordedCall], axis_of: Callable[[RecordedCall], str]
) -> tuple[Traffic, ...]:
    """Calls summed by kind and axis, most bytes first."""
    counts: Counter[tuple[str, str, int]] = Counter()
    sizes: Counter[tuple[str, str, int]] = Counter()
    for call in calls:
        key = (call.kind, axis_of(call), len(call.ranks))
        counts[key] += 1
        sizes[key] += call.bytes
    rows = [
        Traffic(kind=kind, axis=axis, ranks=ranks, count=count, bytes=sizes[kind, axis, ranks])
        for (kind, axis, ranks), count in counts.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.kind, row.axis)))


def _group(func: Any, args: tuple[Any, ...]) -> tuple[tuple[int, ...], str]:
    """Ranks and label of the process group among an operator's arguments."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args)}  # noqa: B905
    if "process_group" in named:
        group = dist.ProcessGroup.unbox(named["process_group"])
    else:
        group = dist.distributed_c10d._resolve_process_group(named["group_name"])
    return tuple(dist.get_process_group_ranks(group)), group.group_desc


def _bytes(value: Any) -> int:
    leaves = leaves_of(value)
    # The parts that a simulated rank scatters are one tensor, many times.
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    sizes = {key: leaf.numel() * leaf.element_size() for key, leaf in tensors.items()}
    return sum(sizes.get(id(leaf), 0) for leaf in leaves)


class StepsConverged(BaseException):
    """Ends a loop whose steps have become equal. Not an Exception, so that no code catches it."""


Mark = tuple[int, int, int]  # positions in the logs of memory, traffic and operators


class LoopRecorder:
    """Records what a loop does, in order, for `most` steps, on tensors that represent real ones.

    Each update of the first optimizer that updates ends a step.
    """

    def __init__(self, *, most: int, fakes: FakeTensorMode | None = None) -> None:
        self.memory = MemoryLog(fakes)
        self.traffic: list[RecordedCall] = []
        self.operators: list[Call] = []
        self.started: Mark | None = None  # at the first forward
        self.marks: list[Mark] = []  # at the end of each step
        self.wrapped: Wrapped | None = None  # what the first optimizer updates, if it is ours
        self._most = most
        self._clock: Any = None
        self._loads = 0
        self._updating = False
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record an operator and its result."""
        if self._loads:
            self.memory.leave_out(leaves_of((args, kwargs)))
        elif done := operator_call(func, args, kwargs, out):
            # Autograd computes gradients with grad mode off.
            phase: Phase = "forward" if torch.is_grad_enabled() else "backward"
            name, *sizes = done
            self.operators.append((name, "update" if self._updating else phase, *sizes))
        self.traffic.extend(collectives(func, args))
        for leaf in [out] if isinstance(out, torch.Tensor) else leaves_of(out):
            if isinstance(leaf, torch.Tensor):
                self.memory.see(leaf)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While data is loaded: its source tensors stay on the host and are not counted."""
        self._loads += 1
        try:
            yield
        finally:
            self._loads -= 1

    def add(self, module: nn.Module) -> None:
        """Remember a module and its submodules."""
        if module not in self._modules:
            self._modules.update(module.modules())

    def forward(self, module: nn.Module, _: Any) -> None:
        """Called before a module's forward."""
        if self.started is None:
            self.started = self._here()
        self.add(module)

    def before_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Called before an update, when gradients are complete and nothing is freed yet."""
        self._updating = True
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        self.memory.hold("parameters", trained)
        self.memory.hold("gradients", [p.grad for p in trained])
        for module in tuple(self._modules):
            own = list(module._parameters.values())
            self.memory.hold("parameters", own)
            self.memory.hold("gradients", [p.grad for p in own if p is not None])
            self.memory.hold("buffers", module._buffers.values())
        for module in tuple(self._modules):  # scales that are no parameters
            self.memory.hold("parameters", live_tensors(module).values())

    def after_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Called after an update, when the optimizer has its state."""
        self._updating = False
        # torch's ZeroRedundancyOptimizer keeps this rank's states in an inner optimizer.
        for part in (optimizer, getattr(optimizer, "optim", None)):
            if isinstance(part, Optimizer):
                self.memory.hold("optimizer", leaves_of(list(part.state.values())))
        if self._clock is None:
            self._clock = optimizer
        if self._clock is optimizer:
            self.marks.append(self._here())
            self.wrapped = self.wrapped or _holder(optimizer)
            if len(self.marks) >= self._most or self._settled():
                raise StepsConverged

    def _settled(self) -> bool:
        """Whether the last two steps had the same collectives, so that the next would too."""
        edges = [mark[1] for mark in (self.started or (0, 0, 0), *self.marks)][-3:]
        steps = [Counter(self.traffic[start:stop]) for start, stop in pairwise(edges)]
        return len(steps) == 2 and steps[0] == steps[1]

    def _here(self) -> Mark:
        return len(self.memory.changes), len(self.traffic), len(self.operators)


@contextmanager
def recording(watch: LoopRecorder, mode: FakeValuesMode) -> Iterator[LoopRecorder]:
    """Record what happens inside the block by torch's global hooks; a mode runs all operators."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        out = resize(storage, size)
        watch.memory.resized(storage)
        return out

    hooks = (
        registry.register_module_parameter_registration_hook(lambda m, *_: watch.add(m)),
        registry.register_module_buffer_registration_hook(lambda m, *_: watch.add(m)),
        registry.register_module_forward_pre_hook(watch.forward),
        register_optimizer_step_pre_hook(watch.before_update),
        register_optimizer_step_post_hook(watch.after_update),
    )
    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.remove)
        stack.callback(wrapped_models.reset, wrapped_models.set([]))
        # FSDP2 frees gathered parameters this way; torch's memory tracker also hooks it.
        stack.callback(setattr, torch.UntypedStorage, "resize_", resize)
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        mode.record = watch.record
        yield watch


def _holder(optimizer: Optimizer) -> Wrapped | None:
    """The wrapped model of an optimizer."""
    models = [each() for each in wrapped_models.get() or ()]
    own = (model for model in models if model is not None)
    return next((model for model in own if any(o is optimizer for o in model.optimizers)), None)


_ACTIVATIONS, _OTHER = PARTS.index("activations"), PARTS.index("other")


class MemoryLog:
    """Storages by number, in the order of their first use; those of `fakes` count like real ones.

    The log records only when bytes are allocated and freed. A storage is assigned to a part once
    a module, a gradient or an optimizer is found to contain it; the assignment covers its whole
    lifetime, and sums are computed at the end.
    """

    def __init__(self, fakes: FakeTensorMode | None = None) -> None:
        self._fakes = fakes
        self.changes: list[tuple[int, int]] = []
        self._sizes: list[int] = []
        self._parts: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._refs: dict[int, Any] = {}
        self._outside: set[int] = set()

    def see(self, tensor: Tensor) -> tuple[int, ...]:
        """The numbers of a tensor's storages; new ones are added to the log."""
        if tensor.device.type == "meta":
            return ()
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is not self._fakes:
            return ()
        return tuple(self._number(storage) for storage in _storages(tensor))

    def hold(self, part: str, tensors: Iterable[Any]) -> None:
        """Assign tensors to a part; the first assignment of a storage stays."""
        index = PARTS.index(part)
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                for number in self.see(tensor):
                    self._parts.setdefault(number, index)

    def leave_out(self, tensors: Iterable[Any]) -> None:
        """Exclude tensors that are not on the device."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._outside.update(self.see(tensor))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Log the new size of a known storage."""
        number = self._numbers.get(storage._cdata)
        if number is not None:
            self._change(number, storage.nbytes())

    def peak(self, start: int, stop: int) -> int:
        """Peak bytes between two positions in the log."""
        return max((sum(sizes) for sizes in self._moments(start, stop)), default=0)

    def most(self, start: int, stop: int) -> Memory:
        """The peak of each part between two positions in the log."""
        columns = zip(*self._moments(start, stop), strict=True)
        return Memory(**dict(zip(PARTS, map(max, columns), strict=True)))

    def moments(self, start: int, stop: int, *, most: int) -> tuple[Memory, ...]:
        """The peaks of at most `most` intervals between two positions in the log."""
        sizes_at = [*self._moments(start, stop)]
        width = max(1, -(-len(sizes_at) // most))
        fullest = [max(sizes_at[i : i + width], key=sum) for i in range(0, len(sizes_at), width)]
        return tuple(Memory(**dict(zip(PARTS, sizes, strict=True))) for sizes in fullest)

    def _moments(self, start: int, stop: int) -> Iterator[tuple[int, ...]]:
        alive: dict[int, int] = {}
        for number, change in self._counted(0, start):
            alive[number] = alive.get(number, 0) + change
        parts = {number: _OTHER for number, size in alive.items() if size} | self._parts
        now = [0] * len(PARTS)
        for number, size in alive.items():
            if size:
                now[parts[number]] += size
        yield tuple(now)
        for number, change in self._counted(start, stop):
            now[parts.get(number, _ACTIVATIONS)] += change
            yield tuple(now)

    def _counted(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        return (entry for entry in self.changes[start:stop] if entry[0] not in self._outside)

    def _number(self, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._sizes)
            self._sizes.append(0)
            self._refs[number] = weakref.ref(storage, functools.partial(self._gone, number, key))
            self._change(number, storage.nbytes())
        return number

    def _gone(self, number: int, key: int, _: Any) -> None:
        self._change(number, 0)
        del self._numbers[key], self._refs[number]

    def _change(self, number: int, size: int) -> None:
        if size != self._sizes[number]:
            self.changes.append((number, size - self._sizes[number]))
            self._sizes[number] = size


def _storages(tensor: Any) -> set[torch.UntypedStorage]:
    """The storages of a tensor, or of the tensors that it wraps at any depth."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return {tensor.untyped_storage()}
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return set().union(*(_storages(part) for part in parts if isinstance(part, Tensor)))
