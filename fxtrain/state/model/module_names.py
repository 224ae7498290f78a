"""The names of `torch.nn.Module` that a wrapped model has under every strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self

from typing_extensions import TypeVar

from fxtrain._display import Displayed
from fxtrain._errors import FxError, StepError
from fxtrain.state.model.attributes import (
    check_copy,
    check_whole,
    in_forward,
    missing_attribute,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fxtrain.state.context import DistContext
    from fxtrain.state.plan import Plan

__all__ = ["M_co", "ModuleNames", "check_open"]

M_co = TypeVar("M_co", bound="nn.Module", default="nn.Module", covariant=True)


class ModuleNames(Displayed, Generic[M_co]):
    """Methods and properties of a wrapped model that are those of its module."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def module(self) -> M_co: ...
        @property
        def engine(self) -> Any: ...
        @property
        def ctx(self) -> DistContext: ...
        @property
        def plan(self) -> Plan: ...
        @property
        def strategy(self) -> Any: ...
        @property
        def closed(self) -> list[str]: ...
        @property
        def optimizers(self) -> tuple[Any, ...]: ...

    def __repr__(self) -> str:
        parts = [type(self.module).__name__, self.strategy.name, self.plan.precision.compute]
        parts += [type(one).__name__ for one in self.optimizers]
        where = f"rank {self.ctx.rank} of {self.ctx.world_size} on {self.ctx.device}"
        closed = [f"closed by fx.{word}" for word in self.closed]
        return f"Wrapped({', '.join([*parts, where, *closed])})"

    def _details(self) -> tuple[tuple[str, str], ...]:
        trained = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        every = sum(p.numel() for p in self.module.parameters())
        optimizers = ", ".join(type(one).__name__ for one in self.optimizers)
        return (
            ("module", type(self.module).__name__),
            ("parameters", f"{every:,} on this rank, {trained:,} of them require grad"),
            ("strategy", self.strategy.name),
            ("precision", self.plan.precision.compute),
            ("optimizer", optimizers or "none"),
            ("context", repr(self.ctx)),
            ("plan", repr(self.plan)),
            ("closed", ", ".join(self.closed) or "no"),
        )

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
        check_whole(self, "state_dict")
        return self.module.state_dict()

    @property
    def device(self) -> torch.device:
        """The device of the context."""
        return self.ctx.device

    @property
    def dtype(self) -> torch.dtype:
        """`dtype` of a module that has it."""
        return getattr(self.module, "dtype")  # noqa: B009 - not every module has it

    @property
    def config(self) -> Any:
        """`config` of a module that has it."""
        return self.module.config

    @property
    def generate(self) -> Callable[..., Any]:
        """`generate` of a module that has it, in the plan's precision."""
        return in_forward(self, "generate")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        check_copy(self, "copy.deepcopy(model)")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        check_copy(self, "copying or pickling a model")

    if not TYPE_CHECKING:  # for a type checker, every name would exist

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("__") or name == "module":
                raise AttributeError(name)
            raise AttributeError(missing_attribute(self, name))


def check_open(model: ModuleNames[nn.Module], call: str, kind: type[FxError] = StepError) -> None:
    """Refuse a handle whose module was unwrapped or released, or is inside `fx.gathered`.

    Anything else than a handle is refused too.

    Raises:
        FxError: of this type, with what to do.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        ...     fx.state.check_open(model, "step")
    """
    if not isinstance(model, ModuleNames):
        raise kind(
            f"{call} takes a wrapped model, found {type(model).__name__}. Use "
            f"model = fx.wrap(net, ctx, plan, optimizer=...)."
        )
    if "unwrap" in model.closed:
        raise kind(
            f"{call}: this model was unwrapped, which closed its handle. To continue training, "
            f"wrap the module again. To get full weights during training, use fx.weights(model) or "
            f"`with fx.gathered(model) as net:` instead of fx.unwrap."
        )
    if "release" in model.closed:
        raise kind(
            f"{call}: fx.release has freed this model and its optimizers. Build the module again, "
            f"and wrap it."
        )
    if model.closed:
        raise kind(
            f"{call}: this model is inside fx.gathered, which puts full weights into its module "
            f"until the block ends. Inside the block use the module that it yields; call this "
            f"afterwards."
        )
