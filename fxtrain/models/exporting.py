"""Export a model in the safetensors layout that other libraries read."""

import contextlib
import copy
import hashlib
import os
import re
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain import ops
from fxtrain._display import counted, read_bytes
from fxtrain._reading import path_problem
from fxtrain._record import few
from fxtrain.errors import CheckpointError
from fxtrain.models.folder import ModelFile, commit, split_into_files, staging, write_index
from fxtrain.models.safetensors_files import writing
from fxtrain.models.stored_layers import file_metadata, file_weights
from fxtrain.models.written_weights import (
    context_of,
    ignored_names,
    module_of,
    weights_by_name,
    write_problems,
)
from fxtrain.ops.block_names import own_names
from fxtrain.ops.same_errors import fail_together
from fxtrain.ops.tensor_bytes import WRITABLE_DTYPES
from fxtrain.ops.whole_tensors import is_sharded
from fxtrain.precision.quantizing import quantized_layers, weight_format
from fxtrain.precision.torchao_layers import TORCHAO, torchao_config
from fxtrain.state import DistContext, FileTensor, Weight, Wrapped


def export(
    model: Wrapped | nn.Module | Mapping[str, Tensor],
    folder: str | os.PathLike[str],
    max_shard: str | int = "5GB",
    *,
    ctx: DistContext | None = None,
    sharded: bool = False,
) -> tuple[Path, ...]:
    """Write a model's weights as safetensors, in the files that other libraries expect.

    Writes a single file `model.safetensors`, or several `model-00001-of-0000N.safetensors` with
    `model.safetensors.index.json`. A tied tensor is stored once; its other names are in the
    file's metadata. For a `transformers` model, also writes `config.json`, so that
    `from_pretrained(folder)` works.

    Args:
        model: A model from `wrap`, a module, or tensors by name.
        folder: Destination. Replaces weights of an earlier export and keeps other files.
        max_shard: Largest number of bytes of values in one file, as a number or as "5GB" or
            "2GiB". A larger tensor gets a separate file.
        ctx: The context of the ranks, all of which make this call; defaults to that of a
            wrapped model. Without a context, this process writes by itself.
        sharded: Each rank writes some of the files, into a folder that all ranks share. By
            default rank 0 writes all.

    Returns:
        The paths of the weight files, on every rank.

    Effects:
        Writes quantized layers as their library does; warns before if transformers does not
        read them. Gathers sharded tensors one by one, as `fx.weights` does, and writes each at
        once: in addition to the model, this needs memory for two tensors. The new files replace
        earlier ones atomically once all are on disk; if anything fails, the earlier ones stay.

    Raises:
        CheckpointError: a tensor cannot be stored, a rank cannot write, the model was unwrapped,
            or it is one of transformers with adapters of peft; the same error on every rank.
        PlanError: `max_shard` is malformed.
        CollectiveError: the ranks have different models or pass different arguments.

    Example:
        >>> import fxtrain as fx, tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in fx.export(torch.nn.Linear(2, 1), folder)]
        ['model.safetensors']
    """
    ranks = context_of(model, ctx, "export")
    action = f"export to {str(folder)!r}"
    with fail_together(ranks, action):
        if problem := path_problem(folder):
            raise CheckpointError(f"export(folder=...): {problem}.")
        module = None if isinstance(model, Mapping) else module_of(model, "export")
        _refuse_adapters(module)
        weights = _weights(model, module)
        files, digest = _files(model, module, weights, max_shard, alone=ranks is None)
    warn_of_readers(module)
    if ranks is not None:
        ops.agree(f"{action}, {sharded=}, {digest}", ranks, name="export")
    with contextlib.ExitStack() as stack:
        with fail_together(ranks, action, src=0) as together:
            if ranks is None or ranks.is_main:
                target = Path(folder).absolute()
                together.value = stack.enter_context(staging(target)), target
        source, target = together.values[0]
        _write(weights, files, source, ranks, action, sharded=sharded)
        with fail_together(ranks, action, src=0):
            if ranks is None or ranks.is_main:
                write_index(source, files)
                _write_config(module, weights, source)
                commit(source, target)
    return tuple(target / file.name for file in files)


def _refuse_adapters(module: Any) -> None:
    """Refuse names that `from_pretrained` would not find: it fills what it lacks at random."""
    of_transformers = hasattr(getattr(module, "config", None), "save_pretrained")
    if not of_transformers or not getattr(module, "peft_config", None):
        return
    # Models whose adapters were merged may have kept the attribute.
    wrapped = hasattr(module, "get_base_model")
    if wrapped or any(hasattr(part, "base_layer") for part in module.modules()):
        raise CheckpointError(
            f"export: {_class_name(module)} has adapters of peft, and from_pretrained does not "
            f"know the names of its weights: it would fill the model with random values. Inside "
            f"`with fx.gathered(model, ranks='main') as net:`, on the rank where net is not None, "
            f"use fx.export(net.merge_and_unload(), folder) for weights with the adapters added, "
            f"or net.save_pretrained(folder) for the adapters alone, which "
            f"PeftModel.from_pretrained loads. fx.export(dict(fx.weights(model)), folder, ctx=ctx) "
            f"writes every tensor by its name here, for fx.load_model."
        )


def _weights(model: Any, module: nn.Module | None) -> dict[str, Weight]:
    """The tensors to export by name, all of which can be stored."""
    weights = weights_by_name(model, module)
    if module is not None:
        ignored = ignored_names(module)
        weights = file_weights(module, weights)
        weights = {name: weight for name, weight in weights.items() if name not in ignored}
    if problems := write_problems(weights, WRITABLE_DTYPES):
        raise CheckpointError(
            "export: these tensors cannot be written to a safetensors file:\n  "
            + "\n  ".join(few(problems))
        )
    return weights


def _files(
    model: Any,
    module: nn.Module | None,
    weights: Mapping[str, Weight],
    max_shard: str | int,
    *,
    alone: bool,
) -> tuple[tuple[ModelFile, ...], str]:
    """The files to write, and a digest of everything that must be equal on every rank."""
    bare = not isinstance(model, Wrapped)
    sharded = [name for name, weight in weights.items() if bare and is_sharded(weight.like)]
    if alone and sharded:
        raise CheckpointError(
            f"export: {sharded[0]} is sharded over ranks. Call export on all of them, with ctx=."
        )
    stored, others = _stored_once(weights, module)
    entries = [
        FileTensor(name=name, dtype=weights[name].dtype, shape=weights[name].shape)
        for name in stored
    ]
    limit: Any = read_bytes(max_shard, "max_shard")
    files = split_into_files(entries, limit, others)
    if module is not None and (more := file_metadata(module, stored)):
        files = tuple(attrs.evolve(file, metadata={**file.metadata, **more}) for file in files)
    gathered = set(sharded)
    lines = [
        f"{file.name} {entry.name} {entry.dtype} {entry.shape} {entry.name in gathered}"
        for file in files
        for entry in file.entries
    ]
    digest = hashlib.blake2b("\n".join(lines).encode("utf-8", "backslashreplace"), digest_size=6)
    sizes = f"{counted(len(lines), 'tensor')} in {counted(len(files), 'file')}"
    return files, f"{sizes}, {digest.hexdigest()}"


def _stored_once(
    weights: Mapping[str, Weight], module: nn.Module | None
) -> tuple[list[str], dict[str, str]]:
    """Names to store, and for each other name the stored name of the same tensor."""
    # transformers lists the tied weights that it expects under another name.
    patterns = own_names([] if module is None else list(module.modules()), "_tied_weights_keys")
    groups: dict[Hashable, list[str]] = {}
    for name, weight in weights.items():
        # "format" is a reserved key of a file's metadata.
        groups.setdefault(name if name == "format" else weight.key, []).append(name)
    others: dict[str, str] = {}
    for names in groups.values():
        preferred = [
            name for name in names if not any(re.search(pattern, name) for pattern in patterns)
        ]
        stored = (preferred or names)[0]
        others |= {name: stored for name in names if name != stored}
    return [name for name in weights if name not in others], others


def _write(
    weights: Mapping[str, Weight],
    files: tuple[ModelFile, ...],
    source: Path,
    ctx: DistContext | None,
    action: str,
    *,
    sharded: bool,
) -> None:
    """Write all files, one per writer at a time."""
    rank, world = (0, 1) if ctx is None else (ctx.rank, ctx.world_size)
    writers = world if sharded else 1
    if sharded:
        with fail_together(ctx, action):
            if not source.is_dir():
                raise CheckpointError(
                    f"{action}: rank {rank} cannot see the folder that rank 0 created. Use a "
                    f"folder that all ranks share, or pass sharded=False."
                )
    for first in range(0, len(files), writers):
        round_files = files[first : first + writers]
        arriving = _gathered_tensors(weights, round_files, rank)
        with fail_together(ctx, action):
            try:
                if rank < len(round_files):
                    file = round_files[rank]
                    with writing(source / file.name, file.entries, file.metadata) as put:
                        for tensor in arriving:
                            put(tensor)
                            del tensor  # freed before the next one is gathered
            finally:
                for _ in arriving:  # the other ranks still need this rank's gathers
                    pass


def _gathered_tensors(
    weights: Mapping[str, Weight], files: Sequence[ModelFile], rank: int
) -> Iterator[Tensor]:
    """The tensors of this rank's file, gathered one by one in the same order on every rank."""
    for step in range(max(len(file.entries) for file in files)):
        own = None
        for writer, file in enumerate(files):
            if step < len(file.entries):
                full = weights[file.entries[step].name].gather()
                own = full if writer == rank else own
                del full
        if own is not None:
            yield own


def _write_config(module: Any, weights: Mapping[str, Weight], source: Path) -> None:
    """Write the configuration of a transformers model."""
    config = getattr(module, "config", None)
    if not hasattr(module, "from_pretrained") or not hasattr(config, "save_pretrained"):
        return
    described: Any = copy.deepcopy(config)
    described.architectures = [_class_name(module)]
    floating = (weight.dtype for weight in weights.values() if weight.dtype.is_floating_point)
    described.dtype = str(next(floating, torch.float32)).removeprefix("torch.")
    if (quantized := transformers_config(module)) is not None:
        described.quantization_config = quantized
    described.save_pretrained(source)
    generation = getattr(module, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(source)


def _class_name(module: Any) -> str:
    """The user's class of a model, which FSDP2 replaces by a subclass."""
    return next(
        kind.__name__
        for kind in type(module).__mro__
        if all(base.__name__ != "FSDPModule" for base in kind.__mro__)
    )


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", None: "float32"}


def transformers_config(module: Any) -> dict[str, Any] | None:
    """What a config.json says of quantized layers; None if transformers does not read them."""
    first = next(quantized_layers(module), None)
    if first is None:
        return None
    _, part, library = first
    if library.name == "bitsandbytes":
        return _bitsandbytes(module, library.settings(part))
    described = torchao_config(part)
    if described is None:
        return None
    return {
        "quant_method": "torchao",
        "quant_type": {"default": described},
        "modules_to_not_convert": _unquantized(module),
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }


def _bitsandbytes(module: nn.Module, settings: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": settings["kind"] == "bnb4",
        "load_in_8bit": settings["kind"] == "bnb8",
        # Without a list, transformers skips what it takes for the output head.
        "llm_int8_skip_modules": _unquantized(module),
    }
    if settings["kind"] == "bnb8":
        return config | {"llm_int8_threshold": settings["threshold"]}
    return config | {
        "bnb_4bit_quant_type": settings["quant_type"],
        "bnb_4bit_use_double_quant": settings["double_quant"],
        "bnb_4bit_compute_dtype": _DTYPES[settings["compute"]],
        "bnb_4bit_quant_storage": "uint8",
    }


def warn_of_readers(module: Any) -> None:
    """Warn that plain transformers cannot read the export of a transformers model."""
    if not hasattr(module, "from_pretrained"):
        return
    if problem := _problem(module):
        warnings.warn(
            f"export: {problem}; fx.load_model reads these files.", UserWarning, stacklevel=3
        )


def _problem(module: nn.Module) -> str | None:
    formats: set[str] = set()
    for name, part, library in quantized_layers(module):
        formats.add(form := weight_format(part, library))
        if library is TORCHAO and torchao_config(part) is None:
            return f"from_pretrained does not read layers in {form}, such as {name}"
    if len(formats) < 2:
        return None
    return f"from_pretrained reads one format, and this model has {' and '.join(sorted(formats))}"


def _unquantized(module: nn.Module) -> list[str]:
    """The layers that transformers would quantize, and that are not."""
    quantized = {name for name, _, _ in quantized_layers(module)}
    return [
        name
        for name, part in module.named_modules()
        if name not in quantized
        and (isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D")
    ]
