"""Models whose sequences are split over the ranks of the context axis."""

import fnmatch
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import Tensor, nn

from fxtrain import _tree
from fxtrain.backends.context.sequence_tokens import positions_of
from fxtrain.backends.core.module_changes import unknown_patterns, unused_axes
from fxtrain.errors import StepError
from fxtrain.state import CP, DistContext, Plan, Strategy, Wrapped

# Token count of the running forward: set where it starts, read further inside.
_Seen = list[int]


def sequence_problems(ctx: DistContext, plan: Plan, module: nn.Module) -> list[str]:
    """Problems with the context axis of a mesh, and with a model on split sequences."""
    config, ranks = plan.context, ctx.mesh.context
    if config is None:
        return [] if ranks == 1 else unused_axes(ctx, "a plan without context", ("context",))
    problems = unknown_patterns(
        config.tables, _tables(module), field="CP(tables=...)", what="parameter or buffer"
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
    if ranks > 1 and plan.methods:
        problems.append(
            f"CP takes the positions of tokens from the arguments of forward, and "
            f"Plan(methods={plan.methods}) names other methods. Remove methods or context."
        )
    return problems + (_attention_problems(module) if ranks > 1 else [])


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


def _tables(module: nn.Module) -> list[str]:
    """Names of tensors that may have one row per position: parameters and buffers with dims."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in named if tensor.ndim]


def expose_positions(module: nn.Module, ctx: DistContext, plan: Plan) -> None:
    """Make forward use the table rows and the positions of this rank's tokens.

    Call it before blocks are recomputed, so that recomputation sees the same rows.

    Effects:
        Sets `forward` on the modules that own the tables, and on the module itself.
    """
    if plan.context is None or ctx.mesh.context == 1:
        return
    config: CP = plan.context
    seen, takes = [0], list(_arguments(module))
    for owner, names in _owners(module, config):
        owner.forward = functools.partial(_with_rows, owner, names, seen, ctx, plan, owner.forward)
    for part in _masked(module, config):
        part.forward = _maskless(part)
    module.forward = functools.partial(
        _recording_positions, module, seen, ctx, plan, takes, module.forward
    )


def _owners(module: nn.Module, config: CP) -> list[tuple[nn.Module, list[str]]]:
    chosen = {n for n in _tables(module) if any(fnmatch.fnmatchcase(n, p) for p in config.tables)}
    owners: list[tuple[nn.Module, list[str]]] = []
    for prefix, part in module.named_modules():
        own = [*part._parameters, *part._buffers]
        names = [name for name in own if f"{prefix}.{name}".lstrip(".") in chosen]
        if names:
            owners.append((part, names))
    return owners


def _masked(module: nn.Module, config: CP) -> list[nn.Module]:
    """The innermost modules that pass a mask to attention which is causal without it."""
    if not config.causal:
        return []
    parts = [part for part in module.modules() if "attention_mask" in _arguments(part)]
    return [
        part
        for part in parts
        if not any(inner is not part and inner in parts for inner in part.modules())
    ]


def _arguments(part: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(part.forward).parameters


def _maskless(part: nn.Module) -> Callable[..., Any]:
    # A mask for this rank's tokens may exist on one rank and not on another, and in transformers
    # it decides in which form keys arrive.
    forward, signature = part.forward, inspect.signature(part.forward)

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["attention_mask"] = None
        return forward(*bound.args, **bound.kwargs)

    return run


def _with_rows(
    owner: nn.Module,
    names: list[str],
    seen: _Seen,
    ctx: DistContext,
    plan: Plan,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    (count,) = seen
    positions = positions_of(count, ctx, plan)
    whole = count * ctx.mesh.context
    for name in names:
        table: Any = owner._parameters.get(name)
        table = owner._buffers[name] if table is None else table
        if table.shape[0] < whole:
            raise StepError(
                f"CP(tables=...): {name} of {type(owner).__name__} has {table.shape[0]} rows, but "
                f"sequences have {whole} tokens over {ctx.mesh.context} context ranks. Give the "
                f"model a longer table, or use shorter sequences."
            )
        # Attribute lookup finds it before the table, which the module still owns.
        vars(owner)[name] = table.index_select(0, positions)
    try:
        return forward(*args, **kwargs)
    finally:
        for name in names:
            vars(owner).pop(name, None)


def _recording_positions(
    module: nn.Module,
    seen: _Seen,
    ctx: DistContext,
    plan: Plan,
    takes: list[str],
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    config: Any = plan.context
    leaves = _tree.flatten((args, kwargs))[0]
    counts = [x.shape[config.dim] for x in leaves if isinstance(x, Tensor) and x.ndim > config.dim]
    if not counts:
        raise StepError(
            f"{type(module).__name__} received no tensor with a dimension {config.dim}, the token "
            f"dimension in CP(dim={config.dim}). Pass the tokens to its forward."
        )
    seen[0] = counts[0]
    shifts = kwargs.get("labels") is not None and kwargs.get("shift_labels") is None
    if shifts and hasattr(module, "loss_function"):
        raise StepError(
            f"{type(module).__name__} shifts labels itself, but the token after a rank's last one "
            f"is on another rank. Shift labels in the dataset, and compute the loss from logits."
        )
    if "position_ids" in takes[len(args) :] and kwargs.get("position_ids") is None:
        kwargs["position_ids"] = positions_of(counts[0], ctx, plan).unsqueeze(0)
    return forward(*args, **kwargs)
