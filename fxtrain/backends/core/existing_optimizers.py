"""Optimizers and schedulers that were made before the model was wrapped, as factories.

A strategy may replace the parameters of a module, so that it makes its optimizers last, by a
factory. An optimizer that is there already is pointed to the parameters as the strategy holds
them, by their names: it stays the same object, and so do the schedulers that were built on it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from fxtrain import _tree
from fxtrain.backends.core.host_optimizer import refuse_existing
from fxtrain.backends.core.optimizers import flattened, refuse_closures
from fxtrain.errors import PlanError
from fxtrain.ops.whole_tensors import plain_name

_FACTORY = "optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4)"
_BOTH = "fx.wrap(net, ctx, plan, optimizer=optimizer, scheduler=scheduler)"


def described(objects: Any, module: nn.Module) -> str:
    """What ranks compare of an optimizer or scheduler."""
    if objects is None:
        return "none"
    names = _names_of(module)
    kinds = [type(each).__name__ for each in _all(objects, LRScheduler)]
    for each in _all(objects, torch.optim.Optimizer):
        sizes = [len(group["params"]) for group in each.param_groups]
        own = sum(id(p) in names for group in each.param_groups for p in group["params"])
        kinds.append(f"{type(each).__name__} of groups of {sizes}, {own} of this model")
    return ", ".join(kinds) or "given"


def as_factories(optimizer: Any, scheduler: Any, module: nn.Module) -> tuple[Any, Any]:
    """Factories in place of ready-made optimizers and schedulers; anything else as it is.

    Args:
        optimizer: An argument of `wrap`: a factory, an optimizer, or a list or dict of them.
        scheduler: Likewise.
        module: The module that is about to be wrapped.

    Raises:
        PlanError: an optimizer holds parameters of another model, shares one with another
            optimizer, or needs a closure; or a scheduler was built on another optimizer.
    """
    optimizers = _all(optimizer, torch.optim.Optimizer)
    schedulers = _all(scheduler, LRScheduler)
    if optimizers:
        refuse_closures(optimizers)
        refuse_existing(optimizers)
        names = _names_of(module)
        _check_parameters(optimizers, names, module)
        optimizer = _optimizer_factory(optimizer, optimizers, names, module)
    for each in schedulers:
        if not any(getattr(each, "optimizer", None) is known for known in optimizers):
            raise PlanError(
                f"wrap(scheduler=...): this {type(each).__name__} was built on an optimizer that "
                f"fx.wrap did not get. Pass both, {_BOTH}, or a factory for each."
            )
    if schedulers:
        scheduler = _scheduler_factory(scheduler, schedulers, optimizers)
    return optimizer, scheduler


def _all(objects: Any, kind: type) -> list[Any]:
    """The ready-made objects in an argument of `wrap`; none if it is a factory."""
    entries = flattened(objects)
    return entries if all(isinstance(entry, kind) for entry in entries) else []


def _names_of(module: nn.Module) -> dict[int, list[str]]:
    """The names of each parameter, several where it is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain_name(name))
    return names


def _check_parameters(
    optimizers: list[torch.optim.Optimizer], names: Mapping[int, list[str]], module: nn.Module
) -> None:
    seen: set[int] = set()
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        foreign = [tuple(p.shape) for p in parameters if id(p) not in names]
        if foreign:
            raise PlanError(
                f"wrap(optimizer=...): {len(foreign)} of the {len(parameters)} parameters of "
                f"this {type(optimizer).__name__} are not those of the {type(module).__name__} "
                f"(the first has the shape {list(foreign[0])}). Build it on the parameters of the "
                f"module before it is wrapped, or pass a factory: {_FACTORY}"
            )
        twice = [names[id(p)][0] for p in parameters if id(p) in seen]
        if twice:
            raise PlanError(
                f"wrap(optimizer=...): several of these optimizers hold {twice[0]}, which each of "
                f"them would update. Give every parameter to one optimizer."
            )
        seen.update(map(id, parameters))


def _optimizer_factory(
    objects: Any,
    optimizers: list[torch.optim.Optimizer],
    names: Mapping[int, list[str]],
    module: nn.Module,
) -> Callable[[Any], Any]:
    # Now, since a parameter that is replaced may be freed, and its id used again.
    layouts = [
        [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    dtypes = {
        p: p.dtype for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]
    }

    def adopt(_: Any) -> Any:
        parameters = {plain_name(n): p for n, p in module.named_parameters(remove_duplicate=False)}
        for optimizer, layout in zip(optimizers, layouts, strict=True):
            now = [
                [
                    next((parameters[name] for name in several if name in parameters), None)
                    for several in names_of_group
                ]
                for names_of_group in layout
            ]
            _point_to(optimizer, now, dtypes)
        return objects

    return adopt


def _point_to(
    optimizer: torch.optim.Optimizer,
    layout: list[list[nn.Parameter | None]],
    dtypes: Mapping[Any, torch.dtype],
) -> None:
    """Give an optimizer the parameters as they are now; those of other ranks leave its groups.

    Args:
        dtypes: Of the parameters as they were, which states of the same dtype follow.
    """
    groups = [(group, list(group["params"])) for group in optimizer.param_groups]
    moved = {
        old: new
        for (_, before), now in zip(groups, layout, strict=True)
        for old, new in zip(before, now, strict=True)
    }
    if any(old is not new for old, new in moved.items()):
        _check_replaceable(optimizer, moved)
    for (group, before), now in zip(groups, layout, strict=True):
        group["params"] = [new for new in now if new is not None]
        if "param_names" in group:
            named = zip(group["param_names"], now, strict=True)
            group["param_names"] = [name for name, new in named if new is not None]
        on_device = group.get("capturable") or group.get("fused")
        for old in before:
            new, state = moved[old], optimizer.state.pop(old, None)
            if state and new is not None:
                optimizer.state[new] = {
                    key: value
                    if key == "step" and not on_device
                    else _like(new, value, dtypes[old])
                    for key, value in state.items()
                }


def _check_replaceable(
    optimizer: torch.optim.Optimizer, moved: Mapping[Any, nn.Parameter | None]
) -> None:
    """Refuse an optimizer that keeps more of its parameters than names can find again."""
    name = type(optimizer).__name__
    states = optimizer.state
    sharded = [p for p, new in moved.items() if hasattr(new, "device_mesh") and p in states]
    if sharded:
        raise PlanError(
            f"wrap(optimizer=...): this {name} has states of {len(sharded)} parameters, which this "
            f"plan shards. Pass a factory, {_FACTORY}, and restore states with fx.restore."
        )
    fields = [
        field
        for field, value in vars(optimizer).items()
        if field not in ("param_groups", "state")
        and any(
            isinstance(leaf, Tensor) and leaf in moved
            for leaf in (value if isinstance(value, set) else _tree.flatten(value)[0])
        )
    ]
    if fields:
        raise PlanError(
            f"wrap(optimizer=...): this plan replaces parameters, and {name} keeps some in its "
            f"field {fields[0]}, outside of its groups. Pass a factory: {_FACTORY}"
        )


def _like(parameter: nn.Parameter, value: Any, dtype: torch.dtype) -> Any:
    """A state on the device of its parameter, and in its dtype if it was in that before."""
    if not isinstance(value, Tensor):
        return value
    follows = value.dtype == dtype
    return value.to(parameter.device, parameter.dtype if follows else value.dtype)


def _scheduler_factory(
    objects: Any, schedulers: list[LRScheduler], optimizers: list[torch.optim.Optimizer]
) -> Callable[[Any], Any]:
    def adopt(new_optimizers: Any) -> Any:
        for old, new in zip(optimizers, _all(new_optimizers, torch.optim.Optimizer), strict=True):
            if new is old:
                continue
            # The strategy has put another optimizer into its place, with the same groups.
            _StepCount(new)
            for scheduler in schedulers:
                _build_on(scheduler, old, new)
        return objects

    return adopt


def _build_on(scheduler: Any, old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    if getattr(scheduler, "optimizer", None) is old:
        scheduler.optimizer = new
    for inner in getattr(scheduler, "_schedulers", ()):
        _build_on(inner, old, new)


class _StepCount(LRScheduler):
    """Has torch note the steps of an optimizer, which schedulers look for, and changes nothing."""

    def _initial_step(self) -> None:
        """Leave learning rates as they are."""
