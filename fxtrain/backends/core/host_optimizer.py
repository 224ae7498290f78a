"""Updates on the host, by torchao's CPUOffloadOptimizer.

torchao copies a gradient to the host when backward has accumulated it. It may change after that: it
is averaged over ranks, unscaled, corrected for weights, clipped. So may a parameter, which is
received from another rank or restored. Here both are copied when an update begins.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxtrain.errors import PlanError, StepError
from fxtrain.state import Strategy

_NAME = "CPUOffloadOptimizer"


def is_host_optimizer(optimizer: Any) -> bool:
    """Whether an optimizer is torchao's, of a class derived from it, or prepared already."""
    return isinstance(optimizer, HostOptimizer) or any(
        kind.__name__ == _NAME and kind.__module__.partition(".")[0] == "torchao"
        for kind in type(optimizer).__mro__
    )


def on_host(
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    strategy: Strategy,
    change: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] | None,
) -> "HostOptimizer":
    """Prepare torchao's optimizer for a strategy.

    Args:
        change: How the strategy replaces optimizers.

    Raises:
        PlanError: this strategy or version does not support it.
    """
    library: Any = optimizer
    freed = _take_hooks(library)  # also if it is refused: they hold memory of the host
    if not strategy.updates_on_host or change is not None:
        raise PlanError(
            f"wrap(optimizer=...): {strategy.name} does not support torchao's {_NAME} here. Use it "
            f"with Single() or DDP(), or let FSDP(offload=True) or "
            f"DeepSpeed(offload_optimizer='cpu') update on the host."
        )
    if freed is not False:
        raise PlanError(
            f"wrap(optimizer=...): torchao's {_NAME} needs torchao 0.18 and "
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

    torchao has a group for each parameter. Here those with equal options are one group, and
    their states are found by the parameters on the device.
    """

    def __init__(self, library: Any, places: dict[Tensor, _Place], module: nn.Module) -> None:
        self._library, self._places = library, places
        first = next(iter(places.values()), None)
        super().__init__(
            _groups(places, module), dict(first.optimizer.defaults) if first is not None else {}
        )
        self.updated_by = _NAME if first is None else type(first.optimizer).__name__
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
                    f"Under torchao's {_NAME} each parameter has its own, and a checkpoint stores "
                    f"one. Use an optimizer of torch."
                )
            group.update(*options[:1])


def _groups(places: Mapping[Tensor, _Place], module: nn.Module) -> list[dict[str, Any]]:
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
