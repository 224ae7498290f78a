"""The state that a replica receives from another one: a model and a position, as bytes."""

import json
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fxtrain._version import __version__
from fxtrain.backends.core.model_state import format_of, local_part_of, memory_reader
from fxtrain.checkpoint.json_values import decode, encode
from fxtrain.errors import PlanError
from fxtrain.state import Plan, Position, Wrapped, diff, structure, unstructure

_SHARED, _OWN, _VALUE = "shared/", "own/", "value/"


def pack_state(model: Wrapped, position: Position, history: int) -> Tensor:
    """This rank's part of the state, in the format of safetensors.

    Returns:
        uint8, 1-D, on the CPU.

    Effects:
        Memory for two copies of the state on the host.
    """
    state = model.strategy.state(model)
    inside: dict[str, Tensor] = {}
    header = {
        "versions": _versions(),
        "plan": unstructure(model.plan),
        "position": unstructure(position),
        "history": history,
        "values": encode(state.values, "", inside),
        "shapes": {
            name: [list(shape), str(dtype).removeprefix("torch.")]
            for name, (shape, dtype) in ((n, format_of(t)) for n, t in state.tensors.items())
        },
    }
    tensors = {
        **{_SHARED + name: local_part_of(tensor) for name, tensor in state.tensors.items()},
        **{_OWN + name: tensor for name, tensor in state.own.items()},
        **{_VALUE + name: tensor for name, tensor in inside.items()},
    }
    # A copy of each, since the format has no tensors that share memory.
    copies = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }
    data = save(copies, {"state": json.dumps(header)})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpack_state(model: Wrapped, data: Tensor) -> tuple[Position, int]:
    """Replace the state of a model by that of another replica, in place.

    Returns:
        Its position and history.

    Raises:
        PlanError: the other replica runs another plan, or other versions.
        CheckpointError: it trains another model.
    """
    raw = data.numpy().tobytes()
    header = _header(raw)
    _compare(header, model)
    tensors = load(raw)

    def named(prefix: str) -> dict[str, Tensor]:
        size = len(prefix)
        return {name[size:]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    shapes = {
        name: (tuple(shape), getattr(torch, dtype))
        for name, (shape, dtype) in header["shapes"].items()
    }
    values = decode(header["values"], named(_VALUE).__getitem__)
    reader = memory_reader(model.ctx, shapes, named(_SHARED), named(_OWN), values)
    model.strategy.load_state(model, reader)
    return structure(header["position"], Position), header["history"]


def _header(raw: bytes) -> dict[str, Any]:
    size = int.from_bytes(raw[:8], "little")
    return json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["state"])


def _versions() -> dict[str, str]:
    return {"fxtrain": __version__, "torch": torch.__version__}


def _compare(header: dict[str, Any], model: Wrapped) -> None:
    own = _versions()
    found = [
        f"{name}: {own[name]} here, {version} in the other replicas"
        for name, version in header["versions"].items()
        if own[name] != version
    ]
    plan = structure(header["plan"], Plan)
    found += [str(one) for one in diff(model.plan, plan)]
    if found:
        raise PlanError(
            "\n".join(
                [
                    "This replica differs from those that train already, so it cannot join them:",
                    *(f"  {line}" for line in found),
                    "Start it with the same script, plan and packages.",
                ]
            )
        )
