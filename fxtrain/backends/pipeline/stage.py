"""One stage of a pipeline: the user's own forward, of which this stage runs a part.

A stage is a copy of the model's structure that shares the stage's parameters and has torch's fake
tensors for all others. The whole forward runs in it. Up to the stage's first module, what depends
on other stages' parameters is fake too: it has a shape and no values, and costs little, since
modules without a parameter here answer with what they answered before. What does not (masks,
positions) is computed for real. Where the first module is entered, the fakes among its arguments
are replaced by the tensors that the stage before has sent; where the next stage's first module is
entered, its arguments are this stage's outputs, and the forward is left.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from fxtrain import _tree, ops
from fxtrain._errors import PlanError
from fxtrain.backends.pipeline.fake_stages import OtherStageFakes, ReceivedFakes, StagesMixedError
from fxtrain.backends.pipeline.partition import Layout
from fxtrain.state import DistContext

__all__ = ["Call", "Probe", "Stage", "TensorMeta", "probe"]

Call = tuple[tuple[Any, ...], dict[str, Any]]

_MIXED_STAGES = (
    "it computes with a value of an earlier stage that is no argument of a module of its own, as a "
    "connection around the split is, or with a parameter that is registered before the split and "
    "used after it. Split elsewhere with PP(split=...), or name the parameter in PP(shared=...)"
)


@attrs.frozen
class TensorMeta:
    """A tensor that travels between stages.

    Attributes:
        index: Among the leaves of the arguments of the module with which the later one begins.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def example(self) -> Tensor:
        """A tensor without values of this shape."""
        made = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return made.requires_grad_(self.requires_grad)


@attrs.frozen
class Probe:
    """What a stage needs and gives, as found without values.

    Attributes:
        needs: Tensors of the stage before.
        gives: For each leaf of the arguments of the next stage's first module, or of the outputs:
            "own", "other" for a value of another stage, or "value" for what is no tensor.
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
        # By id of a fake, itself, so that the id stays its own, and what came in its place.
        self.swapped: dict[int, tuple[Any, Tensor]] = {}

    def now(self, leaf: Any) -> Any:
        """What has come in the place of a leaf."""
        return self.swapped.get(id(leaf), (None, leaf))[1]


class _StageEnd(BaseException):
    """The next stage begins here; not an Exception, which a model might catch."""

    def __init__(self, leaves: list[Any]) -> None:
        super().__init__()
        self.leaves = leaves


class Stage(nn.Module):
    """One stage of a model, as torch's schedules run it.

    Args:
        formats: Of parameters, by name, that are computed with in another one than their own.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        index: int,
        ctx: DistContext,
        formats: Mapping[str, torch.dtype],
    ) -> None:
        super().__init__()
        self._hollow = OtherStageFakes()
        self._visit: _StageForward | None = None
        self.first, self.last = index == 0, index == len(layout.ranks) - 1
        # In a tuple, out of reach of parameters(): most of it is fake.
        self._inside = (_shell(module, layout, index, ctx, self._hollow, formats),)
        self.job: Callable[..., Any] = _no_task

    @property
    def shell(self) -> nn.Module:
        """The copy of the model's structure."""
        return self._inside[0]

    def own(self) -> Iterator[nn.Parameter]:
        """The parameters of this stage, as the copy of the model's structure has them."""
        return (one for one in self.shell.parameters() if not self._hollow.made(one))

    def owns(self, part: nn.Module) -> bool:
        """Whether a module has parameters, all of which are this stage's."""
        held = list(part.parameters())
        return bool(held) and not any(map(self._hollow.made, held))

    def show(self) -> None:
        """Let torch see the parameters to train: zero-bubble schedules go through them."""
        self.held = nn.ParameterList(one for one in self.own() if one.requires_grad)

    def prepare(self, layout: Layout, index: int) -> None:
        """Add what makes the forward of the whole model this stage's part of it.

        After every other change to modules: what has been sent is there before their hooks.
        """
        shell = self.shell
        starts = [shell.get_submodule(name) for name in layout.starts]
        for part in _outermost(shell, starts, self._without_parameters):
            for inner in part.modules():
                vars(inner).pop("_compiled_call_impl", None)  # nothing there to compile
            part.forward = functools.partial(self._remembered, part.forward, {})
        if not self.first:
            for part in _outermost(shell, starts, self.owns):
                _before(part, self._replace)
            _before(starts[index - 1], self._enter)
        if not self.last:
            _before(starts[index], self._leave)
        self.register_forward_pre_hook(_numbered, with_kwargs=True, prepend=True)

    def train(self, mode: bool = True) -> "Stage":  # noqa: FBT001, FBT002 - torch's signature
        super().train(mode)
        self.shell.train(mode)
        return self

    def forward(self, *received: Tensor, index: int) -> Any:
        """Run one micro-batch, by whatever job is set."""
        return self.job(self, received, index)

    def visit(
        self, call: Call, received: tuple[Tensor, ...], sends: tuple[TensorMeta, ...]
    ) -> tuple[bool, Any]:
        """Run the model's forward on one micro-batch's arguments.

        Returns:
            Whether it came to its end, and the outputs; else the tensors to send.
        """
        visit = _StageForward(received, sends)
        with self._visiting(visit):
            try:
                out = self.shell(*call[0], **call[1])
                return True, _tree.map_leaves(visit.now, out) if visit.swapped else out
            except _StageEnd as left:
                leaves = left.leaves
        return False, tuple(_to_send(leaves[meta.index], meta) for meta in sends)

    def probe(self, call: Call) -> Probe:
        """Run it on nothing but shapes, where values are another stage's."""
        visit = _StageForward(probing=True)
        with self._visiting(visit):
            try:
                out = self.shell(*call[0], **call[1])
                leaves, ended = list(map(visit.now, _tree.flatten(out)[0])), True
            except _StageEnd as left:
                leaves, ended = left.leaves, False
        problem = None
        if not self.first and not visit.entered:
            problem = "its first module was not called before the model came to its end"
        elif ended != self.last:
            problem = "the model came to its end before the next stage's first module was called"
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
        return "other" if self._hollow.made(leaf) else "own"

    def _enter(self, part: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the stage's first module: take what the stage before has sent."""
        visit = self._visit
        if visit is None or visit.entered:
            return None
        visit.entered = True
        leaves, shape = _tree.flatten((args, kwargs))
        places = [index for index, leaf in enumerate(leaves) if self._hollow.made(leaf)]
        if visit.probing:
            fakes = [leaves[index] for index in places]
            visit.needs = tuple(
                TensorMeta(index, tuple(one.shape), one.dtype, one.requires_grad)
                for index, one in zip(places, fakes, strict=True)
            )
            mode = ReceivedFakes()
            visit.received = tuple(mode.like(one, one.device) for one in fakes)
        for index, tensor in zip(places, visit.received, strict=True):
            visit.swapped[id(leaves[index])] = (leaves[index], tensor)
            leaves[index] = tensor
        return _tree.unflatten(shape, leaves)

    def _replace(self, part: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before a later module: what the model's forward still holds of the stage before."""
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
        return bool(held) and all(map(self._hollow.made, held))

    def _remembered(
        self, forward: Callable[..., Any], known: dict[Any, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The forward of a module of other stages, which runs once for each kind of arguments."""
        leaves, shape = _tree.flatten((args, kwargs))
        key = (shape.text, torch.is_grad_enabled(), *map(self._kind, leaves))
        if key not in known:
            out = forward(*args, **kwargs)
            outputs, form = _tree.flatten(out)
            if not all(self._hollow.made(one) for one in outputs if isinstance(one, Tensor)):
                return out
            known[key] = (outputs, form)
        outputs, form = known[key]
        return _tree.unflatten(form, [_fresh_output(one) for one in outputs])

    def _kind(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return (self._hollow.made(leaf), leaf.shape, leaf.dtype, leaf.requires_grad)
        return leaf if isinstance(leaf, bool | int | float | str) else type(leaf)


def probe(stage: Stage, call: Call, ctx: DistContext) -> Probe:
    """What a stage needs and gives; whatever stops it is a problem in words.

    Effects:
        None: random generators and buffers are put back.
    """
    shell = stage.shell
    kept = [(buffer, buffer.clone()) for buffer in shell.buffers()]
    try:
        with ops.fork_rng(ctx):
            return stage.probe(call)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        return Probe(
            problem=f"an earlier part of the forward needs values ({error.func}), not only shapes, "
            f"such as for a shape that depends on data, and a stage knows the values of "
            f"none but its own part. Move that into the loss function, before the model is called"
        )
    except StagesMixedError:
        return Probe(problem=_MIXED_STAGES)
    except Exception as error:  # whatever it is, the other stages must hear of it
        return Probe(problem=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def _before(part: nn.Module, hook: Callable[..., Any]) -> None:
    """Let a hook see a module's arguments before anything else does, and what is compiled."""
    compiled: Any = part._compiled_call_impl
    if compiled is None:
        part.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hook(part, args, kwargs) or (args, kwargs)
        return compiled(*args, **kwargs)

    part._compiled_call_impl = call


def _numbered(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A number for the micro-batch, before torch's FSDP moves tensors to the device."""
    return args, {"index": int(kwargs["index"])}


def _shell(
    module: nn.Module,
    layout: Layout,
    index: int,
    ctx: DistContext,
    fake_mode: OtherStageFakes,
    formats: Mapping[str, torch.dtype],
) -> nn.Module:
    """A copy of a module's structure with this stage's own parameters and no others."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in module.buffers()}
    for name, parameter in module.named_parameters():
        if index in layout.stages[name]:
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
    """The outermost modules of a kind that have none of some others inside."""
    apart = not any(
        one is part for one in around for part in module.modules() if part is not module
    )
    if apart and wanted(module):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, around, wanted)


def _fresh_output(leaf: Any) -> Any:
    """A remembered output anew, so that nothing done to it is remembered too."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)


def _to_send(tensor: Tensor, meta: TensorMeta) -> Tensor:
    """A tensor as torch's schedules want it: they detach outputs in place after backward.

    Raises:
        PlanError: it has another shape than the next stage waits for.
    """
    if tuple(tensor.shape) != meta.shape:
        raise PlanError(
            f"PP: a stage gives {list(tensor.shape)} to the next one, and in the first micro-batch "
            f"of such arguments it was {list(meta.shape)}: a shape that depends on data. All "
            f"micro-batches need the same: cut or pad in the loss function, before the model is "
            f"called."
        )
    tensor = tensor.contiguous()
    return tensor.clone() if tensor._is_view() or tensor.is_leaf else tensor


def _no_task(*_: Any) -> Any:
    raise AssertionError("a stage runs inside of a schedule only")
