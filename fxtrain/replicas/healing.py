"""The state that a replica receives from another one: a model and a position, as bytes."""

import json
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from safetensors.torch import load, save
from torch import Tensor

from fxtrain._version import __version__
from fxtrain.backends.core.model_state import local_part_of, memory_reader, shape_and_dtype
from fxtrain.checkpoint.json_values import decode, encode
from fxtrain.errors import PlanError
from fxtrain.state import Key, Plan, Position, Wrapped, diff, structure, unstructure


@attrs.frozen(kw_only=True)
class Progress:
    """How far the replicas are; the last two fields are of those that train independently."""

    position: Position  # the cursor after the last update
    history: int = 0  # a digest of the last sums, equal on replicas that computed them together
    averaged: bool = False  # whether the averages that are due at the position were made
    samples: int = 0  # rows of the run until the replicas exchanged something last


def pack_state(
    model: Wrapped,
    progress: Progress,
    more: Mapping[str, Tensor] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Tensor:
    """This rank's part of the state, in the format of safetensors: uint8, 1-D, on the CPU.

    `more` are tensors beside those of the model, and `facts` values that JSON can have. Takes
    memory for two copies of the state on the host. Tensors are numbered, and the header lists what
    each is: its part of the state, and the fields of its key, or its name.
    """
    state = model.strategy.state(model)
    inside: dict[str, Tensor] = {}
    header: dict[str, Any] = {
        "versions": _versions(),
        "plan": unstructure(model.plan),
        "progress": {**attrs.asdict(progress), "position": unstructure(progress.position)},
        "facts": dict(facts or {}),
        "values": encode(state.values, "", inside),
        "shapes": [
            [list(shape), str(dtype).removeprefix("torch.")]
            for shape, dtype in map(shape_and_dtype, state.tensors.values())
        ],
    }
    rows = [("shared", key, local_part_of(tensor)) for key, tensor in state.tensors.items()]
    rows += [("own", key, tensor) for key, tensor in state.own.items()]
    keyed = [(part, [key.kind, key.name], tensor) for part, key, tensor in rows]
    named = [("value", [name], tensor) for name, tensor in inside.items()]
    named += [("more", [name], tensor) for name, tensor in (more or {}).items()]
    header["tensors"] = [(part, names) for part, names, _ in [*keyed, *named]]
    # A copy of each, since the format has no tensors that share memory.
    copies = {
        str(number): tensor.detach().to("cpu", copy=True).contiguous()
        for number, (_, _, tensor) in enumerate([*keyed, *named])
    }
    data = save(copies, {"state": json.dumps(header)})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpack_state(
    model: Wrapped, data: Tensor, local: Mapping[str, Any] | None = None
) -> tuple[Progress, dict[str, Tensor], dict[str, Any]]:
    """Replace the state of a model by that of another replica, in place.

    Returns how far the other one is, and what `pack_state` was given beside that. A replica with
    another plan, another way to average (`local`) or other versions is a PlanError.
    """
    raw = data.numpy().tobytes()
    header = _header(raw)
    _compare(header, model, local)
    tensors = load(raw)
    shared: dict[Key, Tensor] = {}
    own: dict[Key, Tensor] = {}
    inside: dict[str, Tensor] = {}
    more: dict[str, Tensor] = {}
    for number, (part, names) in enumerate(header["tensors"]):
        tensor = tensors[str(number)]
        if part in ("shared", "own"):
            (shared if part == "shared" else own)[Key(*names)] = tensor
        else:
            (inside if part == "value" else more)[names[0]] = tensor
    shapes = {
        key: (tuple(shape), getattr(torch, dtype))
        for key, (shape, dtype) in zip(shared, header["shapes"], strict=True)
    }
    values = decode(header["values"], inside.__getitem__)
    reader = memory_reader(model.ctx, shapes, shared, own, values)
    model.strategy.load_state(model, reader)
    progress = header["progress"]
    position = structure(progress["position"], Position)
    return Progress(**{**progress, "position": position}), more, header["facts"]


def _header(raw: bytes) -> dict[str, Any]:
    size = int.from_bytes(raw[:8], "little")
    return json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["state"])


def _versions() -> dict[str, str]:
    return {"fxtrain": __version__, "torch": torch.__version__}


def _compare(header: dict[str, Any], model: Wrapped, local: Mapping[str, Any] | None) -> None:
    own = _versions()
    differences = [
        f"{name}: {own[name]} here, {version} in the other replicas"
        for name, version in header["versions"].items()
        if own[name] != version
    ]
    plan = structure(header["plan"], Plan)
    differences += [str(change) for change in diff(model.plan, plan)]
    if (theirs := header["facts"].get("local")) != local:
        differences.append(f"Replicas(local=...): {local} here, {theirs} in the other replicas")
    if differences:
        lines = [
            "This replica differs from those that train already, so it cannot join them:",
            *(f"  {line}" for line in differences),
            "Start it with the same script, plan and packages.",
        ]
        raise PlanError("\n".join(lines))
