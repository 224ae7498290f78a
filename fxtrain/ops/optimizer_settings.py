"""The options with which a script builds optimizers and schedulers."""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fxtrain._tree import map_leaves
from fxtrain.errors import CheckpointError
from fxtrain.ops.transport.packing import is_array
from fxtrain.state import Wrapped

_PLAIN = {bool, int, float, str, type(None)}
_COUNTS = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")  # of ReduceLROnPlateau


def flattened(objects: Any) -> list[Any]:
    """The optimizers or schedulers in what a factory returned, in order."""
    if isinstance(objects, Mapping):
        return list(objects.values())
    return list(objects) if isinstance(objects, list | tuple) else [objects]


def settings_of(optimizers: Sequence[Any], schedulers: Any) -> list[tuple[str, dict[str, Any]]]:
    """A copy of the options of each group of optimizers, and of the state of each scheduler.

    Returns:
        Each after its name, such as "SGD 0, group 0".
    """
    settings: list[tuple[str, dict[str, Any]]] = []
    for number, optimizer in enumerate(optimizers):
        for group, options in enumerate(optimizer.param_groups):
            rest = {name: _copied(value) for name, value in options.items() if name != "params"}
            settings.append((f"{type(optimizer).__name__} {number}, group {group}", rest))
    for number, scheduler in enumerate(flattened(schedulers or ())):
        state = map_leaves(_copied_leaf, scheduler.state_dict())
        settings.append((f"{type(scheduler).__name__} {number}", state))
    return settings


def _copied(value: Any) -> Any:
    return value if type(value) in _PLAIN else map_leaves(_copied_leaf, value)


def _copied_leaf(leaf: Any) -> Any:
    # A tensor by its own operation, since deepcopy reads memory, which one of a dry run lacks.
    return leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def plain_settings(settings: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, object]:
    """The plain values of settings by name, which ranks and checkpoints compare."""
    return {
        f"{where}: {name}": value for where, options in settings for name, value in _plain(options)
    }


def _plain(options: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in options.items():
        kind = type(value)
        entries = list(value) if kind in (list, tuple) else [value]
        if not set(map(type, entries)) <= _PLAIN:
            entries = [_as_number(entry) for entry in entries]
        if all(isinstance(entry, int | float | str | None) for entry in entries):
            yield name, kind(entries) if kind in (list, tuple) else entries[0]


def _as_number(value: Any) -> Any:
    """What a tensor or NumPy value of one element holds; anything else as it is."""
    one = isinstance(value, Tensor) and value.numel() == 1
    return value.item() if one or (is_array(value) and value.size == 1) else value


def with_option(value: Any, old: Any) -> Any:
    """An option in place of the old one: a tensor is filled, not replaced."""
    if isinstance(old, Tensor):
        return old.copy_(torch.as_tensor(value, device=old.device))
    return value


def use_script_settings(model: Wrapped) -> None:
    """Give optimizers and schedulers the script's options, after a checkpoint was restored.

    Schedulers begin as the script built them, and make as many steps as the saved ones had made.

    Raises:
        CheckpointError: a scheduler does not count its steps.
    """
    settings = iter(map_leaves(_copied_leaf, model.status.script_settings))
    for optimizer in model.optimizers:
        for group in optimizer.param_groups:
            for name, value in next(settings)[1].items():
                group[name] = with_option(value, group.get(name))
    due: dict[Any, int] = {}
    for scheduler, (where, state) in zip(flattened(model.scheduler or ()), settings, strict=True):
        if isinstance(scheduler, ReduceLROnPlateau):
            state |= {name: getattr(scheduler, name) for name in _COUNTS}
        elif "last_epoch" not in state:
            raise CheckpointError(
                f'restore(settings="script"): {where} does not count its steps as schedulers of '
                f"torch do (last_epoch), so it cannot advance to those of the checkpoint. Use "
                f'settings="checkpoint", and change its options after fx.restore.'
            )
        else:
            due[scheduler] = scheduler.last_epoch - state["last_epoch"]
        scheduler.load_state_dict(state)
    with warnings.catch_warnings():
        # torch warns of steps before the first one of the optimizer, of this process.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for step in range(max(due.values(), default=0)):
            for scheduler, steps in due.items():
                if step < steps:
                    scheduler.step()
