"""torch.compile, applied to modules as a plan says, with a log of the graphs it produced."""

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fxtrain import ops
from fxtrain._display import counted
from fxtrain.state import Compile, DistContext


def compile_parts(
    parts: Sequence[nn.Module], config: Compile, ctx: DistContext, *, hooked: bool
) -> None:
    """Compile the calls of some modules, in place.

    Args:
        hooked: Hooks that torch does not trace will be between a module and its forward.

    Effects:
        Sets torch's compiled call on them and, with `hooked`, `forward` on torch's own modules
        inside. Each call that creates graphs logs their number, on rank 0.
    """
    told = _CompilationCounter(ctx)
    for part in parts:
        for inner in part.modules():
            if hooked and _needs_own_frame(inner):
                _wrap_forward(inner)
        # What nn.Module.compile sets. But that silently leaves torch's own modules, such as
        # nn.Sequential, uncompiled: torch traces nothing that starts in its own code.
        compiled: Any = torch.compile(
            _calls(part),
            backend=config.backend,
            mode=config.mode,
            fullgraph=config.fullgraph,
            dynamic=config.dynamic,
            options={"freezing": True} if config.prepack else None,
        )
        part._compiled_call_impl = told.watched(compiled, type(part).__name__)


class _CompilationCounter:
    """Counts and logs what torch compiles in the calls of a model's parts."""

    def __init__(self, ctx: DistContext) -> None:
        from torch._dynamo.utils import counters  # which torch.compile loads anyway

        self._counters = counters
        self._log = ops.log(ctx, "fxtrain.compile")
        self._made = 0
        self._called = False

    def watched(self, compiled: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A compiled call that logs when it creates graphs, or when the first one creates none."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before, frames = self._made_so_far()
            out = compiled(*args, **kwargs)
            now, looked_at = self._made_so_far()
            # torch uses graphs of an equal module again, without a look at the call.
            if now > before or (not self._called and looked_at > frames):
                self._tell(now - before, name)
            return out

        return call

    def _made_so_far(self) -> tuple[int, int]:
        """Graphs that torch created, and calls that it tried to compile."""
        return self._counters["stats"]["unique_graphs"], self._counters["frames"]["total"]

    def _tell(self, made: int, name: str) -> None:
        self._made += made
        if made:
            graphs = counted(made, "graph")
            self._log.info("torch.compile created %s of %s, %d so far", graphs, name, self._made)
        else:
            self._log.warning(
                "torch.compile created no graph of %s, which runs uncompiled. Run with "
                "TORCH_LOGS=graph_breaks to see why, or remove compile from the plan.",
                name,
            )
        self._called = True


def _calls(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return call


def _needs_own_frame(module: nn.Module) -> bool:
    """Whether torch only traces a module's forward from a frame outside torch."""
    return str(getattr(type(module).forward, "__module__", "")).startswith("torch.nn.")


def _wrapped_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


def _wrap_forward(module: nn.Module) -> None:
    """Start a module's forward in a frame that torch traces, one for all modules."""
    if "forward" not in vars(module):
        module.forward = types.MethodType(_wrapped_forward, module)
