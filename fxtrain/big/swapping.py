"""Several models that take turns on one device."""

import functools
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fxtrain._tree import map_leaves
from fxtrain.state import Wrapped


@attrs.define(kw_only=True, eq=False)
class Turns:
    """Models of which one at a time is on a device.

    Attributes:
        models: The modules by name.
        device: Where the one is that is used.
        away: Where the others are.
        resident: The name of the one on the device, or None.
        hooks: What lets each take its turn when it is called.
    """

    models: Mapping[str, nn.Module] = attrs.field(repr=False)
    device: torch.device
    away: torch.device
    resident: str | None = None
    hooks: tuple[RemovableHandle, ...] = attrs.field(default=(), repr=False)


def turns(
    models: Mapping[str, nn.Module | Wrapped],
    device: str | torch.device,
    *,
    away: str | torch.device = "cpu",
) -> Turns:
    """Let models take turns on a device, such as a text encoder, a denoiser and a decoder.

    When one of them is called, the one on the device moves away, and the called one moves there,
    with its inputs. Call the models as before; `bring` is for methods other than forward. A model
    must not call another one of these in its forward, which would move it away.

    Args:
        models: Modules or handles of `fx.wrap`, by name.
        device: Where the model is that is called.
        away: Where the others wait.

    Effects:
        Moves all models away. Adds a hook to each, which `end_turns` removes.

    Example:
        >>> import fxtrain as fx, torch
        >>> encoder, decoder = torch.nn.Linear(4, 2), torch.nn.Linear(2, 4)
        >>> both = fx.big.turns({"encoder": encoder, "decoder": decoder}, "cpu")
        >>> decoder(encoder(torch.ones(1, 4))).shape, both.resident
        (torch.Size([1, 4]), 'decoder')
        >>> fx.big.end_turns(both)
    """
    modules = {
        name: model.module if isinstance(model, Wrapped) else model
        for name, model in models.items()
    }
    turns = Turns(models=modules, device=torch.device(device), away=torch.device(away))
    for module in modules.values():
        module.to(turns.away)
    turns.hooks = tuple(
        module.register_forward_pre_hook(functools.partial(_enter, turns, name), with_kwargs=True)
        for name, module in modules.items()
    )
    return turns


def bring(turns: Turns, name: str) -> nn.Module:
    """Move one model to the device, and the one that is there away; returns the model.

    Raises:
        KeyError: no model has this name.

    Example:
        >>> import fxtrain as fx, torch
        >>> both = fx.big.turns({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)}, "cpu")
        >>> _ = fx.big.bring(both, "b")
        >>> both.resident
        'b'
    """
    model = turns.models[name]
    if turns.resident != name:
        release(turns)
        model.to(turns.device)
        turns.resident = name
    return model


def release(turns: Turns) -> None:
    """Move the model on the device away.

    Example:
        >>> import fxtrain as fx, torch
        >>> models = fx.big.turns({"a": torch.nn.Linear(2, 2)}, "cpu")
        >>> _ = fx.big.bring(models, "a")
        >>> fx.big.release(models)
        >>> models.resident is None
        True
    """
    if turns.resident is not None:
        turns.models[turns.resident].to(turns.away)
        turns.resident = None


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
    for hook in turns.hooks:
        hook.remove()


def _enter(turns: Turns, name: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
    """Let a module take its turn when it is called."""

    def move(leaf: Any) -> Any:
        return leaf.to(turns.device) if isinstance(leaf, Tensor) else leaf

    bring(turns, name)
    return map_leaves(move, args), map_leaves(move, kwargs)
