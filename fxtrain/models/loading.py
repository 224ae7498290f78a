"""Load a model from files or tensors, after checking that all of them match."""

import contextlib
import difflib
import functools
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor, nn

from fxtrain._record import few
from fxtrain.errors import CheckpointError, PlanError
from fxtrain.models.quantized_loading import prepare_layers, quantized_while_read
from fxtrain.models.tensor_sources import TensorSource, WeightSource, open_source, renamed
from fxtrain.models.written_weights import context_of, ignored_names, module_of, weights_by_name
from fxtrain.ops.same_errors import fail_together
from fxtrain.ops.whole_tensors import part_of, plain_name, set_values
from fxtrain.precision.quantizing import allocate, put_layers, quantized_tensors
from fxtrain.state import DistContext, Quantize, TensorIndex, Weight, Wrapped

_MAX_SHOWN = 10
_SEARCHED = 2000  # names searched for the nearest spelling


@attrs.frozen(kw_only=True)
class Loaded:
    """What `load_model` skipped; empty if `strict=True`.

    Attributes:
        missing: Names in the model that the source does not have.
        unexpected: Names in the source that the model does not have.
        other_shapes: Names of tensors that have another shape in the source.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    other_shapes: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class _NameMatch:
    """How the names of a source match those of a model."""

    pairs: dict[str, str]  # for each tensor to load, its name in the model and in the source
    doubles: tuple[tuple[str, str, str], ...]  # tied tensors that `pairs` has under another name
    missing: tuple[str, ...]  # this and `unexpected`: as in `Loaded`
    unexpected: tuple[str, ...]


def load_model(
    source: str | os.PathLike[str] | Mapping[str, Tensor] | WeightSource,
    model: Wrapped | nn.Module,
    *,
    strict: bool = True,
    cast: bool = False,
    skip_shapes: bool = False,
    prefix: str = "",
    rename: Callable[[str], str | None] | None = None,
    device: str | torch.device | None = None,
    quantize: Quantize | None = None,
    ctx: DistContext | None = None,
) -> Loaded:
    """Load a model's parameters and buffers, in place.

    Args:
        source: A safetensors file, an index over several, a folder with either, or tensors
            by name. A file of `torch.save` is read with `weights_only=True`. A GGUF file is
            dequantized, one tensor at a time. For a checkpoint of `fx.save`,
            `fx.checkpoint.saved_weights(path)`.
        model: A model from `wrap`, or a module.
        strict: Raise if names in the source and in the model differ.
        cast: Convert dtypes that differ, instead of raising; but no complex values to real ones.
        skip_shapes: Leave tensors as they are that have another shape in the source, instead of
            raising: for a new head over a pretrained body.
        prefix: Read only names of the source with this prefix, and remove it.
        rename: Name in the source, without the prefix → name in the model, or None to skip it.
        device: Where to allocate parameters that are on the meta device; by default the
            context's device, or the CPU.
        quantize: Quantize linear layers while loading, one at a time: with a model on the meta
            device, the unquantized model is never in memory. Layers that are quantized in the
            source become quantized layers in any case.
        ctx: The context of the ranks, all of which make this call; defaults to that of a
            wrapped model. It makes errors the same on every rank.

    Returns:
        The skipped names, with `strict=False` or `skip_shapes=True`.

    Effects:
        Each rank reads the files: of a sharded tensor (DTensor) only its shard, of a pipeline
        only its stages. DeepSpeed's engine loads full parameters one by one, with their
        full-precision masters; at stage 3 each is broadcast once. Optimizer states are not
        changed. Nothing changes until everything is known to match. Parameters on the meta
        device are allocated; all others keep their memory. A tied tensor may have any of its
        names in the source.

    Raises:
        CheckpointError: names, shapes or dtypes do not match, or a file is damaged, missing or
            outside the folder that names it; the same error on every rank.
        PlanError: there is no such device, or `quantize` does not fit it or the model.

    Example:
        >>> import fxtrain as fx, tempfile, torch
        >>> net, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = fx.export(net, folder)
        ...     fx.load_model(folder, other)
        Loaded(missing=(), unexpected=(), other_shapes=())
        >>> torch.equal(net.weight, other.weight)
        True
    """
    ranks = context_of(model, ctx, "load_model")
    with contextlib.ExitStack() as stack:
        with fail_together(ranks, "load_model"):
            where = _device(
                ("cpu" if ranks is None else ranks.device) if device is None else device
            )
            module = module_of(model, "load_model")
            opened = stack.enter_context(open_source(source))
            named = renamed(opened, prefix, rename)
            undo = stack.enter_context(contextlib.ExitStack())
            to_quantize, in_fp32 = prepare_layers(
                source, named, model, module, quantize, where, undo
            )
            weights = weights_by_name(model, module)
            fit = _match_names(module, weights, named)
            skipped: tuple[str, ...] = ()
            if skip_shapes:
                fit, skipped = _without_other_shapes(weights, named, fit)
            _refuse(module, weights, named, fit, strict=strict, cast=cast, in_fp32=in_fp32)
        with fail_together(ranks, "load_model"):
            allocate(module, where)
            weights = weights_by_name(model, module)
            names = [name for name in fit.pairs if name not in to_quantize]
            likes = [
                weights[name].like
                for name in names
                if weights[name].here and weights[name].place is None
            ]
            _materialize(module, likes, where)
            quantized: dict[str, nn.Module] = {}
            if quantize is not None:
                read = {
                    layer: fit.pairs[weight]
                    for weight, layer in to_quantize.items()
                    if weight in fit.pairs
                }
                quantized = quantized_while_read(named, module, quantize, read, where)
            _fill(module, weights, named, {name: fit.pairs[name] for name in names}, ranks)
            put_layers(module, quantized)
            undo.pop_all()
    return Loaded(missing=fit.missing, unexpected=fit.unexpected, other_shapes=skipped)


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError:
        raise PlanError(
            f"load_model(device={device!r}): torch knows no such device. Choose 'cpu', 'cuda' or "
            f"another of torch's names."
        ) from None


def _match_names(
    module: nn.Module, weights: Mapping[str, Weight], source: TensorSource
) -> _NameMatch:
    groups: dict[Hashable, list[str]] = {}
    for name, weight in weights.items():
        groups.setdefault(weight.key, []).append(name)
    pairs: dict[str, str] = {}
    doubles: list[tuple[str, str, str]] = []
    missing: list[str] = []
    for names in groups.values():
        matches = [(name, name) for name in names if name in source.entries]
        matches = matches or [(n, source.others[n]) for n in names if n in source.others][:1]
        if not matches:
            missing.append(names[0])
            continue
        pairs[matches[0][0]] = matches[0][1]
        doubles += [(name, matches[0][1], stored) for name, stored in matches[1:]]
    used = {*pairs.values(), *(stored for _, _, stored in doubles)}
    ignored = ignored_names(module)
    return _NameMatch(
        pairs=pairs,
        doubles=tuple(doubles),
        missing=tuple(name for name in missing if name not in ignored),
        unexpected=tuple(name for name in source.entries if name not in used),
    )


def _without_other_shapes(
    weights: Mapping[str, Weight], source: TensorSource, fit: _NameMatch
) -> tuple[_NameMatch, tuple[str, ...]]:
    """The tensors to load without those of another shape in the source, and the names of these."""
    skipped = {
        name
        for name, stored in fit.pairs.items()
        if isinstance(weights[name].like, Tensor)
        and weights[name].shape != source.entries[stored].shape
    }
    keys = {weights[name].key for name in skipped}
    pairs = {name: stored for name, stored in fit.pairs.items() if name not in skipped}
    doubles = tuple(double for double in fit.doubles if weights[double[0]].key not in keys)
    return attrs.evolve(fit, pairs=pairs, doubles=doubles), tuple(sorted(skipped))


def _refuse(
    module: nn.Module,
    weights: Mapping[str, Weight],
    source: TensorSource,
    fit: _NameMatch,
    *,
    strict: bool,
    cast: bool,
    in_fp32: frozenset[str],
) -> None:
    problems: list[str] = []
    if strict and fit.missing:
        problems += _list(
            "missing from the source", fit.missing, lambda name: _near(name, fit.unexpected)
        )
    if strict and fit.unexpected:
        problems += _list("not in the model", fit.unexpected, lambda name: _near(name, fit.missing))
        problems += _prefix_hint(fit)
    if strict:
        empty = [
            name
            for name, buffer in module.named_buffers()
            if buffer.is_meta and plain_name(name) not in weights
        ]
        problems += _list(
            "on the meta device and never stored: fx.big.empty(build) computes these buffers", empty
        )
    shapes, dtypes = _differences(weights, source, fit)
    problems += _list("with a different shape (skip_shapes=True skips)", shapes)
    complex_only = [
        line
        for name, line in dtypes
        if source.entries[fit.pairs[name]].dtype.is_complex and not weights[name].dtype.is_complex
    ]
    problems += _list("complex in the source, and real in the model", complex_only)
    others = [line for name, line in dtypes if name not in in_fp32 and line not in complex_only]
    if not cast:
        problems += _list("with a different dtype (cast=True converts)", others)
    problems += _list(
        "tied in the model, but different in the source", _conflicting_ties(weights, source, fit)
    )
    if problems:
        raise CheckpointError(
            f"load_model: {source.what} does not match {type(module).__name__}.\n"
            + "\n".join(problems),
            code="FX603",
        )


def _differences(
    weights: Mapping[str, Weight], source: TensorSource, fit: _NameMatch
) -> tuple[list[str], list[tuple[str, str]]]:
    """Shapes and dtypes that differ, as text; dtypes with their names."""
    shapes: list[str] = []
    dtypes: list[tuple[str, str]] = []
    for name, stored in fit.pairs.items():
        weight, entry = weights[name], source.entries[stored]
        if not isinstance(weight.like, Tensor):
            continue
        if hasattr(weight.like, "ds_id") and not weight.together:
            shapes.append(
                f"{name} is partitioned by DeepSpeed ZeRO-3: pass the model from fx.wrap, or load "
                f"before wrapping"
            )
        elif weight.shape != entry.shape:
            shapes.append(
                f"{name} is {list(entry.shape)} in the source, {list(weight.shape)} in the model"
            )
        elif entry.dtype not in (weight.dtype, weight.like.dtype):
            difference = f"{name} is {entry.dtype} in the source, {weight.dtype} in the model"
            dtypes.append((name, difference))
    return shapes, dtypes


def _conflicting_ties(
    weights: Mapping[str, Weight], source: TensorSource, fit: _NameMatch
) -> list[str]:
    """Pairs of names that are tied in the model and have different values in the source."""
    conflicts: list[str] = []
    for name, first, other in fit.doubles:
        kinds = {(source.entries[n].dtype, source.entries[n].shape) for n in (first, other)}
        same = len(kinds) == 1
        if same and source.entries[first].shape == weights[name].shape and weights[name].here:
            part = part_of(weights[name].like)
            same = torch.equal(_bits(source.read(first, part)), _bits(source.read(other, part)))
        if not same:
            conflicts.append(f"{first} and {other}")
    return conflicts


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in which NaN equals itself."""
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8) if flat.numel() else flat


def _materialize(module: nn.Module, tensors: Iterable[Tensor], device: torch.device) -> None:
    """Allocate the tensors on the meta device that will be loaded.

    Each stays the same object, so that tied names and optimizers keep referring to it.
    """
    todo = {id(tensor): tensor for tensor in tensors if getattr(tensor, "is_meta", False)}
    if not todo:
        return
    if any("FSDPModule" in [kind.__name__ for kind in type(p).__mro__] for p in module.modules()):
        # FSDP2 keeps separate memory for each parameter, which `_apply` allocates.
        module._apply(lambda t: torch.empty_like(t, device=device) if id(t) in todo else t)
        return
    for tensor in todo.values():
        set_values(tensor, torch.empty_like(tensor, device=device, requires_grad=False))


def _fill(
    module: nn.Module,
    weights: Mapping[str, Weight],
    source: TensorSource,
    pairs: Mapping[str, str],
    ranks: DistContext | None,
) -> None:
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    quantized = quantized_tensors(module)
    computed: dict[str, Tensor] = {}
    for name, stored in pairs.items():
        weight = weights[name]
        if weight.place is not None:
            weight.place(functools.partial(source.read, stored), source.entries[stored])
        elif weight.here and id(weight.like) not in own and name not in quantized:
            computed[name] = source.read(stored, None)
        elif weight.together:
            weight.fill(_read_by_all(source, stored, ranks))
        else:
            weight.fill(functools.partial(source.read, stored))
    if computed:  # the module creates these for its state dict, and loads them from it
        names = {plain_name(name): name for name in module.state_dict()}
        state = {names[name]: value.clone() for name, value in computed.items()}
        module.load_state_dict(state, strict=False)


def _read_by_all(
    source: TensorSource, name: str, ranks: DistContext | None
) -> Callable[[TensorIndex | None], Tensor]:
    """A function that reads a tensor, and raises on every rank if a rank fails to read it."""

    def read(part: TensorIndex | None) -> Tensor:
        value = None
        with fail_together(ranks, "load_model"):
            value = source.read(name, part)
        assert value is not None
        return value

    return read


def _list(what: str, lines: Sequence[str], shown: Callable[[str], str] = str) -> list[str]:
    """A heading with a count, followed by the first lines."""
    if not lines:
        return []
    more = [f"    and {len(lines) - _MAX_SHOWN} more"] if len(lines) > _MAX_SHOWN else []
    first = [f"    {line}" for line in few(map(shown, lines[:_MAX_SHOWN]))]
    return [f"  {len(lines)} {what}:", *first, *more]


def _near(name: str, others: tuple[str, ...]) -> str:
    """The name, with the most similar of the others."""
    close = difflib.get_close_matches(name, others[:_SEARCHED], n=1)
    return f"{name} (nearest: {close[0]})" if close else name


def _prefix_hint(fit: _NameMatch) -> list[str]:
    """What to pass if the names of the source have a prefix."""
    for wanted in fit.missing[:1]:
        for name in fit.unexpected:
            if name.endswith(f".{wanted}"):
                prefix = name.removesuffix(wanted)
                return [f"  The source has {wanted} as {name}: pass prefix={prefix!r}."]
    return []
