"""Where each part of a model is held, and the config of running it from there. Data only."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

import attrs

from fxtrain._display import read_bytes
from fxtrain._record import OF_MODEL, at_least, canonical, closest, record
from fxtrain.errors import PlanError

DISK = "disk"
POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")

T = TypeVar("T")


@record
class Unit:
    """A part of a model that is held, and read, as one.

    Attributes:
        name: A module, such as `model.layers.7`, or a single parameter or buffer. Of the units
            whose names a tensor is under, it belongs to the one with the longest name; "" is the
            model itself.
        device: Where it is held: a device such as "cuda:0", "cpu", or "disk"; "" before
            `fx.big.place` has chosen one.
        bytes: Of its tensors, as they are held. A tied tensor counts in the first unit that has it.
        buffers: Of those, buffers that stay on `Placement.device` where the unit does not.
        reads: Bytes of its parameters with all that are tied to others: what it computes with.
        working: Room for it on the device where it computes, beside its tensors: the key-value
            cache of its layers.
        kind: Class of the module; empty if unknown, and for a tensor.
    """

    name: str
    device: str = ""
    bytes: int = attrs.field(default=0, validator=at_least(0))
    buffers: int = attrs.field(default=0, validator=at_least(0))
    reads: int = attrs.field(default=0, validator=at_least(0))
    working: int = attrs.field(default=0, validator=at_least(0))
    kind: str = ""


@record
class Placement:
    """Where each unit of a model is held. A value: compare, hash, store, diff it.

    A unit on a device computes there. Units on the CPU or on disk stream to `device` when they
    are needed; if `device` is the CPU, units on the CPU compute where they are.

    Attributes:
        units: In the order in which the model defines them.
        device: Where units on the CPU or on disk compute.
        tied: Names of tensors that are one tensor, each group in the order of the model; the
            units of a group are held in one place.
        offload_buffers: Buffers stream with the parameters of their unit. Otherwise they stay on
            the device where the unit computes.
        prefetch: Units that `room` allows to read ahead.
        room: Bytes of `device` for streamed units: one in use and `prefetch` more.
        staging: Bytes of the CPU through which units on disk pass on their way to an accelerator.
        reserved: (device, bytes): what is kept free for activations and all else that is not the
            model's.
        dtypes: (pattern, dtype): in which the floating-point parameters whose names match are
            held, such as ("*norm*", "float32"); the first match counts, and others keep theirs.

    Example:
        >>> import fxtrain as fx
        >>> unit = fx.state.Unit(name="layers.0", device="disk", bytes=400)
        >>> placement = fx.state.Placement(units=(unit,), device="cpu", room=800)
        >>> placement.streamed == (unit,), placement.bytes_on("cpu")
        (True, 800)
        >>> fx.state.loads(fx.state.dumps(placement), fx.state.Placement) == placement
        True
    """

    units: tuple[Unit, ...]
    device: str = "cpu"
    tied: tuple[tuple[str, ...], ...] = ()
    offload_buffers: bool = False
    prefetch: int = attrs.field(default=1, validator=at_least(0))
    room: int = attrs.field(default=0, validator=at_least(0))
    staging: int = attrs.field(default=0, validator=at_least(0))
    reserved: tuple[tuple[str, int], ...] = ()
    dtypes: tuple[tuple[str, str], ...] = ()

    def __attrs_post_init__(self) -> None:
        seen: set[str] = set()
        for unit in self.units:
            if unit.name in seen:
                raise PlanError(
                    f"Placement(units=...): {unit.name!r} is listed twice. Keep one unit."
                )
            if not unit.device:
                raise PlanError(
                    f"Placement(units=...): {unit.name!r} has no device. Set one, 'cpu' or 'disk'."
                )
            seen.add(unit.name)
        if self.device == DISK:
            raise PlanError(
                "Placement(device='disk'): nothing computes on disk. Choose a device or 'cpu'."
            )

    @property
    def devices(self) -> tuple[str, ...]:
        """Everything that holds a unit, `device` first and "cpu" and "disk" last."""
        devices = dict.fromkeys([self.device, *(unit.device for unit in self.units)])
        last = [name for name in ("cpu", DISK) if name in devices and name != self.device]
        return (*(name for name in devices if name not in last), *last)

    @property
    def streamed(self) -> tuple[Unit, ...]:
        """Units that are held elsewhere than where they compute."""
        return tuple(unit for unit in self.units if self.computes_on(unit) != unit.device)

    def computes_on(self, unit: Unit) -> str:
        """The device on which a unit computes."""
        return self.device if unit.device in ("cpu", DISK) else unit.device

    def bytes_on(self, device: str) -> int:
        """Bytes that the placement uses on a device, the CPU or the disk, including its room."""
        total = sum(size for name, size in self.reserved if name == device)
        total += self.room if device == self.device else 0
        total += self.staging if device == "cpu" else 0
        for unit in self.units:
            computes = self.computes_on(unit)
            buffers = unit.buffers if computes != unit.device else 0
            total += unit.bytes - buffers if unit.device == device else 0
            total += unit.working + buffers if computes == device else 0
        return total


def unit_of(units: Mapping[str, T], tensor: str) -> T:
    """The unit of a parameter or buffer, which has the longest name that contains it."""
    for name in names_above(tensor):
        if name in units:
            return units[name]
    near = closest(tensor, units)
    raise PlanError(
        f"The placement does not cover tensor {tensor!r}.{near} Add a unit for it or for one "
        f"of its modules, or a unit '' for everything that no other unit contains."
    )


def dtype_of(rules: Iterable[tuple[str, str]], tensor: str) -> str | None:
    """The dtype that rules give a parameter; None if it keeps its own."""
    return next((dtype for match, dtype in rules if fnmatchcase(tensor, match)), None)


def names_above(name: str) -> Iterator[str]:
    """A name and those of the modules that it is in, the longest first; "" is the last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


Limits = tuple[tuple[str, int | str], ...]


def check_limit(size: int | str) -> None:
    """Check how much of a device a model may take: bytes, text such as "10GiB", or "50%"."""
    share = as_share(size)
    if share is not None and share > 1:
        raise ValueError("choose a share from 0% to 100%.")
    if share is None and size != 0:
        read_bytes(size, "memory")


def _are_limits(_: Any, __: Any, value: Limits) -> None:
    for _, size in value:
        check_limit(size)


def as_share(value: int | str) -> float | None:
    """A share such as "50%" as a number; None if it is a size."""
    percent = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    return None if percent is None else float(percent[1]) / 100


def _limits_of(value: Mapping[str, int | str] | Sequence[tuple[str, int | str]]) -> Limits:
    """A mapping from devices to bytes as pairs; anything else as it is."""
    if isinstance(value, Mapping):
        return tuple((str(device), size) for device, size in value.items())
    return _to_tuple(value)


_to_tuple: Any = canonical(Limits)


@record
class Offload:
    """Run a model that does not fit its device: parts of it stream from the CPU or from disk.

    Attributes:
        placement: What is held where, as `fx.big.place` computes it. None computes it when the
            model is wrapped, from `memory`.
        memory: What the model may take, by device: `{"cuda:0": "10GiB", "cpu": "50%"}`. Devices
            that are not named are measured where `memory` is empty, and not used otherwise.
        prefetch: Units to read ahead of the one in use; None reads as many as memory allows.
        source: Where values come from: a model file, an index or a folder, as for
            `fx.load_model`. None takes those of the module.
        offload_folder: Where streamed units are written that are in no safetensors file yet, or not
            aligned to 16 bytes there; they are used again if they are still the same.
        pin: Keep units on the CPU in pinned memory, where an accelerator reads them.

    Example:
        >>> import fxtrain as fx
        >>> strategy = fx.Offload(memory={"cuda:0": "10GiB", "cpu": "50%"})
        >>> strategy.memory
        (('cuda:0', '10GiB'), ('cpu', '50%'))
    """

    kind: Literal["offload"] = attrs.field(default="offload", init=False)
    placement: Placement | None = attrs.field(default=None, metadata=OF_MODEL)
    memory: Limits = attrs.field(
        default=(),
        converter=_limits_of,
        validator=_are_limits,
        metadata={
            "choose": "bytes by device, such as {'cuda:0': '10GiB', 'cpu': '50%'}",
            **OF_MODEL,
        },
    )
    prefetch: int | None = attrs.field(default=None, validator=at_least(0))
    source: str | None = attrs.field(default=None, metadata=OF_MODEL)
    offload_folder: str | None = None
    pin: bool = True
