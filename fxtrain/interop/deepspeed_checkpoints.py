"""Read checkpoints of DeepSpeed's `engine.save_checkpoint`, at ZeRO stages 0 to 3.

The files are pickles that name classes of DeepSpeed. Inert placeholder classes replace these, and
torch reads the rest with `weights_only=True`. DeepSpeed need not be installed.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxtrain.errors import CheckpointError
from fxtrain.interop.imported import Imported, in_order, named_folder, named_tensors
from fxtrain.models.pickles import load_weights_only
from fxtrain.models.tensor_sources import inside

_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt"
)
_OTHERS = re.compile(r"layer_.*_states\.pt|expp_rank_.*_states\.pt")
_MASTER = "fp32"  # among the flat states of an optimizer
_Files = Sequence[Mapping[str, Any]]  # their contents, by rank
_STAGES: Any = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder is a DeepSpeed checkpoint, judging by its file names."""
    return (folder / "zero_to_fp32.py").exists() or any(folder.glob("**/*mp_rank_*_states.pt"))


def read_deepspeed(root: Path, *, optimizer: bool) -> Imported:
    """Read all files, at any number of ranks; the fp32 masters are read without optimizer too."""
    models, optims = _load(_tagged(root))
    return _assemble(models, optims, optimizer=optimizer)


def _tagged(root: Path) -> Path:
    if (root / "latest").is_file():
        return named_folder(root, "latest")
    if any(root.glob("*mp_rank_*_states.pt")):
        return root
    raise CheckpointError(
        f"{root} is not a DeepSpeed checkpoint: it contains neither a file 'latest' nor "
        f"*_model_states.pt. Pass the folder that was passed to save_checkpoint.",
        code="FX601",
    )


def _load(root: Path) -> tuple[_Files, _Files]:
    """The contents of the model files and of the optimizer files, by rank.

    Below stage 3 there is one model file.
    """
    files: dict[str, dict[int, Any]] = {"model": {}, "optim": {}}
    for path in sorted(root.iterdir()):
        name = _FILE.fullmatch(path.name)
        if _OTHERS.fullmatch(path.name) or (name and int(name[2])):
            raise CheckpointError(
                f"{path} is from tensor, pipeline or expert parallelism, which cannot be merged. "
                f"Restore it with DeepSpeed at the same world size."
            )
        if name:
            contents = load_weights_only(inside(root, path.name), str(path), placeholders=True)
            files[name[3]][int(name[1] or 0)] = contents
    return in_order(files["model"], root, "model"), in_order(files["optim"], root, "optim")


def _assemble(models: _Files, optims: _Files, *, optimizer: bool) -> Imported:
    first = models[0]
    buffers = set(first["buffer_names"])
    if not optims:
        tensors, state = dict(first["module"]), first["optimizer"] if optimizer else None
        if state is not None and "state" not in state:
            raise CheckpointError(
                "At stage 0 in half precision, DeepSpeed saves optimizer groups without the names "
                "of their parameters. Pass optimizer=False, or save at stage 1."
            )
    else:
        parts = [state["optimizer_state_dict"] for state in optims]
        level, counts = parts[0]["zero_stage"].arguments[0], parts[0]["partition_count"]
        stage = int(_STAGES.get(level, level))
        ranks = max(counts) if isinstance(counts, list) else int(counts)
        if ranks != len(parts):
            raise CheckpointError(
                f"The optimizer was partitioned over {ranks} ranks, but there are {len(parts)} "
                f"files: a file is missing, or left over from an earlier checkpoint."
            )
        shapes = [{n: tuple(s) for n, s in group.items()} for group in first["param_shapes"]]
        masters, state = (_stage_3 if stage == 3 else _stages_1_and_2)(parts, shapes)
        tensors = {n: t for n, t in first["module"].items() if stage < 3 or n in buffers}
        tensors = {**tensors, **_frozen(models, stage), **masters}
    tied = dict(first["shared_params"] or {})
    tensors = {name: t for name, t in tensors.items() if tied.get(name) not in tensors}
    scheduler = first["lr_scheduler"]
    return Imported(
        models=(named_tensors(tensors),),
        tied={name: stored for name, stored in tied.items() if stored in tensors},
        optimizers=(state,) if optimizer and state else (),
        schedulers=(scheduler,) if optimizer and scheduler else (),
        updates=int(first["global_steps"]),
    )


def _frozen(models: _Files, stage: int) -> dict[str, Tensor]:
    """Full frozen parameters; stage 3 partitions them too."""
    fragments = [
        model["frozen_param_fragments"] for model in (models if stage == 3 else models[:1])
    ]
    return {
        name: _shaped(name, [of_rank[name] for of_rank in fragments], tuple(shape))
        for name, shape in (models[0]["frozen_param_shapes"] or {}).items()
    }


_Merged = tuple[dict[str, Tensor], dict[str, Any]]
_Shapes = list[dict[str, tuple[int, ...]]]


def _stages_1_and_2(parts: list[dict[str, Any]], shapes: _Shapes) -> _Merged:
    """Merge a flat master per group and rank, in which each rank records parameter offsets."""

    def chunks(group: int, name: str, flats: list[Tensor]) -> Iterator[Tensor]:
        for part, flat in zip(parts, flats, strict=True):
            span = part["param_slice_mappings"][group].get(name)
            if span is not None:
                yield flat.narrow(0, span.fields["start"], span.fields["numel"])

    base = [part["base_optimizer_state"] for part in parts]
    masters = [part["single_partition_of_fp32_groups"] for part in parts]
    return _merge(base, masters, shapes, chunks)


def _stage_3(parts: list[dict[str, Any]], shapes: _Shapes) -> _Merged:
    """Merge parameters that are split into one equal part per rank, the last one padded."""
    if any(part.get("ds_zero_partition_groups") for part in parts):
        raise CheckpointError(
            "Experts in separate partitions cannot be merged. Restore them with DeepSpeed."
        )

    def chunks(group: int, name: str, flats: list[Tensor]) -> list[Tensor]:
        lengths = {n: math.ceil(math.prod(s) / len(parts)) for n, s in shapes[group].items()}
        names = list(lengths)
        start = sum(lengths[before] for before in names[: names.index(name)])
        return [flat.narrow(0, start, lengths[name]) for flat in flats]

    base = [part["optimizer_state_dict"] for part in parts]
    masters = [part["fp32_flat_groups"] for part in parts]
    return _merge(base, masters, shapes, chunks)


def _merge(base: list[dict[str, Any]], masters: list[Any], shapes: _Shapes, chunks: Any) -> _Merged:
    """Full masters, and a state dict of the optimizer with named parameters."""
    full: dict[str, Tensor] = {}
    states: dict[str, Any] = {}
    for group, members in enumerate(shapes):
        flats = {_MASTER: [master[group] for master in masters]}
        states_of_ranks = [state["state"].get(group, {}) for state in base]
        length = flats[_MASTER][0].numel()
        plain: dict[str, Any] = {}
        for key, value in states_of_ranks[0].items():
            if isinstance(value, Tensor) and value.ndim and value.numel() >= length:
                flats[key] = [state[key] for state in states_of_ranks]
            else:
                plain[key] = value
        for name, shape in members.items():
            merged = {
                key: _shaped(name, list(chunks(group, name, each)), shape)
                for key, each in flats.items()
            }
            full[name] = merged.pop(_MASTER)
            if states_of_ranks[0]:
                # In the order in which torch creates them.
                states[name] = {key: merged.get(key, plain.get(key)) for key in states_of_ranks[0]}
    groups = [  # with names in place of the numbers of flat masters
        {**group, "params": [name for flat in group["params"] for name in shapes[flat]]}
        for group in base[0]["param_groups"]
    ]
    return full, {"state": states, "param_groups": groups}


def _shaped(name: str, chunks: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    flat = torch.cat([chunk.flatten() for chunk in chunks])
    if flat.numel() < math.prod(shape):
        raise CheckpointError(
            f"The parts of {name} have {flat.numel()} elements, but its shape {list(shape)} needs "
            f"{math.prod(shape)}. A file is truncated or from another checkpoint."
        )
    return flat[: math.prod(shape)].view(shape).clone()
