"""The config of running a model that is larger than the memory of its device. Data only."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from fxtrain._byte_units import read_bytes
from fxtrain._record import at_least, canonical, record
from fxtrain.state.placement.placement import DtypeRule, Placement

__all__ = ["Limit", "Offload", "POLICIES", "limits_of", "rules_of", "share_of"]

POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


def _is_limit(_: Any, __: Any, value: int | str) -> None:
    share = share_of(value)
    if share is None:
        _is_size(None, None, value)
    elif share > 1:
        raise ValueError("choose a share from 0% to 100%.")


def _is_size(_: Any, __: Any, value: int | str) -> None:
    if value != 0:
        read_bytes(value, "memory")


@record
class Limit:
    """How much of a device, of the CPU or of the disk a model may take.

    Attributes:
        device: "cuda:0", "cpu" or "disk".
        bytes: A number, text such as "10GiB", or a share of what is free, such as "50%".
    """

    device: str
    bytes: int | str = attrs.field(
        validator=_is_limit,
        metadata={"choose": "a number of bytes, or text such as '10GiB' or '50%'"},
    )


def share_of(value: int | str) -> float | None:
    """A share such as "50%" as a number; None if it is a size."""
    percent = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    return None if percent is None else float(percent[1]) / 100


def limits_of(
    value: Mapping[str, int | str] | Sequence[Limit],
) -> tuple[Limit, ...]:
    """A mapping from devices to bytes as limits; anything else as it is."""
    if isinstance(value, Mapping):
        return tuple(Limit(device=str(device), bytes=size) for device, size in value.items())
    return _to_tuple(value)


def rules_of(value: Mapping[str, str] | Sequence[DtypeRule]) -> tuple[DtypeRule, ...]:
    """A mapping from patterns to dtypes as rules; anything else as it is."""
    if isinstance(value, Mapping):
        return tuple(DtypeRule(match=match, dtype=dtype) for match, dtype in value.items())
    return _to_tuple(value)


_to_tuple: Any = canonical(tuple[Limit, ...])


@record
class Offload:
    """Run a model that does not fit its device: parts of it stream from the CPU or from disk.

    Attributes:
        placement: What is held where. None computes it when the model is wrapped, from the
            fields below.
        memory: What the model may take, by device: `{"cuda:0": "10GiB", "cpu": "50%"}`. Devices
            that are not named are measured where `memory` is empty, and not used otherwise.
        policy: balanced: spread over the accelerators evenly; auto: the same;
            balanced_low_0: as little as possible on the first; sequential: fill one after another.
        no_split: Class names of modules whose tensors stay together. None takes the model's own
            list (`_no_split_modules` of transformers), or else what its ModuleLists hold.
        ahead: Units to read ahead of the one in use; None reads as many as memory allows.
        offload_buffers: Stream buffers with the parameters of their unit, rather than keep them.
        activations: Room for activations on every device, in bytes or as "2GiB".
        batch: Sequences for whose key-value cache to keep room.
        tokens: Their length; 0 keeps no room.
        dtypes: The dtypes in which to hold parameters, by patterns: `{"*norm*": "float32"}`.
        source: Where values come from: a model file, an index or a folder, as for
            `fx.load_model`. None takes those of the module.
        offload_folder: Where streamed units are written that are in no safetensors file yet, or not
            aligned to 16 bytes there; they are used again if they are still the same.
        pin: Keep units on the CPU in pinned memory, where an accelerator reads them.

    Example:
        >>> import fxtrain as fx
        >>> strategy = fx.Offload(memory={"cuda:0": "10GiB", "cpu": "50%"})
        >>> strategy.memory[0].bytes
        '10GiB'
    """

    kind: Literal["offload"] = attrs.field(default="offload", init=False)
    placement: Placement | None = None
    memory: tuple[Limit, ...] = attrs.field(default=(), converter=limits_of)
    policy: Literal["auto", "balanced", "balanced_low_0", "sequential"] = "auto"
    no_split: tuple[str, ...] | None = None
    ahead: int | None = attrs.field(default=None, validator=at_least(0))
    offload_buffers: bool = False
    activations: int | str = attrs.field(
        default=0,
        validator=_is_size,
        metadata={"choose": "a number of bytes, or text such as '2GiB'"},
    )
    batch: int = attrs.field(default=1, validator=at_least(1))
    tokens: int = attrs.field(default=0, validator=at_least(0))
    dtypes: tuple[DtypeRule, ...] = attrs.field(default=(), converter=rules_of)
    source: str | None = None
    offload_folder: str | None = None
    pin: bool = True
