"""Models whose sequences are split over the ranks of the context axis."""

import functools
from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor, nn

from fxtrain.backends.context.positions import tables
from fxtrain.backends.core.module_changes import unknown_patterns
from fxtrain.errors import StepError
from fxtrain.state import DistContext, Plan, Strategy, Wrapped


def sequence_problems(ctx: DistContext, plan: Plan, module: nn.Module) -> list[str]:
    """Problems with the context axis of a mesh, and with a model on split sequences."""
    config, ranks = plan.context, ctx.mesh.context
    if config is None:
        return [] if ranks == 1 else [_unused(ranks)]
    problems = unknown_patterns(
        config.tables, tables(module), field="CP(tables=...)", what="parameter or buffer"
    )
    if ranks == 1 and ctx.world_size > 1:
        problems.append(
            "Plan(context=...) splits sequences over the mesh's context axis, which has one rank. "
            "Use more: fx.detect(mesh=fx.Mesh(context=2)), or fxtrain launch --mesh context=2."
        )
    if ranks > 1 and plan.compile is not None and plan.recompute:
        problems.append(
            "CP: attention over ranks runs outside compiled code, and torch cannot recompute "
            "blocks that are compiled in pieces. Drop Plan.recompute or Plan.compile."
        )
    return problems + (_attention_problems(module) if ranks > 1 else [])


def _unused(ranks: int) -> str:
    return (
        f"The mesh has context={ranks}, but the plan does not split sequences: these ranks would "
        f"all compute the same. Use Plan(context=fx.CP()), or omit the axis from fx.Mesh(...)."
    )


def _attention_problems(module: nn.Module) -> list[str]:
    fused = [n for n, part in module.named_modules() if isinstance(part, nn.MultiheadAttention)]
    problems: list[str] = []
    if fused:
        problems.append(
            f"CP: {', '.join(fused[:3])} {'is' if len(fused) == 1 else 'are'} "
            f"nn.MultiheadAttention, which computes attention inside torch. Use a layer that "
            f"calls F.scaled_dot_product_attention itself."
        )
    kind = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if isinstance(kind, str) and kind != "sdpa":
        problems.append(
            f"CP: this model's attention is {kind!r}; only torch's attention can run over ranks. "
            f"Load it with attn_implementation='sdpa'."
        )
    return problems


def with_context_parallel(strategy: Strategy, ctx: DistContext, plan: Plan) -> Strategy:
    """The same strategy, with attention over the context axis where the plan asks for it.

    Its own `forward` and `backward` run unchanged, inside the mode that intercepts attention.
    """
    if plan.context is None or ctx.mesh.context == 1:
        return strategy
    # Importing torch's part is slow, and other plans do not need it.
    from fxtrain.backends.context.ring_attention import RingAttention

    # One for the life of the model: compiled code guards on its identity.
    mode = RingAttention(ctx.axis("context").comm.group, plan.context)
    return attrs.evolve(
        strategy,
        forward=functools.partial(_forward, mode, strategy.forward),
        backward=functools.partial(_backward, mode, strategy.backward),
    )


def _forward(
    mode: Any,
    forward: Callable[..., Any],
    model: Wrapped,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    before = mode.calls
    with mode:
        out = forward(model, args, kwargs)
    if mode.calls == before:
        raise StepError(
            f"{type(model.module).__name__} did not call F.scaled_dot_product_attention, so each "
            f"rank's tokens saw only each other. Over a context axis, use that function for "
            f"attention; a model without attention does not need the axis."
        )
    return out


def _backward(
    mode: Any, backward: Callable[[Tensor, Wrapped], None], loss: Tensor, model: Wrapped
) -> None:
    # Recomputed blocks run forward again, including attention.
    with mode:
        backward(loss, model)
