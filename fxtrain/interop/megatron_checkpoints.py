"""Read and write Megatron's checkpoints, without Megatron.

Its older format has one file of `torch.save` for each tensor- and pipeline-parallel rank, which
contains objects of many classes. They are read as inert placeholders, and torch reads the tensors
with `weights_only=True`. The newer one, `torch_dist`, is a `torch.distributed.checkpoint`.
"""

import argparse
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from fxtrain._reading import StrPath
from fxtrain._record import shown
from fxtrain.checkpoint.storage import sync_folder
from fxtrain.errors import CheckpointError
from fxtrain.interop.dcp_checkpoints import nested_tensors, read_tree
from fxtrain.interop.imported import Imported, named_folder, named_tensors
from fxtrain.interop.megatron_names import (
    FAMILIES,
    Family,
    Row,
    arguments_of,
    check_family,
    config_of,
    family_of,
    from_transformers,
    fused_name,
    heads_of,
    pattern_of,
    positive_count,
    to_transformers,
)
from fxtrain.models.folder import staging, write_text
from fxtrain.models.pickles import Placeholder, load_weights_only
from fxtrain.models.tensor_sources import inside

_LATEST = "latest_checkpointed_iteration.txt"
_FILE = "model_optim_rng.pt"
_RELEASE = "release"  # what Megatron calls weights without an optimizer
_COMMON = "common.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_MODEL = ("embedding.", "decoder.", "output_layer.")


# By pattern of their names and layer, the parts of tensors that tensor-parallel ranks have.
_Parts = dict[tuple[str, int | None], list[Any]]


def is_megatron(folder: Path) -> bool:
    """Whether a folder is a checkpoint of Megatron, judging by its file names."""
    dist = (folder / "metadata.json").is_file() and (folder / _COMMON).is_file()
    return dist or (folder / _LATEST).is_file() or any(folder.glob(f"mp_rank_*/{_FILE}"))


def read_megatron(folder: Path, overrides: Mapping[str, Any]) -> Imported:
    """Read the weights at any tensor- and pipeline-parallel sizes, as transformers names them.

    Of the latest checkpoint in the folder of `--save`, or of one; `overrides` change its arguments.
    """
    root = _checkpoint(folder)
    if (root / "metadata.json").is_file():
        common, tensors = _stored_dist(root)
        return _named(_arguments(common, overrides), common.get("iteration"), tensors)
    paths = _rank_files(root)
    files = {
        place: load_weights_only(path, str(path), mmap=True, placeholders=True)
        for place, path in paths.items()
    }
    arguments = _arguments(files[0, 0], overrides)
    tensors = _of_stages(root, arguments, files)
    return _named(arguments, files[0, 0].get("iteration"), tensors)


def _checkpoint(folder: Path) -> Path:
    """The folder of one checkpoint."""
    if (folder / _LATEST).is_file():
        return named_folder(
            folder, _LATEST, lambda text: f"iter_{int(text):07d}" if text.isdecimal() else text
        )
    if is_megatron(folder):
        return folder
    raise CheckpointError(
        f"{folder} is not a checkpoint of Megatron: it contains neither {_LATEST}, nor mp_rank_*, "
        f"nor metadata.json with {_COMMON}. Pass the folder of --save.",
        code="FX601",
    )


def _stored_dist(root: Path) -> tuple[Mapping[str, Any], _Parts]:
    """The common part of a checkpoint in `torch_dist`, and its tensors."""
    common = load_weights_only(inside(root, _COMMON), str(root / _COMMON), placeholders=True)
    whole: dict[str, Tensor] = {}
    tree = read_tree(root, lambda n: n.startswith(_MODEL) and "_extra_state" not in n, values=False)
    for name, tensor in nested_tensors(tree).items():
        start, stacked, rest = name.partition("decoder.layers.")
        if stacked and not rest[:1].isdigit():  # the same tensor of all layers
            whole |= {
                f"{start}{stacked}{i}.{rest}": layer for i, layer in enumerate(tensor.unbind())
            }
        else:
            whole[name] = tensor
    for name in [name for name in whole if name.endswith("weight_w")]:  # both halves apart
        halves = [whole.pop(name), whole.pop(name[:-1] + "v")]
        whole[name.removesuffix("_w")] = torch.cat(halves)
    return common, {pattern_of(name): [tensor] for name, tensor in whole.items()}


def _rank_files(root: Path) -> dict[tuple[int, int], Path]:
    """Files by tensor- and pipeline-parallel rank."""
    files: dict[tuple[int, int], Path] = {}
    for path in sorted(root.glob(f"mp_rank_*/{_FILE}")):
        rank = _RANK.fullmatch(path.parent.name)
        if rank is None:
            raise CheckpointError(
                f"{path.parent} is from expert parallelism, which cannot be merged. Convert it "
                f"with Megatron's own tools."
            )
        files[int(rank[1]), int(rank[2] or 0)] = inside(root, f"{path.parent.name}/{_FILE}")
    return files


def _of_stages(
    root: Path, args: Mapping[str, Any], files: Mapping[tuple[int, int], Mapping[str, Any]]
) -> _Parts:
    """The tensors of all stages, with the numbers of layers in the model."""
    tensor, stages = (
        positive_count({name: 1, **args}, name)
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    )
    # Without a table of all ranks, whose number may be any in a damaged file.
    wanted = ((t, p) for t in range(tensor) for p in range(stages))
    absent = [*itertools.islice((place for place in wanted if place not in files), 5)]
    if absent := absent or [(t, p) for t, p in files if t >= tensor or p >= stages]:
        ranks = ", ".join(f"{t}/{p}" for t, p in absent[:5])
        raise CheckpointError(
            f"{root}: the model was cut over {tensor} tensor-parallel and {stages} pipeline-"
            f"parallel ranks, but the files of the ranks {ranks} are missing, or are from another "
            f"checkpoint. Copy all files."
        )
    # One table of layers for each rank, or several with virtual stages, which take turns.
    chunks = {place: _chunks(contents) for place, contents in files.items()}
    whole: _Parts = {}
    first = 0  # layer of the next chunk
    for turn, stage in itertools.product(range(len(chunks[0, 0])), range(stages)):
        parts = [chunks[rank, stage][turn] for rank in range(tensor)]
        places = {name: pattern_of(name) for part in parts for name in part}
        for name, (pattern, layer) in places.items():
            place = None if layer is None else first + layer
            whole[pattern, place] = [part.get(name) for part in parts]
        first += 1 + max((n for _, n in places.values() if n is not None), default=-1)
    if args.get("untie_embeddings_and_output_weights") is not True:
        whole.pop(("output_layer.weight", None), None)  # the last stage's copy of the embedding
    return whole


def _arguments(contents: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values among the arguments, with those that the caller gives."""
    arguments = contents.get("args")
    fields = arguments.fields if isinstance(arguments, Placeholder) else {}
    if isinstance(arguments, argparse.Namespace):  # Megatron, if imported, lets torch load it
        fields = vars(arguments)
    plain = (bool, int, float, str, type(None))
    return {**{n: v for n, v in fields.items() if isinstance(v, plain)}, **overrides}


def _chunks(contents: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """The tensors of a rank: one table, or several with virtual stages."""
    numbered = itertools.takewhile(contents.__contains__, (f"model{i}" for i in itertools.count()))
    tables = [contents[name] for name in (["model"] if "model" in contents else numbered)]
    if not tables or "language_model" in tables[0]:
        raise CheckpointError(
            "The model is not one of Megatron-core, but of --use-legacy-models. Convert it with "
            "Megatron's tools/checkpoint/convert.py first."
        )
    return [
        named_tensors({n: t for n, t in table.items() if not n.endswith("_extra_state")})
        for table in tables
    ]


def _named(args: dict[str, Any], iteration: Any, left: _Parts) -> Imported:
    """A model as transformers names its tensors."""
    family = family_of(sorted({pattern for pattern, _ in left}))
    check_family(family, args)
    layers, heads = positive_count(args, "num_layers"), heads_of(args)
    if layers > len({layer for _, layer in left}):  # before as many are listed
        raise LookupError(f"fewer than {layers} layers")
    output, embedding = family.tied
    tied = ("output_layer.weight", None) not in left
    if tied and args.get("untie_embeddings_and_output_weights") is True:
        raise LookupError("there is no output_layer.weight")
    padded = sum(map(len, left["embedding.word_embeddings.weight", None]))
    vocab = args.get("vocab_size") or padded
    if type(vocab) is not int or not 0 < vocab <= padded:
        raise CheckpointError(f"vocab_size={vocab}: the model has {padded} rows of a vocabulary.")
    tensors: dict[str, Tensor] = {}
    for row, layer in _places(family, layers, tied=tied):
        parts = to_transformers(row, left.pop((row.megatron, layer)), heads, vocab)
        named = zip(row.names, parts, strict=True)
        tensors.update((name.format(layer), part) for name, part in named)
    if left:
        raise LookupError(f"more than {layers} layers")
    return Imported(
        models=(tensors,),
        tied={output: embedding} if tied else {},
        updates=int(iteration or 0),
        config=config_of(family, args, vocab=vocab, tied=tied),
    )


def _places(family: Family, layers: int, *, tied: bool) -> list[tuple[Row, int | None]]:
    """The tensors of a model: each row, with the number of its layer."""
    return [
        (row, layer)
        for row in family.rows
        if not (tied and row.megatron == "output_layer.weight")
        for layer in (range(layers) if "{}" in row.megatron else (None,))
    ]


def write_megatron(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    folder: StrPath,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    implementation: Literal["transformer_engine", "local"] = "transformer_engine",
    vocab_multiple: int = 128,
    args: Mapping[str, Any] | None = None,
) -> Path:
    """Write the weights of a model of transformers as a checkpoint that Megatron loads.

    Args:
        tensors: The weights of a Llama, Qwen2 or GPT-2, by name: `net.state_dict()`.
        config: Its config: `net.config.to_dict()`.
        folder: A folder for `--load`.
        tensor: Tensor-parallel ranks.
        pipeline: Pipeline-parallel ranks, which have equally many layers.
        implementation: As `--transformer-impl`, on which the names of norms depend.
        vocab_multiple: As `--make-vocab-size-divisible-by`: with `tensor` ranks, the vocabulary
            is padded with zeros to a multiple of their product.
        args: Further arguments that Megatron compares with its own, such as `tokenizer_type`.

    Returns:
        The folder of the checkpoint, `release`, as Megatron calls weights without an optimizer.

    Effects:
        Writes one file for each rank with `torch.save`, in Megatron's format `torch`. The file
        that names the checkpoint is written last.

    Raises:
        CheckpointError: the model cannot be written or divided so, lacks a tensor, or the folder
            has such a checkpoint already.

    Example:
        >>> from fxtrain.interop import write_megatron
        >>> write_megatron({}, {"model_type": "bert"}, "runs/megatron")
        Traceback (most recent call last):
        fxtrain.errors.CheckpointError: write_megatron: model_type is 'bert'; only gpt2, llama, ...
    """
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        raise CheckpointError(
            f"write_megatron: model_type is {shown(config.get('model_type'))}; only "
            f"{', '.join(sorted(FAMILIES))} can be written."
        )
    arguments = arguments_of(family, config)
    divided = {"num_attention_heads": tensor, "num_query_groups": tensor}
    divided |= {"ffn_hidden_size": tensor, "num_layers": pipeline}
    for name, ranks in divided.items():
        if positive_count(arguments, name) % ranks:
            raise CheckpointError(
                f"write_megatron(tensor={tensor}, pipeline={pipeline}): {name} is "
                f"{arguments[name]}, which {ranks} ranks do not divide. Choose a divisor."
            )
    left = {name: value.detach() for name, value in tensors.items()}
    output, embedding = family.tied
    tied = output not in left or bool(config.get("tie_word_embeddings", family is FAMILIES["gpt2"]))
    if tied:
        left.pop(output, None)
    places = _places(family, arguments["num_layers"], tied=tied)
    _check_names(family, places, left)
    vocab, multiple = len(left[embedding]), tensor * vocab_multiple
    padded = -(-vocab // multiple) * multiple
    arguments |= {
        "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline,
        "transformer_impl": implementation, "make_vocab_size_divisible_by": vocab_multiple,
        "vocab_size": vocab, "padded_vocab_size": padded,
        "untie_embeddings_and_output_weights": not tied, **(args or {}),
    }  # fmt: skip
    if tied and pipeline > 1:  # the last stage has a copy
        places.append((attrs.evolve(places[0][0], megatron="output_layer.weight"), None))
    heads = (arguments["num_attention_heads"], arguments["num_query_groups"])
    here = arguments["num_layers"] // pipeline
    models: dict[str, dict[str, Tensor]] = {}
    for row, layer in places:
        last = row.megatron.startswith(("decoder.final_layernorm", "output_layer"))
        stage = (pipeline - 1 if last else 0) if layer is None else layer // here
        name = row.megatron.format(None if layer is None else layer % here)
        name = fused_name(name) if implementation == "transformer_engine" else name
        named = [left[each.format(layer)] for each in row.names]
        for rank, part in enumerate(from_transformers(row, named, heads, padded, tensor)):
            suffix = f"_{stage:03d}" if pipeline > 1 else ""
            models.setdefault(f"mp_rank_{rank:02d}{suffix}", {})[name] = part
    return _write(Path(folder).absolute(), arguments, models)


def _write(target: Path, args: Mapping[str, Any], models: Mapping[str, Any]) -> Path:
    """Write the files of all ranks, whose folders are given by name, and the name of the latest."""
    contents = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 0}
    with staging(target) as fresh:
        if (target / _RELEASE).exists():
            raise CheckpointError(f"{target / _RELEASE} exists. Write into another folder.")
        for name, model in models.items():
            (fresh / _RELEASE / name).mkdir(parents=True)
            with (fresh / _RELEASE / name / _FILE).open("wb") as file:
                torch.save({**contents, "model": model}, file)
                file.flush()
                os.fsync(file.fileno())
        write_text(fresh / _LATEST, _RELEASE)
        for name in (_RELEASE, _LATEST):
            os.replace(fresh / name, target / name)
            sync_folder(target)
    return target / _RELEASE


def _check_names(
    family: Family, places: Sequence[tuple[Row, int | None]], tensors: Mapping[str, Tensor]
) -> None:
    names = {name.format(layer) for row, layer in places for name in row.names}
    if wrong := sorted(names ^ set(tensors)):
        layers = 1 + max(layer for _, layer in places if layer is not None)
        raise CheckpointError(
            f"write_megatron: {family.model_type} with {layers} layers has "
            f"{'a tensor' if wrong[0] in names else 'no tensor'} {shown(wrong[0])}, unlike the "
            f"tensors passed. Pass net.state_dict() and net.config.to_dict()."
        )
