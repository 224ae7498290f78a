"""Token positions of a model whose sequences are split over ranks."""

import fnmatch
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from fxtrain import _tree
from fxtrain.errors import StepError
from fxtrain.ops.sequence_tokens import positions_of
from fxtrain.state import CP, DistContext, Plan

# Token count of the running forward: set where it starts, read further inside.
_Seen = list[int]


def tables(module: nn.Module) -> list[str]:
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
    chosen = {n for n in tables(module) if any(fnmatch.fnmatchcase(n, p) for p in config.tables)}
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
