"""torch.compile, applied to modules as a plan says, with word of what it made of them."""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fxtrain import ops
from fxtrain.state import Compile, DistContext

__all__ = ["compile_parts"]


def compile_parts(
    parts: Sequence[nn.Module], config: Compile, ctx: DistContext, *, hooked: bool
) -> list[Callable[[], None]]:
    """Compile the calls of some modules, in place.

    Args:
        hooked: Hooks that torch does not trace will stand between a module and its forward.

    Effects:
        Sets torch's compiled call on them and, with `hooked`, `forward` on torch's own modules
        inside. Each call that makes graphs logs how many, on rank 0.

    Returns:
        What takes all of it back.
    """
    undo: list[Callable[[], None]] = []
    told = _CompilationCounter(ctx)
    for part in parts:
        undo += [
            _wrap_forward(inner) for inner in part.modules() if hooked and _needs_own_frame(inner)
        ]
        # What nn.Module.compile sets; but that leaves torch's own modules, nn.Sequential
        # for one, as they are without a word: torch traces nothing that starts in its code.
        compiled: Any = torch.compile(
            _calls(part),
            backend=config.backend,
            mode=config.mode,
            fullgraph=config.fullgraph,
            dynamic=config.dynamic,
        )
        part._compiled_call_impl = told.watched(compiled, type(part).__name__)
        undo.append(functools.partial(vars(part).pop, "_compiled_call_impl", None))
    return undo


class _CompilationCounter:
    """Counts what torch compiles in the calls of a model's parts, and logs it."""

    def __init__(self, ctx: DistContext) -> None:
        from torch._dynamo.utils import counters  # which torch.compile loads anyway

        self._counters = counters
        self._log = ops.log(ctx, "fxtrain.compile")
        self._made = 0
        self._called = False

    def watched(self, compiled: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A compiled call that says so when it makes graphs, or when the first makes none."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before = self._counters["stats"]["unique_graphs"]
            out = compiled(*args, **kwargs)
            made = self._counters["stats"]["unique_graphs"] - before
            if made or not self._called:
                self._tell(made, name)
            return out

        return call

    def _tell(self, made: int, name: str) -> None:
        self._made += made
        if made:
            self._log.info("torch.compile made %d graphs of %s, %d so far", made, name, self._made)
        else:
            self._log.warning(
                "torch.compile made no graph of %s, which runs as it is. Run with "
                "TORCH_LOGS=graph_breaks to see why, or leave compile out of the plan.",
                name,
            )
        self._called = True


def _calls(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return call


def _needs_own_frame(module: nn.Module) -> bool:
    """Whether torch traces a module's forward only from a frame outside of torch."""
    return str(getattr(type(module).forward, "__module__", "")).startswith("torch.nn.")


def _wrapped_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


def _wrap_forward(module: nn.Module) -> Callable[[], None]:
    """Let a module's forward begin in a frame that torch traces, one for all modules."""
    if "forward" in vars(module):
        return lambda: None
    module.forward = types.MethodType(_wrapped_forward, module)
    return functools.partial(vars(module).pop, "forward", None)
