"""Several models that take turns on one device."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain._record import closest
from fxtrain._tree import map_leaves
from fxtrain.errors import PlanError, StepError
from fxtrain.ops.whole_tensors import is_sharded
from fxtrain.state import Wrapped


@attrs.define(kw_only=True, eq=False)
class Turns:
    """Models of which one at a time is on a device.

    Attributes:
        models: The modules by name.
        device: Where the one is that is used.
        away: Where the others are.
        resident: The name of the one on the device, or nothing.
        running: Names of the models whose forward runs now.
        undo: Removes the hooks.
    """

    models: Mapping[str, nn.Module] = attrs.field(repr=False)
    device: torch.device
    away: torch.device
    resident: list[str] = attrs.field(factory=list)
    running: list[str] = attrs.field(factory=list, repr=False)
    undo: list[Callable[[], None]] = attrs.field(factory=list, repr=False)


def turns(
    models: Mapping[str, nn.Module | Wrapped],
    device: str | torch.device,
    *,
    away: str | torch.device = "cpu",
) -> Turns:
    """Let models take turns on a device, such as a text encoder, a denoiser and a decoder.

    When one of them is called, the one on the device moves away, and the called one moves there,
    with its inputs. Call the models as before; `bring` is for methods other than forward.

    Args:
        models: Modules or handles of `fx.wrap`, by name.
        device: Where the model is that is called.
        away: Where the others wait.

    Effects:
        Moves all models away. Adds two hooks to each, which `end_turns` removes.

    Raises:
        PlanError: a model is sharded, on the meta device, or given twice.

    Example:
        >>> import fxtrain as fx, torch
        >>> encoder, decoder = torch.nn.Linear(4, 2), torch.nn.Linear(2, 4)
        >>> both = fx.big.turns({"encoder": encoder, "decoder": decoder}, "cpu")
        >>> decoder(encoder(torch.ones(1, 4))).shape, both.resident
        (torch.Size([1, 4]), ['decoder'])
        >>> fx.big.end_turns(both)
    """
    modules = {
        name: model.module if isinstance(model, Wrapped) else model
        for name, model in models.items()
    }
    _check(modules)
    turns = Turns(models=modules, device=torch.device(device), away=torch.device(away))
    for name, module in modules.items():
        module.to(turns.away)
        _add_hooks(turns, name, module)
    return turns


def bring(turns: Turns, name: str) -> nn.Module:
    """Move one model to the device, and the one that is there away; returns the model.

    Raises:
        PlanError: no model has this name.
        StepError: the forward of another one runs.

    Example:
        >>> import fxtrain as fx, torch
        >>> both = fx.big.turns({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)}, "cpu")
        >>> _ = fx.big.bring(both, "b")
        >>> both.resident
        ['b']
    """
    if name not in turns.models:
        known = ", ".join(map(repr, turns.models))
        raise PlanError(
            f"bring: no model {name!r} takes turns here, but {known}.{closest(name, turns.models)}"
        )
    if turns.resident != [name]:
        release(turns)
        turns.models[name].to(turns.device)
        turns.resident.append(name)
    return turns.models[name]


def release(turns: Turns) -> None:
    """Move the model on the device away.

    Raises:
        StepError: its forward runs.

    Example:
        >>> import fxtrain as fx, torch
        >>> models = fx.big.turns({"a": torch.nn.Linear(2, 2)}, "cpu")
        >>> _ = fx.big.bring(models, "a")
        >>> fx.big.release(models)
        >>> models.resident
        []
    """
    if turns.running:
        raise StepError(
            f"turns: the forward of {turns.running[-1]!r} runs, so that its model cannot leave "
            f"{turns.device}. A model must not call another one of these in its forward: call "
            f"them one after another, or leave one of them out of turns."
        )
    while turns.resident:
        turns.models[turns.resident[0]].to(turns.away)
        turns.resident.pop()


def end_turns(turns: Turns) -> None:
    """Move all models away and remove the hooks.

    Example:
        >>> import fxtrain as fx, torch
        >>> net = torch.nn.Linear(2, 2)
        >>> fx.big.end_turns(fx.big.turns({"a": net}, "cpu"))
        >>> len(net._forward_pre_hooks)
        0
    """
    release(turns)
    while turns.undo:
        turns.undo.pop()()


def _check(modules: Mapping[str, nn.Module]) -> None:
    names: dict[int, str] = {}
    for name, module in modules.items():
        tensors = [*module.parameters(), *module.buffers()]
        if any(tensor.is_meta or is_sharded(tensor) for tensor in tensors):
            raise PlanError(
                f"turns: {name!r} has tensors that are sharded or on the meta device, which "
                f"cannot move. Load its values first; for a model larger than the device, use "
                f"fx.Offload."
            )
        for tensor in tensors:
            other = names.setdefault(id(tensor), name)
            if other != name:
                raise PlanError(
                    f"turns: {other!r} and {name!r} share a tensor, so that they cannot "
                    f"be on two devices. Pass the model that contains both."
                )


def _add_hooks(turns: Turns, name: str, module: nn.Module) -> None:
    """Let a module take its turn when it is called."""

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if name not in turns.running:
            bring(turns, name)
        turns.running.append(name)
        return map_leaves(move, args), map_leaves(move, kwargs)

    def move(leaf: Any) -> Any:
        return leaf.to(turns.device) if isinstance(leaf, Tensor) else leaf

    def leave(*_: Any) -> None:
        if turns.running and turns.running[-1] == name:
            turns.running.pop()

    turns.undo.append(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
    turns.undo.append(module.register_forward_hook(leave, always_call=True).remove)
