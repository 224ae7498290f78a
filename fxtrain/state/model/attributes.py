"""Names of `torch.nn.Module` on a wrapped model: which it has, and what to use for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from fxtrain._errors import FxError, StepError
from fxtrain._other_names import call_hint
from fxtrain._record import closest

if TYPE_CHECKING:
    from fxtrain.state.model.module_names import ModuleNames

__all__ = [
    "CopyError",
    "check_copy",
    "check_whole",
    "in_forward",
    "missing_attribute",
]


class CopyError(FxError, TypeError):
    """A wrapped model was to be copied or pickled."""

    code = "FX003"


def missing_attribute(model: ModuleNames[Any], name: str) -> str:
    """What an attribute error says of a name that a wrapped model does not have.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        ...     print(fx.state.model.missing_attribute(model, "in_features"))
        A wrapped model has no attribute 'in_features'. Use model.module.in_features.
    """
    start = f"A wrapped model has no attribute {name!r}."
    if instead := call_hint(name, "model"):
        return f"{start}{instead}"
    if hasattr(model.module, name):
        return f"{start} {_partial_warning(model, name) or f'Use model.module.{name}.'}"
    own = [one for one in dir(type(model)) if not one.startswith("_") and one != name]
    near = call_hint(name) or closest(name, own)
    return f"{start} Its module, a {type(model.module).__name__}, has none either.{near}"


def _partial_warning(model: ModuleNames[Any], name: str) -> str:
    if name != "generate" or _runs_alone(model):
        return ""
    return (
        f"Under {model.strategy.name}, a rank has only part of the weights or of each sequence, so "
        f"it cannot generate without the others. Use with fx.gathered(model) as net: "
        f"net.generate(...)."
    )


def check_whole(model: ModuleNames[Any], call: str) -> None:
    """Refuse to give the weights of a model of which this rank holds a part, or other values.

    Raises:
        StepError: the strategy shards weights, or keeps them in another dtype, or replicas train
            independently.
    """
    if model.plan.local is None and _is_whole(model, exact=True):
        return
    why = (
        "replicas that train independently have different weights"
        if model.plan.local
        else "a rank does not have the full weights in their original dtype"
    )
    raise StepError(
        f"{call}: under {model.strategy.name}, {why}. Use dict(fx.weights(model)) on all ranks, or "
        f"fx.export(model, folder) for files. What this rank has is in model.module.{call}()."
    )


def in_forward(model: ModuleNames[Any], name: str) -> Any:
    """A method of the module that runs it, under the plan's precision.

    Raises:
        AttributeError: the module has no such method, or this rank cannot run it alone.
    """
    method = getattr(model.module, name)
    if not model.closed and not _runs_alone(model):
        raise AttributeError(name)
    handle: Any = model
    inner = attrs.evolve(handle, module=method, engine=method)

    def run(*args: Any, **kwargs: Any) -> Any:
        return model.strategy.forward(inner, args, kwargs)

    return run


def check_copy(model: ModuleNames[Any], call: str) -> NoReturn:
    """Say how to copy, average or store the weights of a model instead of its handle.

    Raises:
        CopyError: always.
    """
    module = (
        "copy.deepcopy(model.module), or for averages AveragedModel(model.module) and its "
        "update_parameters(model.module)"
        if _runs_alone(model)
        else "with fx.gathered(model) as net: copy.deepcopy(net)"
    )
    raise CopyError(
        f"{call}: a wrapped model has optimizers and communicators, which cannot be copied. "
        f"To copy the model, use {module}. To store it, use fx.save(path, ctx, model)."
    )


def _runs_alone(model: ModuleNames[Any]) -> bool:
    """Whether this rank can run the module without the other ranks."""
    return model.ctx.mesh.context == 1 and _is_whole(model)


def _is_whole(model: ModuleNames[Any], *, exact: bool = False) -> bool:
    """Whether this rank's module has the whole of each tensor; exact: of the same dtype."""
    sizes = model.ctx.mesh.sizes
    if sizes["tensor"] > 1 or sizes["pipeline"] > 1:
        return False
    return all(
        weight.here
        and not hasattr(weight.like, "to_local")  # a DTensor
        and (not hasattr(weight.like, "shape") or tuple(weight.like.shape) == weight.shape)
        and (not exact or getattr(weight.like, "dtype", weight.dtype) == weight.dtype)
        for weight in model.strategy.weights(model).values()
    )
