"""Which submodules are sharded as units, gathered and freed together. Changes nothing."""

import fnmatch
import pkgutil

from torch import nn

from fxtrain.backends.core.module_changes import unknown_classes, unknown_patterns
from fxtrain.models.block_names import block_names
from fxtrain.state import FSDP


def unit_problems(module: nn.Module, config: FSDP) -> list[str]:
    """Problems with names in a config that match nothing, and with what cannot be sharded."""
    problems = unknown_classes(module, config.wrap, field="FSDP(wrap=...)")
    ways = [name for name in ("wrap", "min_params", "wrap_by") if getattr(config, name)]
    if len(ways) > 1:
        problems.append(f"FSDP({', '.join(ways)}) chooses blocks in several ways. Keep one.")
    if config.wrap_by is not None:
        try:
            pkgutil.resolve_name(config.wrap_by)
        except (ImportError, AttributeError, ValueError) as error:
            problems.append(
                f"FSDP(wrap_by={config.wrap_by!r}): {error}. Name a function that every rank can "
                f"import, as 'package.module:function'."
            )
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    problems += unknown_patterns(config.ignore, names, field="FSDP(ignore=...)")
    ignored = ignored_names(module, config)
    sparse = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        and part.sparse
        and part.weight.requires_grad
        and f"{name}.weight" not in ignored
    ]
    if sparse:
        problems.append(
            f"FSDP cannot reduce sparse gradients, which {', '.join(sparse[:5])} compute with "
            f"sparse=True. Set sparse=False, or use DDP()."
        )
    return problems


def ignored_names(module: nn.Module, config: FSDP) -> set[str]:
    """All names of the parameters that match a pattern, including the other names of tied ones."""
    named = list(module.named_parameters(remove_duplicate=False))
    ignored = {
        id(parameter)
        for name, parameter in named
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in config.ignore)
    }
    return {name for name, parameter in named if id(parameter) in ignored}


def units(module: nn.Module, config: FSDP) -> list[list[nn.Module]]:
    """Submodules to shard, children before parents and without the root.

    Modules that share a parameter are in one list, since a parameter belongs to one unit.
    """
    if config.min_params is not None:
        chosen = _by_size(module, config.min_params)
    elif config.wrap_by is not None:
        chooses = pkgutil.resolve_name(config.wrap_by)
        chosen = [part for name, part in module.named_modules() if name and chooses(name, part)]
        chosen = chosen[::-1]
    else:
        names = config.wrap or block_names(module)
        chosen = [part for part in [*module.modules()][::-1] if type(part).__name__ in names]
    return _tied_together(module, [part for part in chosen if part is not module and _runs(part)])


def _runs(part: nn.Module) -> bool:
    """Whether torch can hook a module's forward, and it contains something to shard."""
    container = isinstance(part, nn.ModuleList | nn.ModuleDict)
    return not container and any(True for _ in part.parameters())


def _by_size(module: nn.Module, least: int) -> list[nn.Module]:
    """The smallest modules with this many parameters outside smaller such modules."""
    chosen: list[nn.Module] = []
    seen: set[int] = set()

    def visit(part: nn.Module) -> int:
        # Its forward reads the weights of its child without calling the child.
        whole = isinstance(part, nn.MultiheadAttention)
        own = {id(p): p.numel() for p in part.parameters(recurse=whole) if id(p) not in seen}
        seen.update(own)
        rest = sum(own.values()) + sum(visit(child) for child in part.children() if not whole)
        if rest >= least and _runs(part):
            chosen.append(part)
            return 0
        return rest

    visit(module)
    return chosen


def _tied_together(module: nn.Module, chosen: list[nn.Module]) -> list[list[nn.Module]]:
    unit_of = _unit_of_parameters(module, chosen)
    group: dict[int, list[nn.Module]] = {id(part): [part] for part in chosen}
    for holders in unit_of.values():
        if len(holders) == 1:
            continue
        if any(part is module for part in holders) or _nested(holders):
            # Shared with an outer module: left to the enclosing unit.
            for part in holders:
                group.pop(id(part), None)
            continue
        tied = {id(each): each for part in holders for each in group.get(id(part), ())}
        merged = list(tied.values())
        for part in merged:
            group[id(part)] = merged
    lists = {id(parts): parts for parts in group.values()}
    return list(lists.values())


def _unit_of_parameters(module: nn.Module, chosen: list[nn.Module]) -> dict[int, list[nn.Module]]:
    """For each parameter, the units (or the root) that own it."""
    own = {id(part) for part in chosen}
    units_of: dict[int, list[nn.Module]] = {}

    def visit(part: nn.Module, unit: nn.Module) -> None:
        unit = part if id(part) in own else unit
        for parameter in part.parameters(recurse=False):
            holders = units_of.setdefault(id(parameter), [])
            if all(unit is not each for each in holders):
                holders.append(unit)
        for child in part.children():
            visit(child, unit)

    visit(module, module)
    return units_of


def _nested(parts: list[nn.Module]) -> bool:
    return any(
        a is not b and any(a is inside for inside in b.modules()) for a in parts for b in parts
    )
