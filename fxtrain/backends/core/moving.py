"""Moving a module to a device."""

import torch
from torch import nn


def move_module(
    module: nn.Module, device: torch.device, *, dtype: torch.dtype | None = None
) -> None:
    """Move a module to a device in place, and cast it if a dtype is given.

    Effects:
        On devices whose memory torch cannot exchange with the host's (XLA, devices of other
        packages), the module gets new parameters. `nn.Module.to` makes one for each name there;
        here, names that shared a parameter still share one.
    """
    tied = _tied_names(module)
    module.to(device, dtype)
    for first, *others in tied:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner)._parameters[leaf] = parameter


def _tied_names(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [found for found in names.values() if len(found) > 1]
