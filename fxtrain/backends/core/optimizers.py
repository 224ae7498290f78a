"""Optimizers and schedulers from the user's factories."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fxtrain.backends.core.host_optimizer import (
    HostOptimizer,
    is_host_optimizer,
    on_host,
    without_device_named,
)
from fxtrain.backends.core.muon import divide_muon, matrices_named
from fxtrain.backends.core.packed_states import has_packed_states, shard_problem, step_without_cache
from fxtrain.errors import PlanError, StepError
from fxtrain.state import DistContext, Strategy

Optimizers = (
    torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]
)
Schedulers = LRScheduler | Sequence[LRScheduler] | Mapping[str, LRScheduler]

_FACTORY = "optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4)"
_SCHEDULER = "scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100)"


class Params(list[nn.Parameter]):
    """The parameters to train, as a list; `named()` returns them with their names."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._named = tuple(named)
        super().__init__(parameter for _, parameter in self._named)

    def named(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """(name, parameter) pairs, for groups that depend on names."""
        return self._named


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that holds this rank's states: the inner one if states are sharded (ZeRO-1)."""
    return getattr(optimizer, "part_of_rank", optimizer)


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of the class that computes updates."""
    part = local_optimizer(optimizer)
    return part.updated_by if isinstance(part, HostOptimizer) else type(part).__name__


def place_of_states(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """The tensor beside which the states of a parameter are: itself, or its copy on the host."""
    part = local_optimizer(optimizer)
    return part.place_of(parameter) if isinstance(part, HostOptimizer) else parameter


def make_optimizers(
    factory: Any,
    module: nn.Module,
    strategy: Strategy,
    change: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] | None = None,
    replicas: Any = None,
) -> tuple[Any, tuple[torch.optim.Optimizer, ...]]:
    """Call the factory on the parameters that require grad.

    Args:
        factory: A function of `Params` to an optimizer or to a sequence or dict of them;
            or None.
        strategy: Under which they train.
        change: Replaces each optimizer.
        replicas: A process group whose ranks hold replicas of the parameters, and have equal
            gradients; None if there is none.

    Returns:
        What the factory returned, and every optimizer in it.

    Raises:
        PlanError: the factory returned something else, or an optimizer whose step needs a closure.
    """
    if factory is None:
        return None, ()
    if not callable(factory):
        raise PlanError(
            f"wrap(optimizer=...) takes a factory or an optimizer, found {type(factory).__name__}. "
            f"For example: {_FACTORY}"
        )
    params = Params((name, p) for name, p in module.named_parameters() if p.requires_grad)
    if not params:
        raise PlanError(
            f"wrap(optimizer=...): no parameter of {type(module).__name__} requires grad, "
            f"so there is nothing to train. Omit the optimizer, or call requires_grad_() first."
        )
    with without_device_named(params), matrices_named(params.named()):
        objects = factory(params)
    optimizers = _checked_list(objects, torch.optim.Optimizer, "optimizer", _FACTORY)
    refuse_closures(optimizers)
    _refuse_states(module, optimizers)
    every = tuple(_changed(each, module, strategy, change, replicas) for each in optimizers)
    if all(new is old for new, old in zip(every, optimizers, strict=True)):
        return objects, optimizers
    if isinstance(objects, Mapping):
        return dict(zip(objects, every, strict=True)), every
    return (every if isinstance(objects, list | tuple) else every[0]), every


def _changed(
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    strategy: Strategy,
    change: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] | None,
    replicas: Any,
) -> torch.optim.Optimizer:
    if is_host_optimizer(optimizer):
        return on_host(optimizer, module, strategy, change)
    return divide_muon(optimizer, replicas) if change is None else change(optimizer)


def refuse_later_parameters(
    optimizers: Iterable[torch.optim.Optimizer], module: nn.Module, ctx: DistContext
) -> None:
    """Have optimizers of several ranks refuse parameters that are not in the wrapped module."""
    if ctx.world_size == 1:
        return
    name, known = type(module).__name__, set(module.parameters())

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups = optimizer.param_groups
        if len(groups) == checked.get(id(optimizer)):
            return
        later = [p for group in groups for p in group["params"] if p not in known]
        if later:
            raise StepError(
                f"{type(optimizer).__name__}.add_param_group: {len(later)} of its parameters (the "
                f"first has the shape {list(later[0].shape)}) were not in the {name} when it was "
                f"wrapped, so their gradients are not reduced over the ranks, which would train "
                f"different models. Build the whole model before fx.wrap, with the parts to train "
                f"later frozen by requires_grad_(False), or fx.unwrap it and wrap it again.",
                code="FX505",
            )
        checked[id(optimizer)] = len(groups)

    checked = {id(optimizer): len(optimizer.param_groups) for optimizer in optimizers}
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(before_step)


def _refuse_states(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse small states that could not be saved, or not resharded."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for optimizer in optimizers:
        if is_host_optimizer(optimizer):
            continue
        library = type(optimizer).__module__.partition(".")[0]
        what = f"wrap(optimizer=...): asked for {library}'s {type(optimizer).__name__}"
        sharded = [p for g in optimizer.param_groups for p in g["params"] if isinstance(p, DTensor)]
        if library == "bitsandbytes" and sharded:
            raise PlanError(
                f"{what} over sharded parameters. Its states cannot be saved and resharded. Use "
                f"it with Single or DDP, or torchao's AdamW8bit, or an optimizer of torch."
            )
        packed = sharded if has_packed_states(optimizer) else []
        for parameter in packed:
            if (problem := shard_problem(parameter)) is not None:
                name = names.get(id(parameter), "a parameter")
                raise PlanError(
                    f"{what}, whose states have a scale per block of values, but {name} {problem}. "
                    f"Use it with Single or DDP, or an optimizer of torch."
                )
        if packed:
            step_without_cache(optimizer)


def make_schedulers(factory: Any, optimizer: Any) -> tuple[Any, tuple[Any, ...]]:
    """Call the scheduler factory on what the optimizer factory returned.

    ReduceLROnPlateau needs a metric, so `ops.schedule` steps it, and it is not among the
    schedulers that a step advances.

    Raises:
        PlanError: there is no optimizer, or the factory returned something else.
    """
    if factory is None:
        return None, ()
    if optimizer is None:
        raise PlanError(f"wrap(scheduler=...) needs an optimizer too: {_FACTORY}, {_SCHEDULER}")
    if not callable(factory):
        raise PlanError(
            f"wrap(scheduler=...) takes a factory or a scheduler, found {type(factory).__name__}. "
            f"For example: {_SCHEDULER}"
        )
    objects = factory(optimizer)
    every = _checked_list(objects, LRScheduler, "scheduler", _SCHEDULER)
    return objects, tuple(each for each in every if not isinstance(each, ReduceLROnPlateau))


def disable_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer update one parameter at a time if their layouts differ.

    torch's fast updates take a list of parameters with one layout only.

    Raises:
        PlanError: a fused update of such a list was requested.
    """
    for group in optimizer.param_groups:
        layouts = {getattr(parameter, "device_mesh", None) for parameter in group["params"]}
        if len(layouts) == 1:
            continue
        if group.get("fused"):
            raise PlanError(
                f"{type(optimizer).__name__}(fused=True): torch's fused update needs parameters of "
                f"one layout, and these have {len(layouts)}. Omit fused, or put sharded parameters "
                f"and unsharded ones into different groups."
            )
        if group.get("foreach", True) is None:
            group["foreach"] = False


def refuse_closures(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that compute the loss themselves."""
    for optimizer in optimizers:
        # The method of the class: a scheduler has put a function around it on the optimizer.
        _, *taken = inspect.signature(type(optimizer).step).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if any(
            parameter.kind in kinds and parameter.default is parameter.empty for parameter in taken
        ):
            name = type(optimizer).__name__
            raise PlanError(
                f"wrap(optimizer=...): {name}.step needs a closure that computes the loss several "
                f"times per update; fx.step computes it once. Use an optimizer without a closure, "
                f"or wrap the model without an optimizer and call "
                f"{name}(model.parameters()).step(closure) in your own loop."
            )


def flattened(objects: Any) -> list[Any]:
    """The optimizers or schedulers in what a factory returned, in order."""
    if isinstance(objects, Mapping):
        return list(objects.values())
    return list(objects) if isinstance(objects, list | tuple) else [objects]


def _checked_list(objects: Any, kind: type, what: str, example: str) -> tuple[Any, ...]:
    entries = flattened(objects)
    wrong = [type(entry).__name__ for entry in entries if not isinstance(entry, kind)]
    if wrong or not entries:
        raise PlanError(
            f"The {what} factory returned {', '.join(wrong) or 'nothing'}; it should return "
            f"one {kind.__name__}, or a list or dict of them. For example: {example}"
        )
    return tuple(entries)


def settings_of(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> dict[str, object]:
    """Plain values of the groups of optimizers and of schedulers, which ranks compare."""
    settings: dict[str, object] = {}
    for number, optimizer in enumerate(optimizers):
        for group, options in enumerate(optimizer.param_groups):
            where = f"{type(optimizer).__name__} {number}, group {group}"
            settings |= {f"{where}: {name}": value for name, value in _plain(options)}
    for number, scheduler in enumerate(schedulers):
        where = f"{type(scheduler).__name__} {number}"
        settings |= {f"{where}: {name}": value for name, value in _plain(scheduler.state_dict())}
    return settings


def _plain(options: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in options.items():
        values = value if type(value) in (list, tuple) else [value]
        if all(isinstance(entry, int | float | str | None) for entry in values):
            yield name, value
        elif isinstance(value, Tensor) and value.numel() == 1:
            yield name, value.item()
