"""Filling a model from files or tensors, after checking that all of them fit."""

import contextlib
import difflib
import functools
import os
from collections.abc import Callable, Hashable, Iterable, Mapping

import attrs
import torch
from torch import Tensor, nn

from fxtrain._errors import CheckpointError
from fxtrain.models.tensor_sources import Source, open_source, renamed
from fxtrain.models.tensors import context_of, module_of, weights_by_name
from fxtrain.ops.same_errors import fail_together, raise_on_all_ranks
from fxtrain.ops.whole_tensors import part_of, plain_name
from fxtrain.state import DistContext, Part, Weight, Wrapped

__all__ = ["Loaded", "load_model"]

_MAX_SHOWN = 10
_SEARCHED = 2000  # names among which the nearest spelling is looked for


@attrs.frozen(kw_only=True)
class Loaded:
    """What `load_model` left as it was; both are empty where it was strict.

    Attributes:
        missing: Names of the model that the source does not have.
        unexpected: Names of the source that the model does not have.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class _NameMatch:
    """How a source and a model go together.

    Attributes:
        pairs: For each name of the model to fill, the name in the source.
        doubles: Further pairs for tensors that have several names and are filled already.
        missing: As in `Loaded`.
        unexpected: As in `Loaded`.
    """

    pairs: dict[str, str]
    doubles: tuple[tuple[str, str, str], ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_model(
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    model: Wrapped | nn.Module,
    *,
    strict: bool = True,
    cast: bool = False,
    prefix: str = "",
    rename: Callable[[str], str | None] | None = None,
    device: str | torch.device | None = None,
    ctx: DistContext | None = None,
) -> Loaded:
    """Fill a model's parameters and buffers, in place.

    Args:
        source: A safetensors file, an index over several, a folder with either, or tensors
            by name. A file of `torch.save` is read as far as `weights_only=True` allows.
        model: What `wrap` returned, or a module.
        strict: Refuse a source that lacks a name of the model or has others.
        cast: Convert a dtype that differs; an error otherwise.
        prefix: Read only the source's names that start so, without it.
        rename: From such a name to that in the model, or to None to leave it out.
        device: Where parameters on the meta device get their values; by default where the
            model runs, or the CPU.
        ctx: The ranks, all of which call this; a wrapped model knows its own. Only needed
            for errors to be the same on all of them.

    Returns:
        What was left out, with `strict=False`.

    Effects:
        Every rank reads the files, of a tensor that is spread over ranks (torch's DTensor)
        only its own part, of a pipeline only its own stages. DeepSpeed's engine gets whole
        parameters one by one, with their full-precision masters; stage 3 sends each once.
        Optimizer states stay. Nothing is changed before everything is known to fit. A parameter
        on the meta device is given memory; all others keep theirs. A tensor that has several
        names may have any of them in the source.

    Raises:
        CheckpointError: names, shapes or dtypes do not fit, or a file is damaged, absent or
            outside the folder that names it; the same error on every rank.

    Example:
        >>> import fxtrain as fx, tempfile, torch
        >>> net, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = fx.export(net, folder)
        ...     fx.load_model(folder, other)
        Loaded(missing=(), unexpected=())
        >>> torch.equal(net.weight, other.weight)
        True
    """
    ranks = context_of(model, ctx, "load_model")
    with contextlib.ExitStack() as stack:
        with fail_together(ranks, "load_model"):
            module = module_of(model, "load_model")
            found = renamed(stack.enter_context(open_source(source)), prefix, rename)
            weights = weights_by_name(model, module)
            fit = _match_names(module, weights, found)
            _refuse(module, weights, found, fit, strict=strict, cast=cast)
        with fail_together(ranks, "load_model"):
            where = ("cpu" if ranks is None else ranks.device) if device is None else device
            likes = [weights[name].like for name in fit.pairs if weights[name].here]
            _materialise(module, likes, torch.device(where))
            _fill(module, weights, found, fit, ranks)
    return Loaded(missing=fit.missing, unexpected=fit.unexpected)


def _match_names(module: nn.Module, weights: Mapping[str, Weight], source: Source) -> _NameMatch:
    groups: dict[Hashable, list[str]] = {}
    for name, weight in weights.items():
        groups.setdefault(weight.key, []).append(name)
    pairs: dict[str, str] = {}
    doubles: list[tuple[str, str, str]] = []
    missing: list[str] = []
    for names in groups.values():
        held = [(name, name) for name in names if name in source.entries]
        held = held or [(n, source.others[n]) for n in names if n in source.others][:1]
        if not held:
            missing.append(names[0])
            continue
        pairs[held[0][0]] = held[0][1]
        doubles += [(name, held[0][1], stored) for name, stored in held[1:]]
    used = {*pairs.values(), *(stored for _, _, stored in doubles)}
    left_out = {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name in getattr(part, "_keys_to_ignore_on_save", None) or ()
    }
    return _NameMatch(
        pairs=pairs,
        doubles=tuple(doubles),
        missing=tuple(name for name in missing if name not in left_out),
        unexpected=tuple(name for name in source.entries if name not in used),
    )


def _refuse(
    module: nn.Module,
    weights: Mapping[str, Weight],
    source: Source,
    fit: _NameMatch,
    *,
    strict: bool,
    cast: bool,
) -> None:
    problems: list[str] = []
    if strict and fit.missing:
        near = _spelling(fit.missing, fit.unexpected)
        problems += _list("missing from the source", [name + near(name) for name in fit.missing])
    if strict and fit.unexpected:
        near = _spelling(fit.unexpected, fit.missing)
        problems += _list("not in the model", [name + near(name) for name in fit.unexpected])
        problems += _prefix_hint(source, fit)
    if strict:
        empty = [
            name
            for name, buffer in module.named_buffers()
            if buffer.is_meta and plain_name(name) not in weights
        ]
        problems += _list(
            "on the meta device and never stored: build these buffers on a real one", empty
        )
    shapes, dtypes = _differences(weights, source, fit)
    problems += _list("of another shape", shapes)
    if not cast:
        problems += _list("of another dtype (cast=True converts)", dtypes)
    problems += _list(
        "one tensor in the model, two in the source", _conflicting_ties(weights, source, fit)
    )
    if problems:
        raise CheckpointError(
            f"load_model: {source.what} does not fit {type(module).__name__}.\n"
            + "\n".join(problems)
        )


def _differences(
    weights: Mapping[str, Weight], source: Source, fit: _NameMatch
) -> tuple[list[str], list[str]]:
    """Shapes and dtypes that differ, in words."""
    shapes: list[str] = []
    dtypes: list[str] = []
    for name, stored in fit.pairs.items():
        weight, entry = weights[name], source.entries[stored]
        if not isinstance(weight.like, Tensor):
            continue
        if hasattr(weight.like, "ds_id") and not weight.together:
            shapes.append(
                f"{name} is partitioned by DeepSpeed ZeRO-3: pass what fx.wrap returned, or load "
                f"before wrapping"
            )
        elif weight.shape != entry.shape:
            shapes.append(
                f"{name} is {list(entry.shape)} in the source, {list(weight.shape)} in the model"
            )
        elif weight.dtype != entry.dtype:
            dtypes.append(f"{name} is {entry.dtype} in the source, {weight.dtype} in the model")
    return shapes, dtypes


def _conflicting_ties(weights: Mapping[str, Weight], source: Source, fit: _NameMatch) -> list[str]:
    """Names of one tensor of the model under which the source has different values."""
    torn: list[str] = []
    for name, one, other in fit.doubles:
        kinds = {(source.entries[n].dtype, source.entries[n].shape) for n in (one, other)}
        same = len(kinds) == 1
        if same and source.entries[one].shape == weights[name].shape and weights[name].here:
            part = part_of(weights[name].like)
            same = torch.equal(_bits(source.read(one, part)), _bits(source.read(other, part)))
        if not same:
            torn.append(f"{one} and {other}")
    return torn


def _bits(tensor: Tensor) -> Tensor:
    """Values that equal themselves even where they are not a number."""
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8) if flat.numel() else flat


def _materialise(module: nn.Module, tensors: Iterable[Tensor], device: torch.device) -> None:
    """Give memory to the tensors on the meta device that are going to be filled.

    Each stays the object that it is, so that other names of it and optimizers keep it.
    """
    todo = {id(tensor): tensor for tensor in tensors if getattr(tensor, "is_meta", False)}
    if not todo:
        return
    if any("FSDPModule" in [kind.__name__ for kind in type(p).__mro__] for p in module.modules()):
        # FSDP2 keeps memory of its own for each parameter, and sees to it here.
        module._apply(lambda t: torch.empty_like(t, device=device) if id(t) in todo else t)
        return
    for tensor in todo.values():
        with torch.no_grad():
            fresh: Tensor = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
        vars(fresh).update(vars(tensor))
        torch.utils.swap_tensors(tensor, fresh)


def _fill(
    module: nn.Module,
    weights: Mapping[str, Weight],
    source: Source,
    fit: _NameMatch,
    ranks: DistContext | None,
) -> None:
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    strangers: dict[str, Tensor] = {}
    for name, stored in fit.pairs.items():
        weight = weights[name]
        if weight.here and id(weight.like) not in own:
            strangers[name] = source.read(stored, None)
        elif weight.together:
            weight.fill(_read_by_all(source, stored, ranks))
        else:
            weight.fill(functools.partial(source.read, stored))
    if strangers:  # made by the module for its state dict, and taken back the same way
        names = {plain_name(name): name for name in module.state_dict()}
        state = {names[name]: value.clone() for name, value in strangers.items()}
        module.load_state_dict(state, strict=False)


def _read_by_all(
    source: Source, name: str, ranks: DistContext | None
) -> Callable[[Part | None], Tensor]:
    """What reads a tensor on every rank or on none: the others would wait for one that failed."""

    def read(part: Part | None) -> Tensor:
        value, problem = torch.empty(0), None
        try:
            value = source.read(name, part)
        except Exception as error:
            problem = error
        raise_on_all_ranks(problem, ranks, "load_model")
        return value

    return read


def _list(what: str, lines: Iterable[str]) -> list[str]:
    """A heading with a count, and the first lines under it."""
    found = list(lines)
    if not found:
        return []
    more = [f"    and {len(found) - _MAX_SHOWN} more"] if len(found) > _MAX_SHOWN else []
    return [f"  {len(found)} {what}:", *(f"    {line}" for line in found[:_MAX_SHOWN]), *more]


def _spelling(names: tuple[str, ...], others: tuple[str, ...]) -> Callable[[str], str]:
    """From a name to words about the nearest of the others; only for those that are shown."""

    def near(name: str) -> str:
        if name not in names[:_MAX_SHOWN]:
            return ""
        close = difflib.get_close_matches(name, others[:_SEARCHED], n=1)
        return f" (nearest: {close[0]})" if close else ""

    return near


def _prefix_hint(source: Source, fit: _NameMatch) -> list[str]:
    """What to pass where all names differ by the same beginning."""
    if not fit.missing:
        return []
    first = fit.missing[0]
    for name in fit.unexpected:
        longer, shorter = (name, first) if len(name) > len(first) else (first, name)
        head = longer.removesuffix(shorter)
        if not head.endswith(".") or head == longer:
            continue
        if longer is name and all(head + wanted in source.entries for wanted in fit.missing):
            return [f"  Every missing name is there behind {head!r}: pass prefix={head!r}."]
        if longer is first and all(one.removeprefix(head) in fit.unexpected for one in fit.missing):
            return [f"  The model has {head!r} before each: rename=lambda name: {head!r} + name."]
    return []
