"""The repeated blocks of a model, by class name."""

from typing import Any

from torch import nn


def block_names(module: nn.Module) -> tuple[str, ...]:
    """Class names of a model's repeated blocks: those it lists, or those in its ModuleLists."""
    return names_among(list(module.modules()))


def names_among(parts: list[nn.Module]) -> tuple[str, ...]:
    """As `block_names`, of all modules of a model."""
    own = own_names(parts, "_no_split_modules") & {type(part).__name__ for part in parts}
    if own:
        return tuple(sorted(own))
    lists = [part for part in parts if isinstance(part, nn.ModuleList)]
    return tuple(sorted({type(block).__name__ for part in lists for block in part}))


def own_names(parts: list[nn.Module], attribute: str) -> set[str]:
    """The names in a list that models of transformers have as an attribute."""
    own: set[str] = set()
    for part in parts:
        # Not getattr, which looks for a parameter of the name in every module.
        names: Any = vars(part).get(attribute) or getattr(type(part), attribute, None)
        own.update(names or ())
    return own
