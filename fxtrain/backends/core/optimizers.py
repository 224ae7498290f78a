"""Optimizers and schedulers: the user's factories, or objects made before the model was wrapped.

A strategy may replace the parameters of a module, so that it makes its optimizers last, by a
factory. An optimizer that is there already is pointed to the parameters as the strategy holds
them, by their names: it stays the same object, and so do the schedulers that were built on it.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fxtrain import _extensions
from fxtrain.errors import PlanError, StepError
from fxtrain.ops.optimizer_settings import flattened
from fxtrain.ops.whole_tensors import plain_name
from fxtrain.state import DistContext, Strategy

Optimizers = (
    torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]
)
Schedulers = LRScheduler | Sequence[LRScheduler] | Mapping[str, LRScheduler]

_FACTORY = "optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4)"
_ON_HOST = "CPUOffloadOptimizer"
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


def optimizer_class(optimizer: torch.optim.Optimizer) -> str:
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
    ctx: DistContext,
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
        PlanError: the factory returned something else, or an optimizer that the strategy does not
            support.
    """
    if factory is None:
        return None, ()
    params = Params(
        (plain_name(name), p) for name, p in module.named_parameters() if p.requires_grad
    )
    objects = _made(factory, params)
    optimizers = _checked_list(objects, torch.optim.Optimizer, "optimizer", _FACTORY)
    _refuse_closures(optimizers)
    every: list[torch.optim.Optimizer] = []
    for each in optimizers:
        if _is_host_optimizer(each):
            every.append(_on_host(each, module, strategy, change))
        else:
            _prepare_small_states(each)
            if change is not None:
                every.append(change(each))
            elif type(each) is torch.optim.Muon:
                every.append(_extensions.divide_muon(each, ctx, replicas))
            else:
                every.append(each)
    for each in every:
        _disable_foreach(each)
    if all(new is old for new, old in zip(every, optimizers, strict=True)):
        return objects, optimizers
    if isinstance(objects, Mapping):
        return dict(zip(objects, every, strict=True)), tuple(every)
    return (every if isinstance(objects, list | tuple) else every[0]), tuple(every)


def _made(factory: Callable[[Params], Any], params: Params) -> Any:
    """What a factory returns; an error that names what torch's Muon does not take."""
    try:
        return factory(params)
    except ValueError as error:
        if "Muon only supports 2D" not in str(error):
            raise
        raise _extensions.not_matrices(params.named()) from error


def _refuse_closures(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that compute the loss themselves."""
    for optimizer in optimizers:
        # The method of the class: a scheduler has put a function around it on the optimizer.
        _, *taken = inspect.signature(type(optimizer).step).parameters.values()
        if any(
            each.default is each.empty and each.kind <= each.POSITIONAL_OR_KEYWORD for each in taken
        ):
            raise PlanError(
                f"wrap(optimizer=...): {type(optimizer).__name__}.step needs a closure that "
                f"computes the loss several times per update; fx.step computes it once. Wrap the "
                f"model without an optimizer, and call its step(closure) in your own loop."
            )


def refuse_later_parameters(optimizers: Sequence[torch.optim.Optimizer], module: nn.Module) -> None:
    """Have optimizers refuse groups that are added with parameters of no wrapped module."""
    known = set(module.parameters())
    groups = {id(optimizer): len(optimizer.param_groups) for optimizer in optimizers}

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        later = optimizer.param_groups[groups[id(optimizer)] :]
        if any(parameter not in known for group in later for parameter in group["params"]):
            raise StepError(
                f"{type(optimizer).__name__}.add_param_group: parameters that were not in the "
                f"module when it was wrapped, so that their gradients are not reduced over the "
                f"ranks. Build the whole model before fx.wrap, or fx.unwrap it and wrap it again.",
                code="FX505",
            )

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(check)


def _prepare_small_states(optimizer: torch.optim.Optimizer) -> None:
    """Refuse small states of sharded parameters that could not be saved or resharded."""
    library = type(optimizer).__module__.partition(".")[0]
    every = [p for group in optimizer.param_groups for p in group["params"]]
    sharded = [p for p in every if isinstance(p, DTensor)]
    problem = None
    if library == "bitsandbytes" and sharded:
        problem = "is sharded, and these states cannot be resharded"
    elif sharded and _extensions.has_packed_states(optimizer):
        _extensions.step_without_cache(optimizer)
        problem = next(filter(None, map(_extensions.shard_problem, sharded)), None)
    if problem is not None:
        raise PlanError(
            f"wrap(optimizer=...): {library}'s {type(optimizer).__name__} keeps states in blocks, "
            f"but a parameter {problem}. Use it with Single or DDP, or an optimizer of torch."
        )


def make_schedulers(factory: Any, optimizer: Any) -> tuple[Any, tuple[Any, ...]]:
    """Call the scheduler factory on what the optimizer factory returned.

    ReduceLROnPlateau needs a metric, so `ops.schedule` steps it, and it is not among the
    schedulers that a step advances.

    Raises:
        PlanError: the factory returned something else.
    """
    if factory is None:
        return None, ()
    objects = factory(optimizer)
    every = _checked_list(objects, LRScheduler, "scheduler", _SCHEDULER)
    return objects, tuple(each for each in every if not isinstance(each, ReduceLROnPlateau))


def _disable_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer update one parameter at a time if their layouts differ.

    torch's fast updates take a list of parameters with one layout only.
    """
    for group in optimizer.param_groups:
        layouts = {getattr(parameter, "device_mesh", None) for parameter in group["params"]}
        if len(layouts) > 1 and group.get("foreach", True) is None:
            group["foreach"] = False


def _checked_list(objects: Any, kind: type, what: str, example: str) -> tuple[Any, ...]:
    entries = flattened(objects)
    wrong = [type(entry).__name__ for entry in entries if not isinstance(entry, kind)]
    if wrong or not entries:
        raise PlanError(
            f"The {what} factory returned {', '.join(wrong) or 'nothing'}; it should return "
            f"one {kind.__name__}, or a list or dict of them. For example: {example}"
        )
    return tuple(entries)


def as_factories(optimizer: Any, scheduler: Any, module: nn.Module) -> tuple[Any, Any]:
    """Factories in place of ready-made optimizers and schedulers; anything else as it is.

    Raises:
        PlanError: an optimizer holds parameters of another model, or a scheduler was built on
            another optimizer.
    """
    optimizers = _all(optimizer, torch.optim.Optimizer)
    schedulers = _all(scheduler, LRScheduler)
    for each in schedulers:
        if not any(getattr(each, "optimizer", None) is known for known in optimizers):
            raise PlanError(
                f"wrap(scheduler=...): this {type(each).__name__} was built on an optimizer that "
                f"fx.wrap did not get. Pass both, or a factory for each."
            )
    if optimizers:
        optimizer = _optimizer_factory(optimizer, optimizers, module)
    if schedulers:
        scheduler = _scheduler_factory(scheduler, schedulers, optimizers)
    return optimizer, scheduler


def _all(objects: Any, kind: type) -> list[Any]:
    """The ready-made objects in an argument of `wrap`; none if it is a factory."""
    entries = flattened(objects)
    return entries if all(isinstance(entry, kind) for entry in entries) else []


def _optimizer_factory(
    objects: Any, optimizers: Sequence[torch.optim.Optimizer], module: nn.Module
) -> Callable[[Any], Any]:
    # Now, since a parameter that is replaced may be freed, and its id used again.
    names = {id(p): plain_name(name) for name, p in module.named_parameters()}
    layouts: list[list[list[str]]] = []
    for optimizer in optimizers:
        groups = [group["params"] for group in optimizer.param_groups]
        if any(id(p) not in names for group in groups for p in group):
            raise PlanError(
                f"wrap(optimizer=...): this {type(optimizer).__name__} has parameters that are not "
                f"those of the {type(module).__name__}. Build it on the parameters of the module "
                f"before it is wrapped, or pass a factory: {_FACTORY}"
            )
        layouts.append([[names[id(p)] for p in group] for group in groups])

    def adopt(_: Any) -> Any:
        parameters = {plain_name(n): p for n, p in module.named_parameters(remove_duplicate=False)}
        for optimizer, layout in zip(optimizers, layouts, strict=True):
            _point_to(optimizer, layout, parameters)
        return objects

    return adopt


def _point_to(
    optimizer: torch.optim.Optimizer,
    layout: Sequence[Sequence[str]],
    parameters: Mapping[str, nn.Parameter],
) -> None:
    """Give an optimizer the parameters as they are now; those of other ranks leave its groups."""
    for group, names in zip(optimizer.param_groups, layout, strict=True):
        for name, old in zip(names, group["params"], strict=True):
            new, state = parameters.get(name), optimizer.state.pop(old, None)
            if state and hasattr(new, "device_mesh"):
                raise PlanError(
                    f"wrap(optimizer=...): this {type(optimizer).__name__} has states, and this "
                    f"plan shards parameters. Pass a factory, {_FACTORY}, and restore states with "
                    f"fx.restore."
                )
            if state and new is not None:
                optimizer.state[new] = state
        group["params"] = [parameters[name] for name in names if name in parameters]
    if optimizer.state:  # to the device and dtype of the parameters
        optimizer.load_state_dict(optimizer.state_dict())


def _scheduler_factory(
    objects: Any,
    schedulers: Sequence[LRScheduler],
    optimizers: Sequence[torch.optim.Optimizer],
) -> Callable[[Any], Any]:
    def adopt(new_optimizers: Any) -> Any:
        for old, new in zip(optimizers, flattened(new_optimizers), strict=True):
            if new is not old:
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


def _is_host_optimizer(optimizer: Any) -> bool:
    """Whether an optimizer is torchao's, of a class derived from it, or prepared already."""
    return isinstance(optimizer, HostOptimizer) or any(
        kind.__name__ == _ON_HOST and kind.__module__.partition(".")[0] == "torchao"
        for kind in type(optimizer).__mro__
    )


def _on_host(
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    strategy: Strategy,
    change: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] | None,
) -> "HostOptimizer":
    """Prepare torchao's optimizer for a strategy.

    Raises:
        PlanError: this strategy or version does not support it.
    """
    library: Any = optimizer
    freed = _take_hooks(library)  # also if it is refused: they hold memory of the host
    if not strategy.updates_on_host or change is not None:
        raise PlanError(
            f"wrap(optimizer=...): {strategy.name} does not support torchao's {_ON_HOST} here. "
            f"Use it with Single() or DDP(), or let FSDP(offload=True) or "
            f"DeepSpeed(offload_optimizer='cpu') update on the host."
        )
    if freed is not False:
        raise PlanError(
            f"wrap(optimizer=...): torchao's {_ON_HOST} needs torchao 0.18 and "
            f"offload_gradients=False: gradients are accumulated, averaged and clipped on the "
            f"device."
        )
    return HostOptimizer(library, _places(library), module)


def _take_hooks(library: Any) -> bool | None:
    """Remove the hooks that copy gradients; whether they free them, None if there are none."""
    freed: bool | None = None if library.param_d2h_map else False
    for parameter in library.param_d2h_map:
        hooks = parameter._post_accumulate_grad_hooks or {}
        for key, hook in list(hooks.items()):
            known = inspect.getclosurevars(hook).nonlocals if inspect.isfunction(hook) else {}
            if known.get("self") is library and "offload_gradients" in known:
                del hooks[key]
                freed = bool(known["offload_gradients"])
    return freed


class _Place(NamedTuple):
    """Where torchao updates a parameter."""

    optimizer: Any  # an Optimizer, whose states torch types by Parameter
    group: dict[str, Any]
    tensor: Tensor  # on the host; the parameter itself if it is small


def _places(library: Any) -> dict[Tensor, _Place]:
    places = {
        parameter: _Place(each, each.param_groups[0], library.param_d2h_map[parameter])
        for parameter, each in library.optim_dict.items()
    }
    if library.d_opt is not None:
        for group in library.d_opt.param_groups:
            places |= {each: _Place(library.d_opt, group, each) for each in group["params"]}
    return places


class HostOptimizer(torch.optim.Optimizer):
    """torchao's optimizer, with the groups and states that one of its class would have.

    torchao copies a gradient to the host when backward has accumulated it. It may change after
    that: it is averaged over ranks, unscaled, corrected for weights, clipped. So may a parameter,
    which is received from another rank or restored. Here both are copied when an update begins.

    torchao has a group for each parameter. Here those with equal options are one group, and
    their states are found by the parameters on the device.
    """

    def __init__(self, library: Any, places: dict[Tensor, _Place], module: nn.Module) -> None:
        self._library, self._places = library, places
        first = next(iter(places.values()), None)
        super().__init__(
            _regrouped(places, module),
            dict(first.optimizer.defaults) if first is not None else {},
        )
        self.updated_by = _ON_HOST if first is None else type(first.optimizer).__name__
        self._receive()  # some start with a state of zeros

    def place_of(self, parameter: Tensor) -> Tensor:
        """The tensor beside which the states of a parameter are."""
        return self._places[parameter].tensor

    def forget(self) -> None:
        """Free the memory on the host; there is nothing to update afterwards."""
        library = self._library
        for table in (self._places, library.optim_dict, library.param_d2h_map, library.queue):
            table.clear()
        library.d_opt = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Copy parameters and gradients to the host, update them, and copy parameters back."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._send()
        library = self._library
        library.queue.clear()  # of an update that raised an error
        for parameter, host in library.param_d2h_map.items():
            if parameter.grad is not None:
                host.copy_(parameter, non_blocking=True)
                host.grad.copy_(parameter.grad, non_blocking=True)
                stream = torch.accelerator.current_stream(parameter.device)
                library.queue[parameter] = stream.record_event()
        try:
            library.step()  # waits for the copies, one by one
        finally:
            # An update that raised an error left copies under way, which the next one must not
            # overtake.
            library.stream.synchronize()
            self._receive()
        return loss

    def _send(self) -> None:
        """Pass on options, which schedulers change, and states that were replaced."""
        for group in self.param_groups:
            for parameter in group["params"]:
                place = self._places[parameter]
                place.group.update(_options(group))
                state, known = self.state.get(parameter), place.optimizer.state
                if state is None:
                    known.pop(place.tensor, None)
                elif state is not known.get(place.tensor):
                    if place.tensor is not parameter:
                        state = {
                            k: v.cpu() if isinstance(v, Tensor) else v for k, v in state.items()
                        }
                    self.state[parameter] = known[place.tensor] = state

    def _receive(self) -> None:
        """Take over states, and options that an update changed."""
        for group in self.param_groups:
            places = {each: self._places[each] for each in group["params"]}
            for parameter, place in places.items():
                if place.tensor in place.optimizer.state:
                    self.state[parameter] = place.optimizer.state[place.tensor]
            options = [_options(place.group) for place in places.values()]
            if any(each != options[0] for each in options[1:]):
                raise StepError(
                    f"{self.updated_by} changes options of its parameter groups in an update. "
                    f"Under torchao's {_ON_HOST} each parameter has its own, and a checkpoint "
                    f"stores one. Use an optimizer of torch."
                )
            group.update(*options[:1])


def _regrouped(places: Mapping[Tensor, _Place], module: nn.Module) -> list[dict[str, Any]]:
    """Parameters with equal options, in the order of the module."""
    order: dict[Any, int] = {
        parameter: index for index, parameter in enumerate(module.parameters())
    }
    groups: list[dict[str, Any]] = []
    for parameter in sorted(places, key=lambda each: order.get(each, len(order))):
        options = _options(places[parameter].group)
        same = next((each for each in groups if _options(each) == options), None)
        if same is None:
            groups.append({**options, "params": [parameter]})
        else:
            same["params"].append(parameter)
    return groups


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
