"""One stage of a pipeline: a part of the user's own forward.

A stage is a copy of the model's structure that shares the stage's parameters and has torch's fake
tensors for all others. The whole forward runs in it. Before the stage's first module, values that
depend on other stages' parameters are fake too: they have a shape and no values. They cost little,
since modules without parameters here return a cached output. Values that do not depend on
parameters (masks, positions) are computed for real. On entry to the first module, the fakes among
its arguments are replaced by the tensors that the previous stage has sent. On entry to the next
stage's first module, its arguments are this stage's outputs, and the forward is aborted.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.fsdp import FSDPModule

from fxtrain import _tree, ops
from fxtrain.backends.pipeline.partition import Partition
from fxtrain.backends.tensor import is_mixture
from fxtrain.errors import PlanError
from fxtrain.state import DistContext

_MAX_REMEMBERED = 64  # kinds of arguments of a module; masks grow while text is generated

Call = tuple[tuple[Any, ...], dict[str, Any]]

_MIXED_STAGES = (
    "it uses a value of an earlier stage that is not an argument of one of its own modules, as a "
    "connection around the split does, or a parameter that is registered before the split and "
    "used after it. Split elsewhere with PP(split=...), or name the parameter in PP(shared=...)"
)


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
    """Values of other stages: shapes only, never written into a tensor of this stage.

    Args:
        buffers: Local copies of buffers owned by other stages, such as running statistics. Writes
            to them are discarded.
    """

    def __init__(self, buffers: Iterable[Tensor] = ()) -> None:
        super().__init__()
        storages = [buffer.untyped_storage() for buffer in buffers]
        self._dropped = {storage._cdata: storage for storage in storages}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and any(map(self.made, _tree.flatten((args, kwargs or {}))[0])):
            for argument, value in zip(func._schema.arguments, args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and isinstance(value, Tensor) and not self._may_write(value):
                    raise PlanError(
                        f"{func} writes what an earlier stage computes into a tensor that this "
                        f"stage creates itself, which would lose it"
                    )
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _may_write(self, value: Tensor) -> bool:
        return self.made(value) or value.untyped_storage()._cdata in self._dropped


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


@attrs.frozen
class TensorMeta:
    """A tensor that is sent between stages.

    Attributes:
        index: Its index among the leaves of the arguments of the later stage's first module.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def example(self) -> Tensor:
        """A fake tensor of this shape."""
        made = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return made.requires_grad_(self.requires_grad)


@attrs.frozen
class Probe:
    """The inputs and outputs of a stage, found without values.

    Attributes:
        needs: Tensors of the previous stage.
        gives: For each leaf of the arguments of the next stage's first module, or of the outputs:
            "own", "other" for a value of another stage, or "value" for a leaf that is not a tensor.
        problem: Why the model cannot be split here.
    """

    needs: tuple[TensorMeta, ...] = ()
    gives: tuple[str, ...] = ()
    problem: str | None = None


class _StageForward:
    """One forward through a stage, as its hooks see it."""

    def __init__(
        self,
        received: tuple[Tensor, ...] = (),
        sends: tuple[TensorMeta, ...] = (),
        *,
        probing: bool = False,
    ) -> None:
        self.received = received
        self.sends = sends
        self.probing = probing
        self.entered = False
        self.needs: tuple[TensorMeta, ...] = ()
        # By id of a fake: the fake itself, so that its id is not reused, and its replacement.
        self.swapped: dict[int, tuple[Any, Tensor]] = {}

    def now(self, leaf: Any) -> Any:
        """The replacement of a leaf."""
        return self.swapped.get(id(leaf), (None, leaf))[1]


# Not an Exception: `except Exception` in the model's forward must not stop it.
class _StageEnd(BaseException):
    """Raised where the next stage begins, which ends the forward of this stage."""

    def __init__(self, leaves: list[Any]) -> None:
        super().__init__()
        self.leaves = leaves


class Stage(nn.Module):
    """One stage of a model, as torch's schedules run it.

    Args:
        formats: Dtypes of parameters, by name, that are computed in another dtype than their own.
    """

    def __init__(
        self,
        module: nn.Module,
        partition: Partition,
        index: int,
        ctx: DistContext,
        formats: Mapping[str, torch.dtype],
    ) -> None:
        super().__init__()
        # Every stage runs them where they depend on no parameter: each changes copies of its own.
        others = {
            id(buffer): buffer.clone()
            for name, buffer in module.named_buffers()
            if index not in partition.stages[name]
        }
        self._fakes = OtherStageFakes(others.values())
        self._visit: _StageForward | None = None
        self.first, self.last = index == 0, index == len(partition.ranks) - 1
        # In a tuple, hidden from parameters(): most of it is fake.
        self._inside = (_shell(module, partition, index, ctx, self._fakes, formats, others),)
        self.job: Callable[..., Any] | None = None  # while a schedule runs

    @property
    def shell(self) -> nn.Module:
        """The copy of the model's structure."""
        return self._inside[0]

    def own(self) -> Iterator[nn.Parameter]:
        """The parameters of this stage, as the copy of the model's structure has them."""
        return (
            parameter for parameter in self.shell.parameters() if not self._fakes.made(parameter)
        )

    def owns(self, part: nn.Module) -> bool:
        """Whether a module has parameters, all of which belong to this stage."""
        held = list(part.parameters())
        return bool(held) and not any(map(self._fakes.made, held))

    def show(self) -> None:
        """Let torch see the parameters: zero-bubble schedules iterate over the trained ones."""
        self.held = nn.ParameterList(self.own())

    def prepare(self, partition: Partition, index: int) -> None:
        """Add the hooks that reduce the forward of the whole model to this stage's part.

        After every other change to modules: received tensors are then in place before other hooks.
        """

        def number(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            # Before torch's FSDP moves tensors to the device.
            return args, {"index": int(kwargs["index"])}

        shell = self.shell
        starts = [shell.get_submodule(name) for name in partition.starts]
        for part in filter(is_mixture, shell.modules()):
            part.forward = functools.partial(_mixed, part, part.forward)
        for part in _outermost(shell, starts, self._without_parameters):
            for inner in part.modules():
                vars(inner).pop("_compiled_call_impl", None)  # nothing to compile there
            part.forward = functools.partial(self._remembered, part.forward, {})
        if not self.first:
            for part in _outermost(shell, starts, self.owns):
                _before(part, self._replace)
            _before(starts[index - 1], self._enter)
        if not self.last:
            _before(starts[index], self._leave)
        self.register_forward_pre_hook(number, with_kwargs=True, prepend=True)

    def train(self, mode: bool = True) -> "Stage":  # noqa: FBT001, FBT002 - torch's signature
        super().train(mode)
        self.shell.train(mode)
        return self

    def forward(self, *received: Tensor, index: int) -> Any:
        """Run one micro-batch, by the current job."""
        assert self.job is not None
        return self.job(self, received, index)

    def visit(
        self, call: Call, received: tuple[Tensor, ...], sends: tuple[TensorMeta, ...]
    ) -> tuple[bool, Any]:
        """Run the model's forward on one micro-batch's arguments.

        Returns:
            Whether the forward completed, and its outputs; otherwise the tensors to send.
        """
        visit = _StageForward(received, sends)
        with self._visiting(visit):
            try:
                out = self.shell(*call[0], **call[1])
                return True, _tree.map_leaves(visit.now, out) if visit.swapped else out
            except _StageEnd as left:
                leaves = left.leaves
        return False, tuple(as_sent(leaves[meta.index], meta) for meta in sends)

    def probe(self, call: Call) -> Probe:
        """Run it on shapes only, where values belong to another stage."""
        visit = _StageForward(probing=True)
        with self._visiting(visit):
            try:
                out = self.shell(*call[0], **call[1])
                leaves, ended = list(map(visit.now, _tree.flatten(out)[0])), True
            except _StageEnd as left:
                leaves, ended = left.leaves, False
        problem = None
        if not self.first and not visit.entered:
            problem = "its first module was not called before the model's forward returned"
        elif ended != self.last:
            problem = "the model's forward returned before the next stage's first module was called"
        return Probe(needs=visit.needs, gives=tuple(map(self._given, leaves)), problem=problem)

    @contextmanager
    def _visiting(self, visit: _StageForward) -> Iterator[None]:
        self._visit = visit
        try:
            yield
        finally:
            self._visit = None

    def _given(self, leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return "value"
        return "other" if self._fakes.made(leaf) else "own"

    def _enter(self, part: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the stage's first module: take what the previous stage has sent."""
        visit = self._visit
        if visit is None or visit.entered:
            return None
        visit.entered = True
        leaves, shape = _tree.flatten((args, kwargs))
        # Whatever has no values here is what the previous stage has to send.
        places = [index for index, leaf in enumerate(leaves) if self._fakes.made(leaf)]
        if visit.probing:
            fakes = [leaves[index] for index in places]
            visit.needs = tuple(
                TensorMeta(index, tuple(fake.shape), fake.dtype, fake.requires_grad)
                for index, fake in zip(places, fakes, strict=True)
            )
            mode = ReceivedFakes()
            visit.received = tuple(mode.like(fake, fake.device) for fake in fakes)
        for index, tensor in zip(places, visit.received, strict=True):
            # The forward may still hold the fake in a variable, and pass it to a later module.
            visit.swapped[id(leaves[index])] = (leaves[index], tensor)
            leaves[index] = tensor
        return _tree.unflatten(shape, leaves)

    def _replace(self, part: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before a later module: replace what the forward still uses of the previous stage."""
        visit = self._visit
        if visit is None or not visit.swapped:
            return None
        leaves, shape = _tree.flatten((args, kwargs))
        if not any(id(leaf) in visit.swapped for leaf in leaves):
            return None
        return _tree.unflatten(shape, list(map(visit.now, leaves)))

    def _leave(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        visit = self._visit
        if visit is not None and (self.first or visit.entered):
            raise _StageEnd(list(map(visit.now, _tree.flatten((args, kwargs))[0])))

    def _without_parameters(self, part: nn.Module) -> bool:
        held = list(part.parameters())
        return bool(held) and all(map(self._fakes.made, held))

    def _remembered(
        self, forward: Callable[..., Any], known: dict[Any, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The forward of a module of other stages, which runs once for each kind of arguments."""
        leaves, shape = _tree.flatten((args, kwargs))
        key = (shape.text, torch.is_grad_enabled(), *map(self._kind, leaves))
        if key not in known:
            out = forward(*args, **kwargs)
            outputs, form = _tree.flatten(out)
            if not all(
                self._fakes.made(tensor) for tensor in outputs if isinstance(tensor, Tensor)
            ):
                return out
            if len(known) >= _MAX_REMEMBERED:
                known.clear()
            known[key] = (outputs, form)
        outputs, form = known[key]
        return _tree.unflatten(form, [_fresh_output(tensor) for tensor in outputs])

    def _kind(self, leaf: Any) -> Any:
        return self._fakes.made(leaf), leaf_kind(leaf)


def leaf_kind(leaf: Any) -> Any:
    """Equal for arguments of one kind: tensors of a shape and dtype, equal plain values."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, bool | int | float | str) else type(leaf)


def probe(stage: Stage, call: Call, ctx: DistContext) -> Probe:
    """The inputs and outputs of a stage; whatever prevents it is a problem in words.

    Effects:
        None: random generators and buffers are restored.
    """
    shell = stage.shell
    kept = [(buffer, buffer.clone()) for buffer in shell.buffers()]
    try:
        with ops.fork_rng(ctx):
            return stage.probe(call)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        return Probe(
            problem=f"an earlier part of the forward needs values ({error.func}), not only shapes, "
            f"for example for a shape that depends on data, and a stage only has the values of its "
            f"own part. Move that into the loss function, before the model is called"
        )
    except StagesMixedError:
        return Probe(problem=_MIXED_STAGES)
    except Exception as error:  # whatever it is, the other stages must receive it
        return Probe(problem=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def reshard_stage(stage: Stage) -> None:
    """Free what a sharded stage has gathered, before its shards are written to."""
    for part in stage.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _before(part: nn.Module, hook: Callable[..., Any]) -> None:
    """Give a hook a module's arguments before any other hook or compiled code sees them."""
    compiled: Any = part._compiled_call_impl
    if compiled is None:
        part.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hook(part, args, kwargs) or (args, kwargs)
        return compiled(*args, **kwargs)

    part._compiled_call_impl = call


def _shell(
    module: nn.Module,
    partition: Partition,
    index: int,
    ctx: DistContext,
    fake_mode: OtherStageFakes,
    formats: Mapping[str, torch.dtype],
    others: Mapping[int, Tensor],
) -> nn.Module:
    """A copy of a module's structure with this stage's own tensors, and buffers of other stages."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in module.buffers()} | dict(others)
    for name, parameter in module.named_parameters():
        if index in partition.stages[name]:
            memo[id(parameter)] = parameter
            continue
        with fake_mode:
            dtype = formats.get(name, parameter.dtype)
            empty = torch.empty(parameter.shape, dtype=dtype, device=ctx.device)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)


def _outermost(
    module: nn.Module, around: list[nn.Module], wanted: Callable[[nn.Module], bool]
) -> Iterator[nn.Module]:
    """The outermost modules of a kind that contain none of some others."""
    apart = not any(
        outer is part for outer in around for part in module.modules() if part is not module
    )
    if apart and wanted(module):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, around, wanted)


def _mixed(part: nn.Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The forward of a mixture of experts; the shape of its output where tokens have no values."""
    given = (*args, *kwargs.values())
    modes = [getattr(value, "fake_mode", None) for value in given]
    mode = next((mode for mode in modes if isinstance(mode, OtherStageFakes | ReceivedFakes)), None)
    if mode is None:
        return forward(*args, **kwargs)
    trained = any(tensor.requires_grad for tensor in (*given[:3], *part.parameters()))
    out = mode.like(given[0], given[0].device)
    return out.requires_grad_(trained and torch.is_grad_enabled())


def _fresh_output(leaf: Any) -> Any:
    """A copy of a cached output, so that in-place changes do not reach the cache."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)


def as_sent(tensor: Tensor, meta: TensorMeta) -> Tensor:
    """A tensor as torch's schedules need it: they detach outputs in place after backward.

    Raises:
        PlanError: its shape differs from the one the next stage expects.
    """
    if tuple(tensor.shape) != meta.shape:
        raise PlanError(
            f"PP: a stage sends {list(tensor.shape)} to the next one, but sent {list(meta.shape)} "
            f"in the first micro-batch with such arguments, so shapes depend on data. All "
            f"micro-batches must have equal shapes: truncate or pad in the loss function, before "
            f"the model is called."
        )
    tensor = tensor.contiguous()
    # `detach_` refuses a view, and would detach the model's own leaf.
    return tensor.clone() if tensor._is_view() or tensor.is_leaf else tensor
