"""A wrapped model: the handle that steps take, with the names of `nn.Module` that are right."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self

import attrs
from typing_extensions import TypeVar

from fxtrain._display import Displayed
from fxtrain._other_names import call_hint
from fxtrain.errors import FxError, StepError
from fxtrain.state.window import ModelStatus

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fxtrain.state.context import DistContext
    from fxtrain.state.placement import Placement
    from fxtrain.state.plan import Plan
    from fxtrain.state.strategy import Strategy
    from fxtrain.state.window import AccumulationWindow

METHOD = "fxtrain_method"  # the argument of an engine's call that names a method of the module
M_co = TypeVar("M_co", bound="nn.Module", default="nn.Module", covariant=True)


class CopyError(FxError, TypeError):
    """An attempt to copy or pickle a wrapped model."""

    code = "FX003"


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Wrapped(Displayed, Generic[M_co]):
    """A model prepared for a context and a plan; call it like the model.

    It has the names of `nn.Module` that are right under its strategy, and the methods that
    `Plan.methods` names, which run as forward runs; any other name is an AttributeError that says
    what to use.

    Attributes:
        module: The user's module.
        engine: What runs forward: the module itself, or the strategy's wrapper around it.
        optimizer: What the optimizer factory returned, or None.
        scheduler: What the scheduler factory returned, or None.
        optimizers: Every optimizer, in order.
        schedulers: Every scheduler, in order.
        scaler: The fp16 loss scaler, or None.
        ctx: The context it was wrapped for.
        plan: The plan it was wrapped under.
        strategy: The functions that carry the plan out.
        window: Sums over the micro-batches of the open accumulation window.
        undo: Reverts what wrapping did to the module; a strategy gives what reverts values, and
            `fx.wrap` adds classes, hooks and attributes.
        hide_changes: () → function: removes from the module what wrapping added, until the
            returned function is called, which restores everything. Values are not changed.
        dtypes: By name, the original dtypes of parameters and buffers.
        placement: Under `Offload`, where each unit of the model is held; None otherwise.
        strategy_state: What only this strategy keeps, as a record of its own type: a `Round`
            under `Plan.local`, the config of DeepSpeed's engine, XLA's count of compilations;
            None if there is nothing.
        status: The mutable part of the handle, shared by its copies with other fields
            (`attrs.evolve`), which have the same module.
    """

    module: M_co
    engine: Any = attrs.field(repr=False)
    optimizer: Any = None
    scheduler: Any = None
    optimizers: tuple[torch.optim.Optimizer, ...] = attrs.field(default=(), repr=False)
    schedulers: tuple[torch.optim.lr_scheduler.LRScheduler, ...] = attrs.field(
        default=(), repr=False
    )
    scaler: torch.amp.GradScaler | None = None
    ctx: DistContext
    plan: Plan
    strategy: Strategy = attrs.field(repr=False)
    window: AccumulationWindow = attrs.field(repr=False)
    undo: Callable[[], None] = attrs.field(repr=False)
    strategy_state: Any = attrs.field(default=None, repr=False)
    hide_changes: Callable[[], Callable[[], None]] = attrs.field(
        default=lambda: lambda: None, repr=False
    )
    dtypes: Mapping[str, torch.dtype] = attrs.field(factory=dict, repr=False)
    placement: Placement | None = attrs.field(default=None, repr=False)
    status: ModelStatus = attrs.field(factory=ModelStatus, repr=False)

    # As torch has it for `nn.Module`, whose type says nothing of `forward`: a protocol with its
    # parameters is no `nn.Module`, and the strategy may change the outputs.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.status.closed:
            check_open(self, "calling the model")
        if self.plan.nonfinite != "ignore" or self.plan.even == "uneven":
            keep_buffers(self)
        return self.strategy.forward(self, args, kwargs)

    def __repr__(self) -> str:
        parts = [type(self.module).__name__, self.strategy.name, self.plan.precision.compute]
        parts += [type(optimizer).__name__ for optimizer in self.optimizers]
        where = f"rank {self.ctx.rank} of {self.ctx.world_size} on {self.ctx.device}"
        closed = [f"closed by fx.{self.status.closed}"] if self.status.closed else []
        return f"Wrapped({', '.join([*parts, where, *closed])})"

    def train(self) -> Self:
        """Put the module into training mode and return this handle."""
        check_open(self, "train")
        self.engine.train()
        return self

    def eval(self) -> Self:
        """Put the module into evaluation mode and return this handle."""
        check_open(self, "eval")
        self.engine.eval()
        return self

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self.module.training

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the module as the strategy holds them."""
        check_open(self, "parameters")
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the module as the strategy holds them, with their names."""
        check_open(self, "named_parameters")
        return self.module.named_parameters()

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The module and its submodules, with their names."""
        check_open(self, "named_modules")
        return self.module.named_modules()

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the module, where each rank holds all of it.

        Raises:
            StepError: the strategy shards weights; it says what to use.
        """
        check_open(self, "state_dict")
        if self.plan.local is not None or not _has_full_weights(self, same_dtype=True):
            raise StepError(
                f"state_dict: under {self.strategy.name}, a rank does not have the full weights in "
                f"their original dtype, or replicas have different ones. Use "
                f"dict(fx.weights(model)) on all ranks, or fx.export(model, folder) for files. "
                f"What this rank has is in model.module.state_dict()."
            )
        return self.module.state_dict()

    @property
    def device(self) -> torch.device:
        """The device of the context."""
        return self.ctx.device

    @property
    def dtype(self) -> torch.dtype:
        """That of a module that has one."""
        return getattr(self.module, "dtype")  # noqa: B009 - not every module has it

    @property
    def config(self) -> Any:
        """That of a module that has one."""
        return self.module.config

    @property
    def generate(self) -> Callable[..., Any]:
        """`generate` of a module that has it, in the plan's precision.

        Where ranks hold shards or stages (`FSDP`, `TP`, `PP`), all ranks call it at the same time,
        those of the tensor and pipeline axes with the same arguments. Under `FSDP` it runs with
        `synced_gpus=True`, so that ranks whose sequences have ended take part in the forwards of
        the others. Under `PP` it runs stage by stage, and each rank caches its own layers.

        Raises:
            AttributeError: the module has none, or one without `synced_gpus` that this rank cannot
                run alone, or its ranks run different parts of sequences.
        """
        method: Any = getattr(self.module, "generate")  # noqa: B009 - not every module has it
        handle: Any = self
        strategy: Any = self.strategy
        cuts_sequences = self.ctx.mesh.context > 1
        together = not self.status.closed and (cuts_sequences or not _has_full_weights(self))
        if together and (
            cuts_sequences
            or strategy.generate is None
            or "synced_gpus" not in inspect.signature(method).parameters
        ):
            raise AttributeError("generate")

        def generate(*args: Any, **kwargs: Any) -> Any:
            if together:
                return strategy.generate(handle, method, args, kwargs)
            inner = attrs.evolve(handle, module=method, engine=method)
            return strategy.forward(inner, args, kwargs)

        return generate

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._refuse_copy("copy.deepcopy(model)")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse_copy("copying or pickling a model")

    def _refuse_copy(self, call: str) -> NoReturn:
        raise CopyError(
            f"{call}: a wrapped model has optimizers and communicators, which cannot be copied. To "
            f"copy the model, use with fx.gathered(model) as net: copy.deepcopy(net). Where each "
            f"rank has full weights, copy.deepcopy(model.module) and AveragedModel(model.module) "
            f"do too. To store it, use fx.save(path, ctx, model, position=report.position)."
        )

    if not TYPE_CHECKING:  # for a type checker, every name would exist

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") or name in ("module", "plan"):
                raise AttributeError(name)
            if name in self.plan.methods:
                return functools.partial(_call_method, self, name)
            use = call_hint(name, "model") or _hint(self.module, name)
            raise AttributeError(f"A wrapped model has no attribute {name!r}.{use}")


def keep_buffers(model: Wrapped[Any]) -> None:
    """Keep the values of buffers before training changes them, where that may count for nothing.

    Effects:
        Copies them once a window if its update may be skipped, and once a micro-batch if this rank
        may have no row in it.
    """
    import torch  # already imported by the module; records are imported without it

    status, plan = model.status, model.plan
    for_window = plan.nonfinite != "ignore" and status.before_window is None
    for_call = plan.even == "uneven" and status.before_call is None
    if not (for_window or for_call) or not model.module.training or not torch.is_grad_enabled():
        return
    values = {name: buffer.detach().clone() for name, buffer in model.module.named_buffers()}
    status.before_window = values if for_window else status.before_window
    status.before_call = values if for_call else status.before_call


def settle_buffers(model: Wrapped[Any], *, keep: bool) -> None:
    """After a window, keep the buffers as training has changed them, or restore them.

    Effects:
        Restores values in place. One that was replaced by a buffer of another shape is put back.
    """
    before, model.status.before_window = model.status.before_window or {}, None
    now = dict(model.module.named_buffers()) if before and not keep else {}
    for name, value in before.items() if now else ():
        owner, _, key = name.rpartition(".")
        if name in now and now[name].shape == value.shape:
            now[name].detach().copy_(value)
        else:
            setattr(model.module.get_submodule(owner), key, value.clone())


def _call_method(model: Wrapped[Any], name: str, /, *args: Any, **kwargs: Any) -> Any:
    if model.status.closed:
        check_open(model, f"model.{name}")
    return model(*args, **{**kwargs, METHOD: name})


def is_own_method(module: nn.Module, name: str) -> bool:
    """Whether a name is that of a public method of a module's class, which is not torch's."""
    method = getattr(type(module), name, None)
    of_torch = str(getattr(method, "__module__", "")).startswith("torch.")
    return inspect.isroutine(method) and not name.startswith("_") and not of_torch


def _hint(module: nn.Module, name: str) -> str:
    """What to use in place of an attribute of a module."""
    if name == "generate" and hasattr(module, name):
        return " Use with fx.gathered(model) as net: net.generate(...)."
    if is_own_method(module, name):
        return (
            f" To compute with it as with forward, use fx.Plan(methods=({name!r},)). "
            f"model.module.{name} runs without the plan: without its precision, and on the shards "
            f"of FSDP."
        )
    if name in dict(module.named_children()):
        return (
            f" Its weights are in model.module.{name}. To compute with it, let a method of the "
            f"module do so, and name that in fx.Plan(methods=...)."
        )
    return f" Use model.module.{name}, if the module has it."


def _has_full_weights(model: Wrapped[Any], *, same_dtype: bool = False) -> bool:
    """Whether this rank's module has the whole of each tensor, and in the same dtype if asked."""
    sizes = model.ctx.mesh.sizes
    if sizes["tensor"] > 1 or sizes["pipeline"] > 1:
        return False
    return all(
        weight.here
        and not hasattr(weight.like, "to_local")  # a DTensor
        and (not hasattr(weight.like, "shape") or tuple(weight.like.shape) == weight.shape)
        and (not same_dtype or getattr(weight.like, "dtype", weight.dtype) == weight.dtype)
        for weight in model.strategy.weights(model).values()
    )


_CLOSED = {
    "unwrap": "this model was unwrapped, which closed its handle. To continue training, wrap the "
    "module again. To get full weights during training, use fx.weights(model) or "
    "`with fx.gathered(model) as net:` instead of fx.unwrap.",
    "release": "fx.release has freed this model and its optimizers. Build the module again, and "
    "wrap it.",
    "gathered": "this model is inside fx.gathered, which puts full weights into its module until "
    "the block ends. Inside the block use the module that it yields; call this afterwards.",
}


def check_open(model: Wrapped, call: str, kind: type[FxError] = StepError) -> None:
    """Raise unless `model` is a wrapped model that is not unwrapped, released or gathered."""
    if not isinstance(model, Wrapped):
        raise kind(
            f"{call} takes a wrapped model, found {type(model).__name__}. Use "
            f"model = fx.wrap(net, ctx, plan, optimizer=...)."
        )
    if closed := model.status.closed:
        raise kind(f"{call}: {_CLOSED[closed]}")
