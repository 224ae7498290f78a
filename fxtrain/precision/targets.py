"""Which layers of a model a record quantizes, and why it skips the others."""

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fxtrain._record import closest
from fxtrain.errors import PlanError
from fxtrain.state import Quantize, Recipe, Torchao
from fxtrain.state.precision import QUANTIZE

_MAX_SHOWN = 5
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NAMED = "named in the plan"
_INT4_ROWS = 16  # that torch packs together for CPUs
# torch computes these in one kernel from their plain weights, without a call of the layers inside.
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def choose_layers(
    module: nn.Module, record: Quantize, *, trains: bool
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The layers of class `nn.Linear` that a record quantizes, as `choose_linears`.

    A shape or dtype that does not fit the format is a PlanError.
    """

    def computed(part: nn.Linear) -> str | None:  # as by torch's pruning
        return None if "weight" in part._parameters else "its weight is computed from others"

    names, skipped = choose_linears(module, record, computed, trains=trains)
    chosen = {name: module.get_submodule(name) for name in names}
    _check_dtypes(chosen, record)
    if isinstance(record, Torchao) and record.weights == "int4":
        _check_sizes(chosen, record)
    return names, skipped


def choose_linears(
    module: nn.Module,
    record: Quantize | Recipe,
    misfit: Callable[[nn.Linear], str | None],
    *,
    trains: bool = False,
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The names of the layers of class `nn.Linear` that a record replaces; why it skips the others.

    `misfit` says of a layer why the format does not fit it, or None. `trains` skips layers whose
    weight requires grad: an optimizer will change them. A pattern or class name that matches
    nothing, or no layer that is left, is a PlanError.
    """
    _check_names(module, record)
    linears = {name: part for name, part in module.named_modules() if type(part) is nn.Linear}
    named = (*record.skip, *getattr(record, "keep_fp32", ()))
    inside = _inside(module, record.skip_classes)
    heads = () if record.head else _heads(module, linears)
    owners = Counter(id(p) for part in module.modules() for p in part._parameters.values())

    def reason(name: str, part: nn.Linear) -> str | None:
        if any(matches(pattern, name) for pattern in named):
            return _NAMED
        if name in inside:
            return f"inside a {inside[name]}"
        if part is module:
            return "the model itself"
        if owners[id(part.weight)] > 1:
            return "tied to another module"
        if name in heads:
            return "the output head"
        return "trained" if trains and part.weight.requires_grad else misfit(part)

    skipped = {name: why for name, part in linears.items() if (why := reason(name, part))}
    names = tuple(name for name in linears if name not in skipped)
    # A record that names every layer changes nothing, as asked.
    asked = (_NAMED, *(f"inside a {kind}" for kind in record.skip_classes))
    if not names and not (skipped and all(why in asked for why in skipped.values())):
        raise PlanError(_nothing_left(module, record, skipped))
    return names, skipped


def matches(pattern: str, name: str) -> bool:
    """Whether consecutive components of a dotted name match those of a pattern.

    Example:
        >>> from fxtrain.precision.targets import matches
        >>> matches("gate", "layers.0.gate.proj"), matches("gate", "layers.0.gate_up")
        (True, False)
        >>> matches("layers.*.mlp", "model.layers.7.mlp.up")
        True
    """
    wanted, parts = pattern.split("."), name.split(".")
    return any(
        all(map(fnmatch.fnmatchcase, parts[start : start + len(wanted)], wanted))
        for start in range(len(parts) - len(wanted) + 1)
    )


def _inside(module: nn.Module, classes: Iterable[str]) -> dict[str, str]:
    """The names of what is inside modules of some classes, or of those that torch fuses."""
    chosen = set(classes)
    inside: dict[str, str] = {}
    for path, part in module.named_modules():
        kind = type(part).__name__
        if kind in chosen or isinstance(part, _FUSED):
            inside |= {
                f"{path}.{name}" if path and name else path or name: kind
                for name, _ in part.named_modules()
            }
    return inside


def _heads(module: nn.Module, linears: Mapping[str, nn.Linear]) -> set[str]:
    """The layers that give the outputs of the model.

    That is what a transformers model says it is, and the last layer if it belongs to the model
    itself and not to a block, or has an output for every row of the largest embedding.
    """
    get = getattr(module, "get_output_embeddings", None)
    head = get() if callable(get) else None
    heads = {name for name, part in linears.items() if part is head}
    tables = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    last = list(linears)[-1] if linears else ""
    children = [name for name, _ in module.named_children()]
    if last and (last == children[-1] or linears[last].out_features == max(tables, default=0)):
        heads.add(last)
    return heads


def _check_names(module: nn.Module, record: Quantize | Recipe) -> None:
    names = [name for name, _ in module.named_modules() if name]
    for field in ("skip", "keep_fp32"):
        for pattern in getattr(record, field, ()):
            if not any(matches(pattern, name) for name in names):
                raise PlanError(_unmatched(record, field, pattern, names, "module"))
    classes = {type(part).__name__ for part in module.modules()}
    for name in record.skip_classes:
        if name not in classes:
            raise PlanError(_unmatched(record, "skip_classes", name, classes, "class"))


def _unmatched(record: Any, field: str, wanted: str, known: Iterable[str], what: str) -> str:
    whole = " Patterns match whole components of dotted names." if what == "module" else ""
    return (
        f"{type(record).__name__}({field}={wanted!r}): no {what} of the model matches."
        f"{closest(wanted, known)}{whole}"
    )


def _nothing_left(module: nn.Module, record: Quantize | Recipe, skipped: Mapping[str, str]) -> str:
    """Say that no linear layer of a model is left, and what to change."""
    call, verb, advice = f"fx.{type(record).__name__}(...)", "converts", "Try: precision='bf16'."
    if isinstance(record, QUANTIZE):
        verb, advice = "quantizes", "Try: leave quantize out."
    if "trained" in skipped.values():
        advice = (
            "Quantized weights are frozen. Freeze the model with net.requires_grad_(False), and "
            "train adapters, or wrap it without an optimizer."
        )
    kind = type(module).__name__
    # Those of transformers' GPT-2 compute what a linear layer does, with a transposed weight.
    if any(type(part).__name__ == "Conv1D" for part in module.modules()):
        advice = f"Layers of class Conv1D stay as they are. {advice}"
    if not skipped:
        return f"{call} {verb} layers of class nn.Linear, and {kind} has none. {advice}"
    shown = [
        f"{name or 'the only one'} ({why})" for name, why in list(skipped.items())[:_MAX_SHOWN]
    ]
    more = f" and {len(skipped) - _MAX_SHOWN} more" if len(skipped) > _MAX_SHOWN else ""
    return f"{call} skips every linear layer of {kind}: {', '.join(shown)}{more}. {advice}"


def _check_dtypes(linears: Mapping[str, Any], record: Quantize) -> None:
    wrong = [name for name, part in linears.items() if part.weight.dtype not in _DTYPES]
    if wrong:
        dtype = str(linears[wrong[0]].weight.dtype).removeprefix("torch.")
        raise PlanError(
            f"Plan(quantize=fx.{type(record).__name__}(...)) quantizes weights in fp32, bf16 or "
            f"fp16, and {wrong[0]} is {dtype} ({len(wrong)} such layers). Convert the model first: "
            f"net.float(), or skip these layers."
        )


def _check_sizes(linears: Mapping[str, Any], record: Torchao) -> None:
    wrong = [
        (name, what, size, divisor)
        for name, part in linears.items()
        for what, size, divisor in (
            ("input", part.in_features, record.group),
            ("output", part.out_features, _INT4_ROWS),
        )
        if size % divisor
    ]
    if not wrong:
        return
    name, what, size, divisor = wrong[0]
    another = "another group, " if what == "input" else ""
    raise PlanError(
        f"Torchao(weights={record.weights!r}, group={record.group}): {name} has {size} {what} "
        f"features, which {divisor} does not divide ({len({name for name, *_ in wrong})} such "
        f"layers). Use {another}skip=..., or weights='int8'."
    )
